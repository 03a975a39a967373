"""Reference quantization: the specification that every kernel is tested against.

All functions work on a matrix `[R, C]` whose **last** dimension is the one a GEMM contracts; to quantize along rows,
pass the transpose. A scale multiplies to dequantize, `x ~ code * scale`. amax is taken and scales are computed in
fp32 whatever the input dtype. Everything is plain torch, free of host synchronisation, and traceable by
`torch.compile`.

Granularity is named by a block `(rows, columns)`: `(0, 0)` one scale for the tensor, `(1, 0)` one for each row,
otherwise one for each block of that many rows and columns; the last block of a row or column may be partial.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lumen_core.formats import E8M0_BIAS, E8M0_DTYPE, E8M0_NAN, ElementFormat, element_format
from lumen_core.rounding import round_to_format, stochastic_noise
from lumen_core.tracing import is_zero

__all__ = [
    "block_amax",
    "convert_flavour",
    "decode",
    "dequantize",
    "e8m0_decode",
    "e8m0_from_amax",
    "encode",
    "encode_by",
    "pack_fp4",
    "quantize",
    "quantize_block",
    "quantize_mx",
    "quantize_row",
    "quantize_tensor",
    "scale_from_amax",
    "stochastic_noise",
    "unpack_fp4",
]

TENSOR_BLOCK = (0, 0)
ROW_BLOCK = (1, 0)

# scale and 1/scale must both be normal fp32 numbers (smallest normal 2**-126).
MIN_SCALE = 2.0**-126
_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1


# --- elements ---------------------------------------------------------------------------------------------------------


def encode(x: torch.Tensor, fmt: ElementFormat, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Round already scaled values to codes, saturating at `fmt.max`.

    Args:
        x: fp32 values, last dimension contiguous along the contraction for E2M1.
        fmt: target format.
        noise: uniform fp32 values in [0, 1) of x's shape for stochastic rounding; None rounds to nearest, ties to even.

    Returns:
        Codes: x's shape in `fmt.dtype`; for E2M1 `uint8` with `ceil(C / 2)` bytes in the last dimension.
        NaN stays NaN where the format has one (E2M1 has none: it becomes 0, and the block's scale carries the NaN).
    """
    # Clamp before the cast: what a cast does on overflow depends on dtype and torch version (FNUZ gives NaN).
    x = x.clamp(-fmt.max, fmt.max)
    if noise is not None or fmt.packed:
        x = round_to_format(x, fmt, noise)
    if not fmt.packed:
        return x.to(fmt.dtype)
    magnitude = x.abs()
    code = torch.where(magnitude < 2, magnitude * 2, torch.where(magnitude < 4, magnitude + 2, magnitude * 0.5 + 4))
    code = torch.nan_to_num(code, nan=0.0).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)
    return pack_fp4(code)


def decode(codes: torch.Tensor, fmt: ElementFormat, columns: int | None = None) -> torch.Tensor:
    """fp32 values of codes, scale not applied.

    Args:
        codes: as `encode` gives them.
        fmt: their format.
        columns: for E2M1 the number of values in the last dimension (default: two for each byte).
    """
    if not fmt.packed:
        return codes.to(torch.float32)
    code = unpack_fp4(codes, columns)
    magnitude = (code & 7).to(torch.float32)
    value = torch.where(magnitude < 4, magnitude * 0.5, torch.where(magnitude < 6, magnitude - 2, magnitude * 2 - 8))
    return torch.where(code > 7, -value, value)


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes `[..., C]` (uint8) into bytes `[..., ceil(C / 2)]`, the even element in the low nibble.

    An odd last element gets a zero partner.
    """
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: torch.Tensor, columns: int | None = None) -> torch.Tensor:
    """Inverse of `pack_fp4`: bytes `[..., B]` to 4-bit codes `[..., columns]` (default `2 * B`)."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return codes if columns is None else codes[..., :columns]


# --- scales -----------------------------------------------------------------------------------------------------------


