"""Triton kernels behind the launchers beside this file, which say what each computes. Needs the `triton` package.

Every kernel repeats the arithmetic of `lumen_core.casts` in its order, so that codes and scales are equal bit for bit:
fp32 throughout, divisions rounded to nearest, a clamp before the cast, magnitudes compared as fp32 bit patterns (where
NaN lies above infinity, so that it propagates). Offsets within a tile are 32-bit, the tile's own is 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _encode(x, LIMIT: tl.constexpr, CAST: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of scaled values; `CAST` names AMD's instruction where Triton would not use it, else it is empty."""
    # A plain minimum and maximum may drop NaN.
    x = tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if CAST == "fp8":
        word = tl.inline_asm_elementwise("v_cvt_pk_fp8_f32 $0, $1, $1", "=v,v", [x], tl.int32, is_pure=True, pack=1)
        codes = word.to(tl.uint8).to(DTYPE, bitcast=True)
    elif CAST == "bf8":
        word = tl.inline_asm_elementwise("v_cvt_pk_bf8_f32 $0, $1, $1", "=v,v", [x], tl.int32, is_pure=True, pack=1)
        codes = word.to(tl.uint8).to(DTYPE, bitcast=True)
    else:
        codes = x.to(DTYPE)
    return codes


@triton.jit
def _fp32_scale(amax, LIMIT: tl.constexpr, LEAST_AMAX: tl.constexpr, POW2: tl.constexpr, head_room=1.0):
    amax = tl.maximum(amax, LEAST_AMAX, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.div_rn(amax, tl.full(amax.shape, LIMIT, tl.float32))
    scale = scale * head_room
    if POW2:
        bits = scale.to(tl.int32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        up = ((bits + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
        scale = tl.where(finite, up, scale)
    return scale


@triton.jit
def _reciprocal(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _e8m0_byte(
    bits, EMAX: tl.constexpr, MANTISSA: tl.constexpr, LARGEST_MANTISSA: tl.constexpr, ROUNDING: tl.constexpr
):
    """E8M0 byte, as int32, of magnitudes given as fp32 bits."""
    rounded = bits
    if ROUNDING == "even":
        rounded = bits + (1 << (22 - MANTISSA))
    exponent = (rounded >> 23) & 0xFF
    if ROUNDING == "ceil":
        exponent += ((bits & 0x7FFFFF) > LARGEST_MANTISSA).to(tl.int32)
    byte = tl.minimum(tl.maximum(exponent - EMAX, 0), 254)
    return tl.where(bits > 0x7F800000, 255, byte)


@triton.jit
def cast_flat(
    x_ptr,
    codes_ptr,
    factor_ptr,
    scale_ptr,
    n,
    head_room,
    FROM_AMAX: tl.constexpr,
    LIMIT: tl.constexpr,
    CAST: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
    POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`n` values with one scale: `factor_ptr` holds the scale, or an amax from which it is computed and stored."""
    pid = tl.program_id(0)
    scale = tl.load(factor_ptr).to(tl.float32)
    if FROM_AMAX:
        scale = _fp32_scale(scale, LIMIT, LEAST_AMAX, POW2, head_room)
        if pid == 0:
            tl.store(scale_ptr, scale)
    inverse = _reciprocal(scale)
    start = pid.to(tl.int64) * BLOCK
    x_ptr += start
    codes_ptr += start
    index = tl.arange(0, BLOCK)
    # A mask with a bound that is no multiple of 16 would make every load narrow: only the last block has one.
    if start + BLOCK <= n:
        x = tl.load(x_ptr + index).to(tl.float32)
        tl.store(codes_ptr + index, _encode(x * inverse, LIMIT, CAST, codes_ptr.dtype.element_ty))
    else:
        inside = index < n - start
        x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(codes_ptr + index, _encode(x * inverse, LIMIT, CAST, codes_ptr.dtype.element_ty), mask=inside)


@triton.jit
def cast_rows(
    x_ptr,
    codes_ptr,
    scale_ptr,
    columns,
    LIMIT: tl.constexpr,
    CAST: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
    POW2: tl.constexpr,
    ONE_PASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program, one fp32 scale a row; a row longer than a block is read twice."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * columns
    x_ptr += start
    codes_ptr += start
    index = tl.arange(0, BLOCK)
    if ONE_PASS:
        inside = index < columns
        x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
        bits = tl.max(_magnitude_bits(x), axis=0)
        scale = _fp32_scale(bits.to(tl.float32, bitcast=True), LIMIT, LEAST_AMAX, POW2)
        tl.store(scale_ptr + row, scale)
        tl.store(
            codes_ptr + index, _encode(x * _reciprocal(scale), LIMIT, CAST, codes_ptr.dtype.element_ty), mask=inside
        )
    else:
        largest = tl.zeros([BLOCK], tl.int32)
        for block in range(0, columns, BLOCK):
            x = tl.load(x_ptr + block + index, mask=index < columns - block, other=0.0)
            largest = tl.maximum(largest, _magnitude_bits(x))
        amax = tl.max(largest, axis=0).to(tl.float32, bitcast=True)
        scale = _fp32_scale(amax, LIMIT, LEAST_AMAX, POW2)
        tl.store(scale_ptr + row, scale)
        inverse = _reciprocal(scale)
        for block in range(0, columns, BLOCK):
            inside = index < columns - block
            x = tl.load(x_ptr + block + index, mask=inside, other=0.0).to(tl.float32)
            codes = _encode(x * inverse, LIMIT, CAST, codes_ptr.dtype.element_ty)
            tl.store(codes_ptr + block + index, codes, mask=inside)


@triton.jit
def cast_blocks(
    x_ptr,
    codes_ptr,
    scale_ptr,
    rows,
    columns,
    column_tiles,
    scale_columns,
    MX: tl.constexpr,
    ROUNDING: tl.constexpr,
    EMAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST_MANTISSA: tl.constexpr,
    LIMIT: tl.constexpr,
    CAST: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
    POW2: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile of `TR x TC` values a program, one scale for each `BR x BC` of them: a byte with MX, else fp32."""
    pid = tl.program_id(0)
    first_row = (pid // column_tiles) * TR
    first_column = (pid % column_tiles) * TC
    start = first_row.to(tl.int64) * columns + first_column
    r = tl.arange(0, TR)[:, None]
    c = tl.arange(0, TC)[None, :]
    inside = (r < rows - first_row) & (c < columns - first_column)
    # WIDE where the last row of a tile starts beyond 2**31 values.
    offset = (r.to(tl.int64) if WIDE else r) * columns + c
    x = tl.load(x_ptr + start + offset, mask=inside, other=0.0).to(tl.float32)
    blocks = tl.reshape(x, (TR // BR, BR, TC // BC, BC))
    bits = tl.max(tl.max(_magnitude_bits(blocks), axis=3), axis=1)

    i = tl.arange(0, TR // BR)[:, None]
    j = tl.arange(0, TC // BC)[None, :]
    scale_ptr += (first_row // BR).to(tl.int64) * scale_columns + first_column // BC
    scale_offset = (i.to(tl.int64) if WIDE else i) * scale_columns + j
    has_scale = (i * BR < rows - first_row) & (j < scale_columns - first_column // BC)
    if MX:
        byte = _e8m0_byte(bits, EMAX, MANTISSA, LARGEST_MANTISSA, ROUNDING)
        tl.store(scale_ptr + scale_offset, byte.to(tl.uint8), mask=has_scale)
        inverse = (tl.maximum(254 - byte, 0) << 23).to(tl.float32, bitcast=True)
    else:
        scale = _fp32_scale(bits.to(tl.float32, bitcast=True), LIMIT, LEAST_AMAX, POW2)
        tl.store(scale_ptr + scale_offset, scale, mask=has_scale)
        inverse = _reciprocal(scale)
    codes = _encode(blocks * inverse[:, None, :, None], LIMIT, CAST, codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + start + offset, tl.reshape(codes, (TR, TC)), mask=inside)


@triton.jit
def _absmax(x_ptr, out_ptr, left, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Largest magnitude of the first `min(left, BLOCK * STEPS)` values, as fp32 bits, into `out_ptr`.

    A maximum does not depend on the order of its operands: equal inputs give equal bits.
    """
    offset = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.int32)
    whole = tl.minimum(left // BLOCK, STEPS).to(tl.int32)
    for step in range(whole):
        largest = tl.maximum(largest, _magnitude_bits(tl.load(x_ptr + step * BLOCK + offset)))
    if whole < STEPS:  # the end of the array; masked loads are narrow ones
        x_ptr += whole * BLOCK
        x = tl.load(x_ptr + offset, mask=offset < left - whole * BLOCK, other=0.0)
        largest = tl.maximum(largest, _magnitude_bits(x))
    tl.atomic_max(out_ptr, tl.max(largest, axis=0), sem="relaxed")


@triton.jit
def absmax_of_one(x_ptr, out_ptr, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Largest magnitude of `n` values into a zeroed int32; a program reduces `BLOCK * STEPS` of them."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    _absmax(x_ptr + start, out_ptr, n - start, BLOCK, STEPS)


@triton.jit
def absmax_of_many(
    table_ptr,
    out_ptr,
    count,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The same for each of `count` arrays.

    `table_ptr` holds three int64 rows of `count`: first program of an array, its address, how many values it has.
    """
    pid = tl.program_id(0)
    index = tl.arange(0, COUNT_BLOCK)
    first = tl.load(table_ptr + index, mask=index < count, other=0x7FFFFFFF)
    # Arrays start at or before this program up to its own; an empty one starts where its successor does.
    which = tl.sum((first <= pid).to(tl.int32), axis=0) - 1
    start = (pid - tl.load(table_ptr + which)) * (BLOCK * STEPS)
    x_ptr = tl.load(table_ptr + count + which).to(tl.pointer_type(DTYPE)) + start
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    _absmax(x_ptr, out_ptr + which, tl.load(table_ptr + 2 * count + which) - start, BLOCK, STEPS)


@triton.jit
def retile(
    codes_ptr,
    scale_ptr,
    largest_ptr,
    out_ptr,
    out_scale_ptr,
    rows,
    columns,
    column_tiles,
    scale_columns,
    RESCALE: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    LIMIT: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Move a tile of codes, transposed or not, on the way from one E8M0 scale a block to the largest of them."""
    pid = tl.program_id(0)
    first_row = (pid // column_tiles) * TR
    first_column = (pid % column_tiles) * TC
    r = tl.arange(0, TR)[:, None]
    c = tl.arange(0, TC)[None, :]
    inside = (r < rows - first_row) & (c < columns - first_column)
    codes_ptr += first_row.to(tl.int64) * columns + first_column
    codes = tl.load(codes_ptr + (r.to(tl.int64) if WIDE else r) * columns + c, mask=inside)
    if RESCALE:
        # Byte 0 is a subnormal scale: the common one stays a normal number.
        largest = tl.maximum(tl.load(largest_ptr).to(tl.int32), 1)
        if pid == 0:
            bits = tl.where(largest == 255, 0x7FC00000, largest << 23)
            tl.store(out_scale_ptr, bits.to(tl.float32, bitcast=True))
        i = tl.arange(0, TR // BLOCK)[:, None]
        j = tl.arange(0, TC // BLOCK)[None, :]
        scale_ptr += (first_row // BLOCK).to(tl.int64) * scale_columns + first_column // BLOCK
        has_scale = (i * BLOCK < rows - first_row) & (j < scale_columns - first_column // BLOCK)
        byte = tl.load(scale_ptr + (i.to(tl.int64) if WIDE else i) * scale_columns + j, mask=has_scale, other=0)
        factor = (tl.maximum(byte.to(tl.int32) - largest + 127, 1) << 23).to(tl.float32, bitcast=True)
        values = tl.reshape(codes.to(tl.float32), (TR // BLOCK, BLOCK, TC // BLOCK, BLOCK))
        codes = tl.reshape(
            _encode(values * factor[:, None, :, None], LIMIT, CAST, codes_ptr.dtype.element_ty), (TR, TC)
        )
    if TRANSPOSE:
        out_ptr += first_column.to(tl.int64) * rows + first_row
        r = tl.arange(0, TR)[None, :]
        c = tl.arange(0, TC)[:, None]
        inside = (r < rows - first_row) & (c < columns - first_column)
        tl.store(out_ptr + (c.to(tl.int64) if WIDE else c) * rows + r, tl.trans(codes), mask=inside)
    else:
        out_ptr += first_row.to(tl.int64) * columns + first_column
        tl.store(out_ptr + (r.to(tl.int64) if WIDE else r) * columns + c, codes, mask=inside)
