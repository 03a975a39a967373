"""Rotary embedding on a GPU. Importing this file does not import `triton`."""

from __future__ import annotations

import torch

from lumen_core.kernels.triton.launching import on_device_of, power_of_two, rows_unsupported, warps

unsupported = rows_unsupported

_TILE = 1024  # pairs rotated at a time


def constants(heads: int, half: int, head_dim: int) -> dict[str, int]:
    """Compile-time arguments of the kernel, for the larger number of heads."""
    block = max(power_of_two(half), 8)
    return {
        "HALF": half,
        "D": head_dim,
        "HEADS": min(power_of_two(heads), max(1, _TILE // block)),
        "HALF_BLOCK": block,
        "REST_BLOCK": power_of_two(head_dim - 2 * half) if head_dim > 2 * half else 0,
    }


def tile_warps(fixed: dict[str, int], hip: bool | None = None) -> int:
    """8 pairs a thread."""
    return warps(4 * fixed["HEADS"] * fixed["HALF_BLOCK"], hip)


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.rope.rope`: one launch for both, one program a token."""
    from lumen_core.kernels.triton import rope_kernels as kernels

    q, k = _whole_tokens(q), _whole_tokens(k)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    fixed = constants(max(q.shape[1], k.shape[1]), cos.shape[1], q.shape[2])
    with on_device_of(q):
        kernels.rope[(q.shape[0],)](
            q, k, cos, sin, q_out, k_out, cos.shape[0], q.shape[1], k.shape[1], q.stride(0), k.stride(0),
            INVERSE=inverse, **fixed, num_warps=tile_warps(fixed),
        )  # fmt: skip
    return q_out, k_out


def _whole_tokens(x: torch.Tensor) -> torch.Tensor:
    """A token's heads lie one after the other; tokens may be apart, as in a slice of a fused projection."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