def scale_from_amax(amax: torch.Tensor, fmt: ElementFormat, margin: int = 0, pow2: bool = False) -> torch.Tensor:
    """fp32 scale `amax / fmt.max * 2**margin`, never so small that it or its reciprocal leaves the normal range.

    Args:
        amax: largest magnitudes, any shape and float dtype, in the units of the data. 0 gives the smallest scale.
        fmt: element format.
        margin: binary orders of head room above amax.
        pow2: round the scale up to a power of two.
    """
    amax = amax.to(torch.float32).clamp(min=MIN_SCALE * fmt.max)
    # By a tensor: dividing by a Python number, CUDA multiplies by its rounded reciprocal, one unit off the CPU.
    scale = amax / torch.full_like(amax, fmt.max)
    if margin:
        scale = scale * 2.0**margin
    if pow2:
        bits = (scale.view(torch.int32) + _MANTISSA_MASK) & ~_MANTISSA_MASK
        scale = torch.where(torch.isfinite(scale), bits.view(torch.float32), scale)
    return scale


def e8m0_from_amax(amax: torch.Tensor, fmt: ElementFormat, rounding: str = "ceil") -> torch.Tensor:
    """E8M0 byte (uint8) of each amax; OCP MX v1.0 section 6.3 with a choice of rounding.

    `ceil` is `2**ceil(log2(amax / fmt.max))`: nothing saturates (arXiv 2506.08027 trains with it). `floor` is the
    specification's `2**(floor(log2(amax)) - emax)`: values above `fmt.max` times the scale saturate. `even` rounds
    amax to the element's mantissa bits first, then floors. The exponent is read from the fp32 bits: a `log2` just
    below a power of two rounds up. A NaN gives 255, a zero block 0.

    Raises:
        ValueError: unknown rounding.
    """
    amax = amax.to(torch.float32)
    bits = amax.view(torch.int32)
    if rounding == "even":
        bits = bits + (1 << (_MANTISSA_BITS - fmt.mantissa_bits - 1))
    exponent = (bits >> _MANTISSA_BITS) & 0xFF
    if rounding == "ceil":
        # fmt.max = 1.f * 2**emax; amax needs one step more when its own mantissa lies above that 1.f.
        largest_mantissa = int((fmt.max / 2.0**fmt.emax - 1.0) * (1 << _MANTISSA_BITS))
        exponent = exponent + ((bits & _MANTISSA_MASK) > largest_mantissa).to(torch.int32)
    elif rounding not in ("floor", "even"):
        raise ValueError(f"scale_rounding={rounding!r}: must be one of ceil, floor, even")
    byte = (exponent - fmt.emax).clamp(0, E8M0_NAN - 1)
    return torch.where(torch.isnan(amax), E8M0_NAN, byte).to(torch.uint8)


def e8m0_decode(byte: torch.Tensor) -> torch.Tensor:
    """fp32 value `2**(byte - 127)` of E8M0 bytes (`uint8` or `float8_e8m0fnu`); 0 is a subnormal, 255 is NaN."""
    if byte.dtype == E8M0_DTYPE:
        byte = byte.view(torch.uint8)
    exponent = byte.to(torch.int32)
    # Byte 0 is 2**-127, below the normal range: its fp32 pattern is the top mantissa bit.
    bits = torch.where(exponent == 0, 1 << (_MANTISSA_BITS - 1), exponent << _MANTISSA_BITS)
    bits = torch.where(exponent == E8M0_NAN, 0x7FC00000, bits)
    return bits.to(torch.int32).view(torch.float32)


def _e8m0_reciprocal(byte: torch.Tensor) -> torch.Tensor:
    # 2**(127 - byte), exact. amax of an fp32 tensor keeps byte <= 253, so the result is normal; 255 (NaN) gives 0
    # here, and its scale makes the block NaN.
    exponent = (2 * E8M0_BIAS - byte.to(torch.int32)).clamp(min=0)
    return (exponent << _MANTISSA_BITS).view(torch.float32)


# --- quantization -----------------------------------------------------------------------------------------------------


