"""Triton kernels of `norm.py` beside this file, which says what each computes. Needs the `triton` package."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    columns,
    eps,
    CENTER: tl.constexpr,
    BIAS: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """`TR` whole rows a program."""
    row = tl.program_id(0) * TR + tl.arange(0, TR)
    column = tl.arange(0, TC)[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    offset = row.to(tl.int64)[:, None] * columns + column
    z = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if CENTER:
        mean = tl.sum(z, axis=1) / columns
        tl.store(mean_ptr + row, mean, mask=row < rows)
        z = tl.where(inside, z - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(z * z, axis=1) / columns + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = z * rstd[:, None] * tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    rows,
    columns,
    tiles,
    CENTER: tl.constexpr,
    BIAS: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """Every `programs`-th tile of rows a program, which leaves the sums over its rows in its row of the partials."""
    program = tl.program_id(0)
    column = tl.arange(0, TC)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros([TR, TC], tl.float32)
    dbias = tl.zeros([TR, TC], tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        row = tile * TR + tl.arange(0, TR)
        inside = (row < rows)[:, None] & (column < columns)
        offset = row.to(tl.int64)[:, None] * columns + column
        z = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        if CENTER:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
            z = tl.where(inside, z - mean, 0.0)
        z = z * rstd
        dweight += grad * z
        if BIAS:
            dbias += grad
        grad = grad * weight
        dx = grad - z * (tl.sum(grad * z, axis=1) / columns)[:, None]
        if CENTER:
            dx -= (tl.sum(grad, axis=1) / columns)[:, None]
        tl.store(dx_ptr + offset, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
    out = program.to(tl.int64) * columns + tl.arange(0, TC)
    kept = tl.arange(0, TC) < columns
    tl.store(dweight_ptr + out, tl.sum(dweight, axis=0), mask=kept)
    if BIAS:
        tl.store(dbias_ptr + out, tl.sum(dbias, axis=0), mask=kept)
