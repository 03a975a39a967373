"""Codes and scale of a matrix."""

from __future__ import annotations

from typing import Any

import torch

from lumen_core import casts
from lumen_core.formats import ElementFormat, element_format, resolve_flavour
from lumen_core.kernels.aiter import quantize as aiter_quantize
from lumen_core.kernels.query import QuantizeQuery
from lumen_core.kernels.registry import Candidate, Operation, always
from lumen_core.kernels.triton import cast as triton_cast


def _triton(x: torch.Tensor, fmt: ElementFormat, block: tuple[int, int], *, noise: None, **options: Any):
    return triton_cast.quantize(x, fmt, block, **options)


QUANTIZE = Operation(
    "quantize",
    (
        Candidate("aiter", aiter_quantize.unsupported, aiter_quantize.quantize),
        Candidate("triton", triton_cast.unsupported, _triton),
        Candidate("reference", always, casts.quantize),
    ),
)


def quantize(
    x: torch.Tensor,
    fmt: ElementFormat,
    block: tuple[int, int],
    *,
    mx: bool = False,
    noise: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of a contiguous matrix by the first implementation that can: all give the same bits.

    Args: as in `lumen_core.tensor.quantize`.
    """
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and not (x.requires_grad and torch.is_grad_enabled())
    query = QuantizeQuery(
        x.device.type,
        x.dtype,
        fmt,
        block,
        mx,
        noise is not None,
        x.numel(),
        plain,
        x.shape[1],
        options.get("rounding", "ceil"),
        options.get("pow2", False),
        options.get("amax") is not None,
    )
    return QUANTIZE(query, x, fmt, block, mx=mx, noise=noise, **options)


def casts_by_triton(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """True where the Triton casts can run for values of `dtype` on x's device; what goes with them asks this, too."""
    if x.device.type == "cpu":
        return False
    fmt = element_format("e4m3", resolve_flavour("auto", x.device))
    query = QuantizeQuery(x.device.type, dtype, fmt, (0, 0), mx=False, noise=False, elements=x.numel())
    return dict(QUANTIZE.explain(query))["triton"] is None
