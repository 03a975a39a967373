"""Triton kernels that quantize a matrix along both of its dimensions. Needs the `triton` package.

The launchers are in `both.py`; the arithmetic is that of `cast_kernels`, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lumen_core.kernels.triton.cast_kernels import _e8m0_byte, _encode, _fp32_scale, _magnitude_bits, _reciprocal


@triton.jit
def _scaled(
    bits,
    scale_ptr,
    offset,
    mask,
    MX: tl.constexpr,
    ROUNDING: tl.constexpr,
    EMAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST_MANTISSA: tl.constexpr,
    LIMIT: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
    POW2: tl.constexpr,
):
    """Store the scales of blocks whose largest magnitudes are `bits`; their reciprocals."""
    if MX:
        byte = _e8m0_byte(bits, EMAX, MANTISSA, LARGEST_MANTISSA, ROUNDING)
        tl.store(scale_ptr + offset, byte.to(tl.uint8), mask=mask)
        inverse = (tl.maximum(254 - byte, 0) << 23).to(tl.float32, bitcast=True)
    else:
        scale = _fp32_scale(bits.to(tl.float32, bitcast=True), LIMIT, LEAST_AMAX, POW2)
        tl.store(scale_ptr + offset, scale, mask=mask)
        inverse = _reciprocal(scale)
    return inverse


@triton.jit
def cast_both(
    x_ptr,
    codes_ptr,
    scale_ptr,
    turned_ptr,
    turned_scale_ptr,
    factor_ptr,
    rows,
    columns,
    column_tiles,
    scale_columns,
    turned_scale_columns,
    head_room,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    MX: tl.constexpr,
    ROUNDING: tl.constexpr,
    EMAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST_MANTISSA: tl.constexpr,
    LIMIT: tl.constexpr,
    CAST: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
    POW2: tl.constexpr,
    B: tl.constexpr,
    TC: tl.constexpr,
    TURN_FIRST: tl.constexpr,
    TR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile of `TR x TC` values a program, read once.

    Written as codes `[rows, columns]` (with ROWS) and as codes of the transpose. KIND is `tensor` (`factor_ptr` holds
    the amax), `row` (blocks of `1 x B` along each dimension, `TR == B`) or `column` (`factor_ptr` holds the amax of
    each column, as fp32 bits; only the transpose).
    """
    pid = tl.program_id(0)
    row_tile = pid // column_tiles
    first_row = row_tile * TR
    first_column = (pid % column_tiles) * TC
    r = tl.arange(0, TR)[:, None]
    c = tl.arange(0, TC)[None, :]
    inside = (r < rows - first_row) & (c < columns - first_column)
    # WIDE where the last row of a tile starts beyond 2**31 values.
    start = first_row.to(tl.int64) * columns + first_column
    offset = (r.to(tl.int64) if WIDE else r) * columns + c
    raw = tl.load(x_ptr + start + offset, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    DTYPE: tl.constexpr = turned_ptr.dtype.element_ty

    if KIND == "tensor":
        scale = _fp32_scale(tl.load(factor_ptr).to(tl.float32), LIMIT, LEAST_AMAX, POW2, head_room)
        if pid == 0:
            tl.store(scale_ptr, scale)
        codes = _encode(x * _reciprocal(scale), LIMIT, CAST, DTYPE)
        turned = tl.trans(codes)
    elif KIND == "row":
        if ROWS:
            blocks = tl.reshape(x, (TR, TC // B, B))
            bits = tl.max(_magnitude_bits(blocks), axis=2)
            i = tl.arange(0, TR)[:, None] + first_row
            j = tl.arange(0, TC // B)[None, :] + first_column // B
            inverse = _scaled(
                bits, scale_ptr, i.to(tl.int64) * scale_columns + j, (i < rows) & (j < scale_columns), MX, ROUNDING,
                EMAX, MANTISSA, LARGEST_MANTISSA, LIMIT, LEAST_AMAX, POW2,
            )  # fmt: skip
            codes = tl.reshape(_encode(blocks * inverse[:, :, None], LIMIT, CAST, DTYPE), (TR, TC))
        j = tl.arange(0, TC) + first_column
        at = j.to(tl.int64) * turned_scale_columns + row_tile
        if TURN_FIRST:
            xt = tl.trans(raw).to(tl.float32)
            inverse = _scaled(
                tl.max(_magnitude_bits(xt), axis=1), turned_scale_ptr, at, j < columns, MX, ROUNDING, EMAX, MANTISSA,
                LARGEST_MANTISSA, LIMIT, LEAST_AMAX, POW2,
            )  # fmt: skip
            turned = _encode(xt * inverse[:, None], LIMIT, CAST, DTYPE)
        else:
            inverse = _scaled(
                tl.max(_magnitude_bits(x), axis=0), turned_scale_ptr, at, j < columns, MX, ROUNDING, EMAX, MANTISSA,
                LARGEST_MANTISSA, LIMIT, LEAST_AMAX, POW2,
            )  # fmt: skip
            t = _encode(x * inverse[None, :], LIMIT, CAST, DTYPE)
            # Two bytes a code while it crosses shared memory: fewer bank conflicts than one.
            turned = tl.trans(t.to(tl.uint8, bitcast=True).to(tl.int16)).to(tl.uint8).to(DTYPE, bitcast=True)
    else:
        j = tl.arange(0, TC) + first_column
        amax = tl.load(factor_ptr + j, mask=j < columns, other=0).to(tl.float32, bitcast=True)
        scale = _fp32_scale(amax, LIMIT, LEAST_AMAX, POW2)
        if row_tile == 0:
            tl.store(turned_scale_ptr + j, scale, mask=j < columns)
        turned = tl.trans(_encode(x * _reciprocal(scale)[None, :], LIMIT, CAST, DTYPE))

    if ROWS:
        tl.store(codes_ptr + start + offset, codes, mask=inside)
    turned_ptr += first_column.to(tl.int64) * rows + first_row
    r = tl.arange(0, TR)[None, :]
    c = tl.arange(0, TC)[:, None]
    inside = (r < rows - first_row) & (c < columns - first_column)
    tl.store(turned_ptr + (c.to(tl.int64) if WIDE else c) * rows + r, turned, mask=inside)


@triton.jit
def column_absmax(
    x_ptr,
    out_ptr,
    rows,
    columns,
    column_tiles,
    TR: tl.constexpr,
    TC: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Largest magnitude of each column, as fp32 bits, into zeroed int32; a program takes `TR * STEPS` rows.

    A maximum does not depend on the order of its operands: equal inputs give equal bits.
    """
    pid = tl.program_id(0)
    first_row = (pid // column_tiles) * (TR * STEPS)
    j = tl.arange(0, TC) + (pid % column_tiles) * TC
    x_ptr += first_row.to(tl.int64) * columns
    largest = tl.zeros([TR, TC], tl.int32)
    for step in range(STEPS):
        r = tl.arange(0, TR)[:, None] + step * TR
        inside = (r < rows - first_row) & (j[None, :] < columns)
        x = tl.load(x_ptr + r.to(tl.int64) * columns + j[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, _magnitude_bits(x))
    tl.atomic_max(out_ptr + j, tl.max(largest, axis=0), mask=j < columns, sem="relaxed")