def quantize(
    x: torch.Tensor,
    fmt: ElementFormat,
    block: tuple[int, int],
    *,
    mx: bool = False,
    rounding: str = "ceil",
    margin: int = 0,
    pow2: bool = False,
    amax: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale at any granularity; arguments as in `lumen_core.tensor.quantize`."""
    if mx:
        return quantize_mx(x, fmt, block, rounding, noise)
    if block == TENSOR_BLOCK:
        return quantize_tensor(x, fmt, amax=amax, margin=margin, pow2=pow2, noise=noise)
    if block == ROW_BLOCK:
        return quantize_row(x, fmt, amax=amax, pow2=pow2, noise=noise)
    return quantize_block(x, fmt, block, pow2=pow2, noise=noise)


def quantize_tensor(
    x: torch.Tensor,
    fmt: ElementFormat,
    *,
    amax: torch.Tensor | None = None,
    margin: int = 0,
    pow2: bool = False,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for the whole tensor.

    Args:
        x: `[R, C]`, any float dtype, at least one element unless `amax` is given.
        amax: 0-dim tensor to scale by instead of x's own (delayed scaling); larger values saturate.

    Returns:
        codes `[R, C]`, scale fp32 0-dim.
    """
    scale = scale_from_amax(x.abs().amax() if amax is None else amax, fmt, margin, pow2)
    return encode(x.to(torch.float32) * (1.0 / scale), fmt, noise), scale


def quantize_row(
    x: torch.Tensor,
    fmt: ElementFormat,
    *,
    amax: torch.Tensor | None = None,
    pow2: bool = False,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for each row: codes `[R, C]`, scale fp32 `[R, 1]`; `amax` `[R, 1]` stands for the rows' own."""
    scale = scale_from_amax(x.abs().amax(dim=-1, keepdim=True) if amax is None else amax, fmt, 0, pow2)
    return encode(x.to(torch.float32) * (1.0 / scale), fmt, noise), scale


def quantize_block(
    x: torch.Tensor,
    fmt: ElementFormat,
    block: tuple[int, int],
    *,
    pow2: bool = False,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One fp32 scale for each `block`: codes `[R, C]`, scale `[ceil(R / rows), ceil(C / columns)]`."""
    blocks = _to_blocks(x, block)
    scale = scale_from_amax(_block_amax(blocks), fmt, 0, pow2)
    return encode(_from_blocks(blocks, 1.0 / scale, x.shape), fmt, noise), scale


def quantize_mx(
    x: torch.Tensor,
    fmt: ElementFormat,
    block: tuple[int, int] = (1, 32),
    rounding: str = "ceil",
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One E8M0 scale for each `block`.

    Returns:
        codes `[R, C]` (E2M1: `[R, ceil(C / 2)]` bytes), scale `float8_e8m0fnu [ceil(R / rows), ceil(C / columns)]`.
    """
    blocks = _to_blocks(x, block)
    byte = e8m0_from_amax(_block_amax(blocks), fmt, rounding)
    codes = encode(_from_blocks(blocks, _e8m0_reciprocal(byte), x.shape), fmt, noise)
    return codes, byte.view(E8M0_DTYPE)


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitudes of `x` `[R, C]` that the scales of `block` come from, fp32 of the scales' shape."""
    if block == TENSOR_BLOCK:
        return x.abs().amax().to(torch.float32)
    if block == ROW_BLOCK:
        return x.abs().amax(dim=-1, keepdim=True).to(torch.float32)
    return _block_amax(_to_blocks(x, block))


def encode_by(x: torch.Tensor, scale: torch.Tensor, fmt: ElementFormat, block: tuple[int, int]) -> torch.Tensor:
    """Codes of `x` `[R, C]` under scales that are there already: those of `quantize` under the scales it would give."""
    factor = _e8m0_reciprocal(scale.view(torch.uint8)) if scale.dtype == E8M0_DTYPE else 1.0 / scale
    if block[1] == 0:
        return encode(x.to(torch.float32) * factor, fmt)
    return encode(_from_blocks(_to_blocks(x, block), factor, (x.shape[0], x.shape[1])), fmt)


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    fmt: ElementFormat,
    block: tuple[int, int],
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`codes * scale` as a matrix of `shape` and `dtype`; exact in fp32, and in bf16 where scales are E8M0."""
    if scale.dtype == E8M0_DTYPE:
        scale = e8m0_decode(scale)
    values = decode(codes, fmt, shape[1])
    if block[1] == 0:
        return (values * scale).to(dtype)
    return _from_blocks(_to_blocks(values, block), scale, shape).to(dtype)


def convert_flavour(
    codes: torch.Tensor, scale: torch.Tensor, fmt: ElementFormat, flavour: str
) -> tuple[torch.Tensor, torch.Tensor, ElementFormat]:
    """Re-read FP8 codes in the other flavour without changing a decoded value.

    To FNUZ: the same bits mean half as much there (its exponent bias is one larger), so the scale doubles; 0x80, -0 in
    OCP, would be NaN and becomes 0x00. To OCP: the reverse, except for a tensor that uses FNUZ's top codes.

    Args:
        codes: FP8 codes in `fmt`.
        scale: fp32 scale.
        flavour: `ocp` or `fnuz`, the target.

    Returns:
        codes, scale and format in the target flavour.

    Raises:
        ValueError: E2M1, which has one flavour.
    """
    if fmt.packed:
        raise ValueError("convert_flavour: e2m1 has one flavour only")
    target = element_format(fmt.name, flavour)
    if target == fmt:
        return codes, scale, fmt
    bits = codes.view(torch.uint8)
    if flavour == "fnuz":
        magnitude = bits & 0x7F
        limit = 0x7F if fmt.name == "e4m3" else 0x7C  # OCP: E4M3 NaN is 0x7F, E5M2 inf and NaN start at 0x7C
        bits = torch.where(magnitude >= limit, 0x80, torch.where(bits == 0x80, 0, bits)).to(torch.uint8)
        return bits.view(target.dtype), scale * 2.0, target
    # FNUZ's top codes (E4M3 0x7F = 240, E5M2 from 0x7C) would read as NaN. Only where a tensor holds one, its values
    # are cast at their own scale; that loses odd multiples of FNUZ's smallest subnormal, half a step between OCP codes.
    # NaN (0x80) must not become -0.
    magnitude = bits & 0x7F
    has_top = (magnitude >= (0x7F if fmt.name == "e4m3" else 0x7C)).any()
    cast = encode(codes.to(torch.float32), target).view(torch.uint8)
    reread = torch.where(bits == 0x80, 0x7F, bits).to(torch.uint8)
    out = torch.where(has_top, cast, reread).view(target.dtype)
    return out, torch.where(has_top, scale, scale * 0.5), target


# --- helpers ----------------------------------------------------------------------------------------------------------


def _to_blocks(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """`[R, C]` as `[R / rows, rows, C / columns, columns]`, zeros filling partial blocks; `[R, C / columns, columns]`
    for blocks of one row, which compiles to simpler loops."""
    rows, columns = x.shape
    br, bc = block
    pad_rows, pad_columns = -rows % br, -columns % bc
    if not (is_zero(pad_rows) and is_zero(pad_columns)):
        x = F.pad(x, (0, pad_columns, 0, pad_rows))
    if br == 1:
        return x.reshape(rows, (columns + pad_columns) // bc, bc)
    return x.reshape((rows + pad_rows) // br, br, (columns + pad_columns) // bc, bc)


def _block_amax(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.abs().amax(dim=-1 if blocks.dim() == 3 else (1, 3)).to(torch.float32)


def _from_blocks(blocks: torch.Tensor, factor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """fp32 matrix of `shape` from blocks, each times its own factor."""
    if blocks.dim() == 3:
        scaled = blocks.to(torch.float32) * factor[:, :, None]
        out = scaled.reshape(scaled.shape[0], scaled.shape[1] * scaled.shape[2])
    else:
        scaled = blocks.to(torch.float32) * factor[:, None, :, None]
        out = scaled.reshape(scaled.shape[0] * scaled.shape[1], scaled.shape[2] * scaled.shape[3])
    return out[: shape[0], : shape[1]]
