"""The other direction of a gathered weight, made in the backward pass and not before.

A compiler that sees both passes would rather keep the transposed copy from the forward pass than make it again: they
are equally large. But the gathered codes are freed between the passes and the copy would not be, so that all layers'
weights would be whole in memory at once. These operations take the gradient as an argument that they do not read:
nothing can run them before it exists.
"""

from __future__ import annotations

import torch

from lumen_core.casts import TENSOR_BLOCK
from lumen_core.formats import E8M0_DTYPE, element_format
from lumen_core.kernels.quantize import casts_by_triton
from lumen_core.requantize import mx_to_tensor
from lumen_core.tensor import QuantizedTensor


def transposed_codes(codes: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Contiguous `[C, R]` of 8-bit codes `[R, C]`, once `grad` is there."""
    return torch.ops.lumen.transposed_codes(codes.view(torch.uint8), grad).view(codes.dtype)


def tensor_codes(q: QuantizedTensor) -> QuantizedTensor:
    """MX codes as codes of one scale, see `requantize.mx_to_tensor`, in one pass where a kernel is there."""
    return _with_one_scale(q, None)


def transposed_tensor_codes(q: QuantizedTensor, grad: torch.Tensor) -> QuantizedTensor:
    """The same of the transpose, once `grad` is there."""
    return _with_one_scale(q, grad)


def _with_one_scale(q: QuantizedTensor, grad: torch.Tensor | None) -> QuantizedTensor:
    data, scale = torch.ops.lumen.tensor_codes(
        q.data.view(torch.uint8), q.scale.view(torch.uint8), q.fmt.name, q.fmt.flavour, list(q.block), grad
    )
    shape = q.shape if grad is None else (q.shape[1], q.shape[0])
    return QuantizedTensor(data.view(q.fmt.dtype), scale, q.fmt, TENSOR_BLOCK, shape)


@torch.library.custom_op("lumen::transposed_codes", mutates_args=())
def _transposed_codes(codes: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if casts_by_triton(codes, torch.bfloat16):
        from lumen_core.kernels.triton.retile import transpose_bytes

        return transpose_bytes(codes)
    return codes.t().clone(memory_format=torch.contiguous_format)  # contiguous() gives one row back as it is


@_transposed_codes.register_fake
def _(codes: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return codes.new_empty(codes.shape[1], codes.shape[0])


@torch.library.custom_op("lumen::tensor_codes", mutates_args=())
def _tensor_codes(
    codes: torch.Tensor, scale: torch.Tensor, element: str, flavour: str, block: list[int], grad: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    fmt, turned = element_format(element, flavour), grad is not None
    codes, scale = codes.view(fmt.dtype), scale.view(E8M0_DTYPE)
    if tuple(block) == (32, 32) and casts_by_triton(codes, torch.bfloat16):
        from lumen_core.kernels.triton import retile

        out, common = retile.mx_to_tensor(codes, scale, fmt, transposed=turned)
        return out.view(torch.uint8), common
    out, common = mx_to_tensor(codes, scale, fmt, (block[0], block[1]), (codes.shape[0], codes.shape[1]))
    out = out.view(torch.uint8)
    return (out.t().contiguous() if turned else out.clone()), common


@_tensor_codes.register_fake
def _(codes: torch.Tensor, scale: torch.Tensor, element: str, flavour: str, block: list[int], grad):
    rows, columns = codes.shape if grad is None else (codes.shape[1], codes.shape[0])
    return codes.new_empty(rows, columns), codes.new_empty((), dtype=torch.float32)
