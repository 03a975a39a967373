"""Triton kernels that round the operands of attention, and the rounding of a tile. Needs the `triton` package.

The arithmetic is that of `lumen_core.kernels.attention_reference`: E4M3, scales that are powers of two, rounded up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lumen_core.kernels.triton.cast_kernels import _e8m0_byte, _encode, _magnitude_bits


@triton.jit
def _power_of_two(exponent_byte):
    return (exponent_byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_byte(bits, EMAX: tl.constexpr, TOP: tl.constexpr):
    """Biased exponent of the scale for a magnitude; 1 to 253, so that scale and reciprocal are normal numbers."""
    return tl.maximum(_e8m0_byte(bits, EMAX, 3, TOP, "ceil"), 1)


@triton.jit
def row_codes(x, DTYPE: tl.constexpr, LIMIT: tl.constexpr, EMAX: tl.constexpr, TOP: tl.constexpr, CAST: tl.constexpr):
    """Codes of a tile `[R, C]`, and one scale for each row, fp32 `[R]`.

    LIMIT is the largest value, EMAX its exponent, TOP its mantissa's bits as fp32 has them, CAST AMD's instruction.
    """
    byte = _scale_byte(tl.max(_magnitude_bits(x), axis=1), EMAX, TOP)
    codes = _encode(x * _power_of_two(254 - byte)[:, None], LIMIT, CAST, DTYPE)
    return codes, _power_of_two(byte)


@triton.jit
def mx_rounded(x, CODES: tl.constexpr, LIMIT: tl.constexpr, EMAX: tl.constexpr, TOP: tl.constexpr, CAST: tl.constexpr):
    """A tile `[R, C]` rounded to E4M3 codes with one scale for each 32 values of a row, decoded; exact in bf16."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, (R, C // 32, 32))
    byte = _scale_byte(tl.max(_magnitude_bits(blocks), axis=2), EMAX, TOP)
    codes = _encode(blocks * _power_of_two(254 - byte)[:, :, None], LIMIT, CAST, CODES)
    return tl.reshape(codes.to(tl.float32) * _power_of_two(byte)[:, :, None], (R, C))


@triton.jit
def _input_tile(
    x_ptr, batch_stride, token_stride, head_stride, tokens, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    start = tl.program_id(0) * ROWS
    x_ptr += tl.program_id(2).to(tl.int64) * batch_stride + tl.program_id(1).to(tl.int64) * head_stride
    x_ptr += start.to(tl.int64) * token_stride
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BD)[None, :]
    inside = (row < tokens - start) & (column < D)
    return tl.load(x_ptr + row * token_stride + column, mask=inside, other=0.0).to(tl.float32), start, inside


@triton.jit
def head_amax(
    x_ptr,
    amax_ptr,
    batch_stride,
    token_stride,
    head_stride,
    tokens,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Largest magnitude of each head of `[B, S, H, D]`, as fp32 bits, into a zeroed int32 `[B, H]`."""
    x, _, _ = _input_tile(x_ptr, batch_stride, token_stride, head_stride, tokens, ROWS, D, BD)
    largest = tl.max(tl.max(_magnitude_bits(x), axis=1), axis=0)
    tl.atomic_max(amax_ptr + tl.program_id(2) * tl.num_programs(1) + tl.program_id(1), largest, sem="relaxed")


@triton.jit
def head_codes(
    x_ptr,
    amax_ptr,
    scale_ptr,
    codes_ptr,
    turned_ptr,
    batch_stride,
    token_stride,
    head_stride,
    tokens,
    turned_tokens,
    PLAIN: tl.constexpr,
    TURNED: tl.constexpr,
    LIMIT: tl.constexpr,
    EMAX: tl.constexpr,
    TOP: tl.constexpr,
    CAST: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Codes `[B, S, H, D]`, and as `[B, H, D, turned_tokens]` with zeros at the end; a scale a head, fp32 `[B, H]`.

    8-bit matrix instructions read both operands along the axis that they contract: the second copy is for tokens.
    """
    heads = tl.num_programs(1)
    head = tl.program_id(2).to(tl.int64) * heads + tl.program_id(1)
    byte = _scale_byte(tl.load(amax_ptr + head), EMAX, TOP)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr + head, _power_of_two(byte))
    x, start, inside = _input_tile(x_ptr, batch_stride, token_stride, head_stride, tokens, ROWS, D, BD)
    codes = _encode(x * _power_of_two(254 - byte), LIMIT, CAST, codes_ptr.dtype.element_ty)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BD)[None, :]
    if PLAIN:
        codes_ptr += ((tl.program_id(2).to(tl.int64) * tokens + start) * heads + tl.program_id(1)) * D
        tl.store(codes_ptr + row * (heads * D) + column, codes, mask=inside)
    if TURNED:
        turned_ptr += head * D * turned_tokens + start
        row = tl.arange(0, ROWS)[None, :]
        column = tl.arange(0, BD)[:, None]
        inside = (row < turned_tokens - start) & (column < D)
        tl.store(turned_ptr + column * turned_tokens + row, tl.trans(codes), mask=inside)


@triton.jit
def mx_operand(
    x_ptr,
    by_channel_ptr,
    by_token_ptr,
    batch_stride,
    token_stride,
    head_stride,
    tokens,
    BY_CHANNEL: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    CODES: tl.constexpr,
    LIMIT: tl.constexpr,
    EMAX: tl.constexpr,
    TOP: tl.constexpr,
    CAST: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """`[B, S, H, D]` rounded to MX blocks of 32 along channels, and along tokens, as bf16."""
    x, start, inside = _input_tile(x_ptr, batch_stride, token_stride, head_stride, tokens, ROWS, D, BD)
    heads = tl.num_programs(1)
    out = ((tl.program_id(2).to(tl.int64) * tokens + start) * heads + tl.program_id(1)) * D
    offset = tl.arange(0, ROWS)[:, None] * (heads * D) + tl.arange(0, BD)[None, :]
    if BY_CHANNEL:
        tl.store(
            by_channel_ptr + out + offset, mx_rounded(x, CODES, LIMIT, EMAX, TOP, CAST).to(tl.bfloat16), mask=inside
        )
    if BY_TOKEN:
        rounded = tl.trans(mx_rounded(tl.trans(x), CODES, LIMIT, EMAX, TOP, CAST))
        tl.store(by_token_ptr + out + offset, rounded.to(tl.bfloat16), mask=inside)


@triton.jit
def row_delta(
    grad_ptr,
    out_ptr,
    grad_lse_ptr,
    delta_ptr,
    batch_stride,
    token_stride,
    head_stride,
    tokens,
    HAS_LSE: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """`sum(grad * out) - grad_lse` of each row, fp32 `[B, H, S]`: what the softmax takes off dP. Contiguous `out`."""
    heads = tl.num_programs(1)
    grad, start, _ = _input_tile(grad_ptr, batch_stride, token_stride, head_stride, tokens, ROWS, D, BD)
    out, _, _ = _input_tile(out_ptr, tokens * heads * D, heads * D, D, tokens, ROWS, D, BD)
    delta = tl.sum(grad * out, axis=1)
    row = start + tl.arange(0, ROWS)
    at = (tl.program_id(2).to(tl.int64) * heads + tl.program_id(1)) * tokens + row
    if HAS_LSE:
        delta -= tl.load(grad_lse_ptr + at, mask=row < tokens, other=0.0)
    tl.store(delta_ptr + at, delta, mask=row < tokens)
