"""RMSNorm and LayerNorm on a GPU. Launchers; importing this file does not import `triton`.

A row is read once and stays in registers. Gradients of weight and bias are summed by each program over its rows and
then over the programs, in a fixed order: equal inputs give equal bits on one device.
"""

from __future__ import annotations

import functools

import torch

from lumen_core.kernels.query import RowsQuery
from lumen_core.kernels.triton.launching import on_device_of, power_of_two, rows_unsupported

LONGEST_ROW = 16384
_TILE = 2048  # values of several short rows that one program takes together
_PROGRAMS_PER_PROCESSOR = 4  # of the backward pass: each leaves a partial sum for every column


def unsupported(q: RowsQuery) -> str | None:
    """Why rows of this kind cannot be normalised here, or None where they can."""
    if q.columns > LONGEST_ROW:
        return f"rows longer than {LONGEST_ROW}"
    return rows_unsupported(q)


def tile(columns: int) -> dict[str, int]:
    """Compile-time size of the tile that a program holds: whole rows."""
    block = max(power_of_two(columns), 16)
    return {"TR": max(1, _TILE // block), "TC": block}


def norm_warps(columns: int, hip: bool | None = None) -> int:
    """16 values a thread: the backward pass holds four arrays of them."""
    hip = torch.version.hip is not None if hip is None else hip
    size = tile(columns)
    return max(1, min(16, size["TR"] * size["TC"] // (1024 if hip else 512)))


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, center: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[R, C]` -> output, fp32 mean `[R]` (empty without `center`), fp32 rstd `[R]`; see `kernels.norm`."""
    from lumen_core.kernels.triton import norm_kernels as kernels

    rows, columns = x.shape
    y = torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty(rows if center else 0, dtype=torch.float32, device=x.device)
    size = tile(columns)
    with on_device_of(x):
        kernels.norm_forward[(-(-rows // size["TR"]),)](
            x, weight, weight if bias is None else bias.contiguous(), y, mean, rstd, rows, columns, eps,
            CENTER=center, BIAS=bias is not None, **size, num_warps=norm_warps(columns),
        )  # fmt: skip
    return y, mean, rstd


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    center: bool,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, and in fp32 of weight and bias (empty without one); see `kernels.norm`."""
    from lumen_core.kernels.triton import norm_kernels as kernels

    rows, columns = x.shape
    size = tile(columns)
    tiles = -(-rows // size["TR"])
    programs = min(tiles, _PROGRAMS_PER_PROCESSOR * _processors(x.device))
    dx = torch.empty_like(x)
    partial = torch.empty((2 if has_bias else 1, programs, columns), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        kernels.norm_backward[(programs,)](
            grad, x, weight, mean, rstd, dx, partial[0], partial[-1], rows, columns, tiles,
            CENTER=center, BIAS=has_bias, **size, num_warps=norm_warps(columns),
        )  # fmt: skip
    sums = partial.sum(1)
    return dx, sums[0].clone() if has_bias else sums[0], sums[1].clone() if has_bias else sums.new_empty(0)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
