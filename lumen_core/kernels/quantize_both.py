"""Codes and scale of a matrix and of its transpose, each quantized along its last dimension."""

from __future__ import annotations

from typing import Any

import torch

from lumen_core import casts
from lumen_core.casts import TENSOR_BLOCK
from lumen_core.formats import E8M0_DTYPE, ElementFormat, arch_of, element_format, flavour_of
from lumen_core.kernels.query import QuantizeQuery
from lumen_core.kernels.registry import Candidate, Operation, always
from lumen_core.kernels.triton import both, cast
from lumen_core.kernels.triton.launching import has_triton
from lumen_core.tracing import constant_when_traced

Quantized = tuple[torch.Tensor, torch.Tensor]


def _reference(
    x: torch.Tensor, fmt: ElementFormat, block: tuple[int, int], *, rows: bool = True, **options: Any
) -> tuple[Quantized | None, Quantized]:
    if block != TENSOR_BLOCK:
        first = casts.quantize(x, fmt, block, **options) if rows else None
        return first, casts.quantize(x.t().contiguous(), fmt, block, **options)
    codes, scale = casts.quantize(x, fmt, block, **options)
    return ((codes, scale) if rows else None), (codes.t().contiguous(), scale)


QUANTIZE_BOTH = Operation(
    "quantize_both",
    (
        Candidate("triton", both.unsupported, both.quantize_both),
        Candidate("reference", always, _reference),
    ),
)


def quantize_both(
    x: torch.Tensor, fmt: ElementFormat, block: tuple[int, int], *, rows: bool = True, mx: bool = False, **options: Any
) -> tuple[Quantized | None, Quantized]:
    """`(codes, scale)` of a contiguous matrix and of its transpose by the first implementation that can.

    A compiled graph calls the kernel, too, where there is one: what a compiler makes of a transposed cast reads and
    writes single bytes. The amax of one scale stays in the graph, which computes it where the values are made.

    Args:
        rows: False leaves out the first (None).
        mx, options: as in `lumen_core.tensor.quantize`, without noise.
    """
    if torch.compiler.is_compiling():
        if _kernel_flavour() == fmt.flavour and not fmt.packed and not both.block_unsupported(x.dtype, block, mx):
            return _traced(x, fmt, block, rows=rows, mx=mx, **options)
        return _reference(x, fmt, block, rows=rows, mx=mx, **options)
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and not (x.requires_grad and torch.is_grad_enabled())
    query = QuantizeQuery(x.device.type, x.dtype, fmt, block, mx, False, x.numel(), plain)
    return QUANTIZE_BOTH(query, x, fmt, block, rows=rows, mx=mx, **options)


@constant_when_traced
def _kernel_flavour() -> str:
    """Flavour of the FP8 elements that the Triton casts write on this machine's GPU; empty without any."""
    if not torch.cuda.is_available() or not has_triton():
        return ""
    arch = arch_of("cuda")
    return flavour_of(arch) if cast.format_unsupported(element_format("e4m3", flavour_of(arch)), arch) is None else ""


def _traced(
    x: torch.Tensor,
    fmt: ElementFormat,
    block: tuple[int, int],
    *,
    rows: bool,
    mx: bool,
    rounding: str = "ceil",
    margin: int = 0,
    pow2: bool = False,
    amax: torch.Tensor | None = None,
) -> tuple[Quantized | None, Quantized]:
    if block == TENSOR_BLOCK and amax is None:
        amax = x.abs().amax()
    codes, scale, turned, turned_scale = torch.ops.lumen.quantize_both(
        x, amax, fmt.name, fmt.flavour, list(block), rows, mx, rounding, margin, pow2
    )
    if block == TENSOR_BLOCK:
        turned_scale = scale
    if mx:
        scale, turned_scale = scale.view(E8M0_DTYPE), turned_scale.view(E8M0_DTYPE)
    first = (codes.view(fmt.dtype), scale) if rows else None
    return first, (turned.view(fmt.dtype), turned_scale)


@torch.library.custom_op("lumen::quantize_both", mutates_args=())
def _op(
    x: torch.Tensor,
    amax: torch.Tensor | None,
    element: str,
    flavour: str,
    block: list[int],
    rows: bool,
    mx: bool,
    rounding: str,
    margin: int,
    pow2: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    fmt, nothing = element_format(element, flavour), x.new_empty(0, dtype=torch.uint8)
    options = {"mx": mx, "rounding": rounding, "margin": margin, "pow2": pow2, "amax": amax}
    run = both.quantize_both if x.device.type == "cuda" else _reference
    first, (turned, turned_scale) = run(x.contiguous(), fmt, (block[0], block[1]), rows=rows, **options)
    codes, scale = (nothing, nothing.clone()) if first is None else first
    if tuple(block) == TENSOR_BLOCK:  # no output may be another's alias
        scale, turned_scale = turned_scale, x.new_empty(0, dtype=torch.uint8)
    if mx:
        scale, turned_scale = scale.view(torch.uint8), turned_scale.view(torch.uint8)
    return codes.view(torch.uint8), scale, turned.view(torch.uint8), turned_scale


@_op.register_fake
def _(x, amax, element, flavour, block, rows, mx, rounding, margin, pow2):
    r, c = x.shape
    dtype, size = torch.uint8 if mx else torch.float32, block[1]
    codes = x.new_empty((r, c) if rows else (0,), dtype=torch.uint8)
    turned = x.new_empty((c, r), dtype=torch.uint8)
    if tuple(block) == TENSOR_BLOCK:
        return codes, x.new_empty((), dtype=torch.float32), turned, x.new_empty(0, dtype=torch.uint8)
    columns, turned_columns = (1, 1) if size == 0 else (-(-c // size), -(-r // size))
    scale = x.new_empty((r, columns), dtype=dtype) if rows else x.new_empty(0, dtype=torch.uint8)
    return codes, scale, turned, x.new_empty((c, turned_columns), dtype=dtype)
