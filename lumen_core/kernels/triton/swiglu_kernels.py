"""Triton kernels of `swiglu.py` beside this file. Needs the `triton` package."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(column_tiles, TR: tl.constexpr, TC: tl.constexpr):
    program = tl.program_id(0)
    row = (program // column_tiles) * TR + tl.arange(0, TR)
    column = (program % column_tiles) * TC + tl.arange(0, TC)
    return row.to(tl.int64)[:, None], column[None, :]


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def swiglu_forward(
    gate_ptr, up_ptr, out_ptr, rows, columns, column_tiles, gate_stride, up_stride, TR: tl.constexpr, TC: tl.constexpr
):
    """One tile a program."""
    row, column = _place(column_tiles, TR, TC)
    inside = (row < rows) & (column < columns)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    out = gate * _sigmoid(gate) * up
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(
    grad_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    rows,
    columns,
    column_tiles,
    grad_stride,
    gate_stride,
    up_stride,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """One tile a program."""
    row, column = _place(column_tiles, TR, TC)
    inside = (row < rows) & (column < columns)
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = _sigmoid(gate)
    dgate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = grad * gate * sigmoid
    offset = row * columns + column
    tl.store(dgate_ptr + offset, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + offset, dup.to(dup_ptr.dtype.element_ty), mask=inside)
