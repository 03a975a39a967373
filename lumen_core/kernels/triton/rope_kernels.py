"""Triton kernel of `rope.py` beside this file. Needs the `triton` package."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotate_token(
    x_ptr,
    out_ptr,
    heads,
    cos,
    sin,
    HALF: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        pair = tl.arange(0, HALF_BLOCK)[None, :]
        inside = (head < heads) & (pair < HALF)
        offset = head * D + pair
        first = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
        dtype = out_ptr.dtype.element_ty
        tl.store(out_ptr + offset, (first * cos - second * sin).to(dtype), mask=inside)
        tl.store(out_ptr + offset + HALF, (second * cos + first * sin).to(dtype), mask=inside)
        if REST_BLOCK > 0:
            rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
            kept = (head < heads) & (rest < D)
            tl.store(out_ptr + head * D + rest, tl.load(x_ptr + head * D + rest, mask=kept), mask=kept)


@triton.jit
def rope(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    positions,
    q_heads,
    k_heads,
    q_stride,
    k_stride,
    INVERSE: tl.constexpr,
    HALF: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """One token a program: its row of cos and sin is read once for all heads of q and k."""
    token = tl.program_id(0)
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    at = (token % positions).to(tl.int64) * HALF + pair
    cos = tl.load(cos_ptr + at, mask=pair < HALF, other=0.0)
    sin = tl.load(sin_ptr + at, mask=pair < HALF, other=0.0)
    if INVERSE:
        sin = -sin
    token = token.to(tl.int64)
    q_out_ptr += token * q_heads * D
    k_out_ptr += token * k_heads * D
    _rotate_token(q_ptr + token * q_stride, q_out_ptr, q_heads, cos, sin, HALF, D, HEADS, HALF_BLOCK, REST_BLOCK)
    _rotate_token(k_ptr + token * k_stride, k_out_ptr, k_heads, cos, sin, HALF, D, HEADS, HALF_BLOCK, REST_BLOCK)
