"""The gated MLP's activation, `silu(gate) * up` (Shazeer 2020, SwiGLU), and the MLP around it.

    d gate = g up s (1 + gate (1 - s)),   d up = g gate s,   s = sigmoid(gate)

The backward pass computes s again: only gate and up are kept, or their FP8 codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK
from lumen_core.formats import element_format, resolve_flavour
from lumen_core.kernels import swiglu as kernels
from lumen_core.tensor import QuantizedTensor, quantize

__all__ = ["gated_mlp", "swiglu"]

STORAGE = {"fp8_row": ROW_BLOCK, "fp8_tensor": TENSOR_BLOCK}


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, storage: str | None = None) -> torch.Tensor:
    """`silu(gate) * up` in fp32, rounded once.

    Args:
        gate, up: `[..., F]` of one shape and dtype (fp32, bf16, fp16; fp64 by the reference). Halves of one tensor
            along the last dimension are read in place.
        storage: how gate and up are kept for the backward pass: None as they are, `fp8_row` in E4M3 with a scale for
            each row, `fp8_tensor` with one for the tensor. The output is the same; the gradients carry the rounding.

    Returns:
        `[..., F]`, contiguous, in their dtype.

    Raises:
        ValueError: shapes or dtypes differ, or an unknown storage.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate is {gate.dtype} {tuple(gate.shape)} but up is {up.dtype} {tuple(up.shape)}")
    if storage is None:
        return kernels.swiglu(gate, up)
    if storage not in STORAGE:
        raise ValueError(f"storage={storage!r}: must be None or one of {', '.join(STORAGE)}")
    if gate.numel() == 0:
        return kernels.swiglu(gate, up)
    return _StoredSwiglu.apply(gate, up, STORAGE[storage])


def gated_mlp(
    x: torch.Tensor,
    gate_proj: Callable[[torch.Tensor], torch.Tensor],
    up_proj: Callable[[torch.Tensor], torch.Tensor],
    down_proj: Callable[[torch.Tensor], torch.Tensor],
    *,
    recompute: bool = False,
    storage: str | None = None,
) -> torch.Tensor:
    """`down_proj(swiglu(gate_proj(x), up_proj(x)))`.

    Args:
        x: `[..., K]`.
        gate_proj, up_proj, down_proj: modules or functions.
        recompute: keep gate and up only and make the input of `down_proj` again in the backward pass, instead of
            keeping all three.
        storage: see `swiglu`.

    Raises:
        ValueError: both options: what is kept for recomputing must be exact.
    """
    gate, up = gate_proj(x), up_proj(x)
    if not recompute:
        return down_proj(swiglu(gate, up, storage=storage))
    if storage is not None:
        raise ValueError(f"recompute=True and storage={storage!r} exclude each other: recomputing needs exact values")
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda g, u: down_proj(swiglu(g, u)), gate, up, use_reentrant=False)


class _StoredSwiglu(torch.autograd.Function):
    """SwiGLU that keeps codes of its inputs."""

    @staticmethod
    def forward(ctx, gate, up, block):
        fmt = element_format("e4m3", resolve_flavour("auto", gate.device))
        kept = [quantize(t.reshape(-1, t.shape[-1]), fmt, block) for t in (gate, up)]
        ctx.save_for_backward(*[part for q in kept for part in (q.data, q.scale)])
        ctx.fmt, ctx.block, ctx.shape, ctx.dtype = fmt, block, gate.shape, gate.dtype
        return kernels.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        gate, up = (
            QuantizedTensor(data, scale, ctx.fmt, ctx.block, tuple(data.shape)).dequantize(ctx.dtype).view(ctx.shape)
            for data, scale in (saved[:2], saved[2:])
        )
        return (*kernels.swiglu_backward(grad, gate, up), None)
