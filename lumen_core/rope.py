"""Rotary position embedding in the rotate-half (GPT-NeoX, Llama) layout.

    y1 = x1 cos - x2 sin,   y2 = x2 cos + x1 sin        (Su et al. 2021, equation 34; pairs are R/2 elements apart)

A rotation is orthogonal: its backward pass is the rotation by the negative angle, and nothing but the table is kept.
"""

from __future__ import annotations

import torch

from lumen_core.kernels.norm import at_least_fp32
from lumen_core.kernels.rope import rope

__all__ = ["apply_rope", "rope_tables"]


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions' angles, in fp32.

    Args:
        q: `[B, S, Hq, D]` or `[T, Hq, D]` (fp32, bf16, fp16; fp64 by the reference).
        k: the same with `Hk` heads.
        cos, sin: fp32 (fp64 for fp64 inputs), one column for each pair, R/2 <= D/2 of them: `[S, R/2]`, `[1, S, R/2]`
            or `[B, S, R/2]`, and `[T, R/2]`. Elements of a head beyond R pass through. Hugging Face's tables repeat
            their columns: pass `cos[..., : R // 2]`.

    Returns:
        Contiguous rotated copies.

    Raises:
        TypeError: dtypes of q and k differ, or the tables are not fp32: bf16 positions and angles are wrong beyond a
            few hundred tokens.
        ValueError: shapes do not fit.
    """
    wide = at_least_fp32(q.dtype)
    if q.dtype != k.dtype:
        raise TypeError(f"q is {q.dtype} but k is {k.dtype}")
    if cos.dtype != wide or sin.dtype != wide:
        raise TypeError(
            f"cos is {cos.dtype} and sin {sin.dtype}: must be {wide} (a mixed-precision wrapper may have cast them: "
            "FSDP2's cast_forward_inputs does)"
        )
    tokens = q.shape[:-2]
    fits = q.dim() in (3, 4) and k.shape[:-2] == tokens and k.shape[-1] == q.shape[-1] and cos.shape == sin.shape
    allowed = (tokens, tokens[-1:], (1, *tokens[-1:]))
    if not fits or cos.shape[:-1] not in allowed or not 0 < 2 * cos.shape[-1] <= q.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit"
        )
    table = cos.shape[:-1].numel(), cos.shape[-1]
    flat = [x.reshape(tokens.numel(), *x.shape[-2:]) for x in (q, k)]
    q_out, k_out = rope(*flat, cos.reshape(table), sin.reshape(table), False)
    return q_out.reshape(q.shape), k_out.reshape(k.shape)


def rope_tables(positions: torch.Tensor, rotary_dim: int, theta: float = 10000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of `position * theta^(-2i/R)`.

    The angle is computed in fp64: in fp32 that of position 10^6 is already off by up to 0.03.

    Args:
        positions: integers, any shape.
        rotary_dim: R, even.
        theta: base.

    Returns:
        Two fp32 tensors `[*positions.shape, R/2]`.

    Raises:
        TypeError: positions are floating-point; as bf16 they are wrong beyond 256.
        ValueError: rotary_dim is odd or not positive.
    """
    if positions.is_floating_point():
        raise TypeError(f"positions are {positions.dtype}: must be integers")
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim}: must be even and positive")
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device) / rotary_dim
    angle = positions[..., None].to(torch.float64) * theta**-exponent
    return angle.cos().to(torch.float32), angle.sin().to(torch.float32)
