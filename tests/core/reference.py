"""Independent references for the numerics tests. Nothing here imports `lumen_core`.

Element casts come from `ml_dtypes`, MX encodings from an exact fp64 evaluation of the OCP microscaling rules, and the
three GEMMs of a linear layer from these two. Blocks run along the last axis, which is the axis a GEMM contracts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch


@dataclass(frozen=True)
class Element:
    """One element format: `emin` is the exponent of its smallest normal, `emax` that of its largest."""

    name: str
    flavour: str
    ml: Any
    torch_dtype: torch.dtype
    max: float
    mantissa_bits: int
    emin: int
    emax: int
    codes: int = 256


ELEMENTS = {
    (e.name, e.flavour): e
    for e in (
        Element("e4m3", "ocp", ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn, 448.0, 3, -6, 8),
        Element("e5m2", "ocp", ml_dtypes.float8_e5m2, torch.float8_e5m2, 57344.0, 2, -14, 15),
        Element("e4m3", "fnuz", ml_dtypes.float8_e4m3fnuz, torch.float8_e4m3fnuz, 240.0, 3, -7, 7),
        Element("e5m2", "fnuz", ml_dtypes.float8_e5m2fnuz, torch.float8_e5m2fnuz, 57344.0, 2, -15, 15),
        Element("e2m1", "ocp", ml_dtypes.float4_e2m1fn, torch.uint8, 6.0, 1, 0, 2, codes=16),
    )
}
FP8 = [key for key in ELEMENTS if key[0] != "e2m1"]
#: OCP MX v1.0 section 5.4.1: byte 0 is 2**-127. An all-zero block takes it, as in torchao.
MIN_E8M0_EXPONENT = -127


def numpy_of(x: torch.Tensor) -> np.ndarray:
    """Any tensor as fp32 (or its own integer type) on the host."""
    x = x.detach().cpu()
    return (x.float() if x.is_floating_point() else x).numpy()


def bytes_of(codes: torch.Tensor) -> np.ndarray:
    """The raw bytes of a one-byte tensor."""
    return codes.detach().cpu().contiguous().view(torch.uint8).numpy()


def unpack_nibbles(packed: np.ndarray, columns: int) -> np.ndarray:
    """Low nibble first, along the last axis."""
    both = np.stack([packed & 0xF, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)[..., :columns]


def raw_codes(codes: torch.Tensor, element: Element, columns: int) -> np.ndarray:
    """One integer code a value, whatever the packing."""
    raw = bytes_of(codes)
    return unpack_nibbles(raw, columns) if element.name == "e2m1" else raw


# --- elements ---------------------------------------------------------------------------------------------------


def all_values(element: Element) -> np.ndarray:
    """The value of every code, in code order (fp64; NaN where the code is NaN)."""
    return np.arange(element.codes, dtype=np.uint8).view(element.ml).astype(np.float64)


def encode_saturating(x: np.ndarray, element: Element) -> np.ndarray:
    """Codes by `ml_dtypes` after clipping to the largest finite value: NaN stays NaN, ±inf saturates."""
    clipped = np.clip(np.asarray(x, dtype=np.float32), -element.max, element.max)
    return clipped.astype(element.ml).view(np.uint8)


def decode_codes(codes: np.ndarray, element: Element) -> np.ndarray:
    return codes.astype(np.uint8).view(element.ml).astype(np.float64)


def round_exact(x: np.ndarray, element: Element) -> np.ndarray:
    """Nearest value, ties to even, saturating: exact for fp64 input scaled by powers of two."""
    x = np.asarray(x, dtype=np.float64)
    _, exponent = np.frexp(np.abs(x))
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, element.emin) - element.mantissa_bits)
    return np.clip(np.rint(x / quantum) * quantum, -element.max, element.max)


# --- blocks -----------------------------------------------------------------------------------------------------


def block_amax(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """fp64 [ceil(R/br), ceil(C/bc)]; a ragged last block is as if padded with zeros."""
    rows, cols = block
    r, c = x.shape
    padded = np.zeros((math.ceil(r / rows) * rows, math.ceil(c / cols) * cols))
    padded[:r, :c] = np.abs(x)
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols).max(axis=(1, 3))


def spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """The scale of every value."""
    return np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: shape[0], : shape[1]]


def e8m0_exponent(amax: np.ndarray, element: Element, rounding: str) -> np.ndarray:
    """Unbiased exponent of the block scale, exactly (fp64 fractions and integer exponents, no logarithm)."""
    amax = np.asarray(amax, dtype=np.float64)
    fraction, exponent = np.frexp(amax)  # amax = fraction * 2**exponent, fraction in [0.5, 1)
    if rounding == "ceil":  # smallest e with max * 2**e >= amax
        max_fraction, max_exponent = np.frexp(element.max)
        result = exponent - max_exponent + (fraction > max_fraction)
    elif rounding == "floor":
        result = exponent - 1 - element.emax
    elif rounding == "even":  # amax rounded to the element's significant bits, then as floor
        carried = np.floor(np.ldexp(fraction, element.mantissa_bits + 1) + 0.5) >= 2 ** (element.mantissa_bits + 1)
        result = exponent - 1 - element.emax + carried
    else:
        raise ValueError(rounding)
    result = np.where(amax == 0, MIN_E8M0_EXPONENT, result)
    return np.clip(result, MIN_E8M0_EXPONENT, 127).astype(np.int64)


def mx_exact(
    x: np.ndarray, element: Element, block: tuple[int, int] = (1, 32), rounding: str = "ceil"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(elements [R, C] as values, scale bytes [R/br, C/bc], decoded [R, C]); fp64, exact."""
    x = np.asarray(x, dtype=np.float64)
    exponent = e8m0_exponent(block_amax(x, block), element, rounding)
    scale = spread(np.ldexp(1.0, exponent), block, x.shape)
    elements = round_exact(x / scale, element)
    return elements, (exponent + 127).astype(np.uint8), elements * scale


def fp32_scale(amax: np.ndarray, element: Element, *, pow2: bool = False, margin: int = 0) -> np.ndarray:
    """fp32 amax / max * 2**margin; `pow2` rounds up to a power of two. Zero amax: any finite scale will do (1)."""
    amax32 = np.asarray(amax, dtype=np.float32)
    scale = np.where(amax32 == 0, np.float32(1), amax32 / np.float32(element.max)) * np.float32(2.0**margin)
    if pow2:
        fraction, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), np.where(fraction == 0.5, exponent - 1, exponent))
    return scale.astype(np.float32)


def fp32_quantized(
    x: np.ndarray, element: Element, block: tuple[int, int], *, pow2: bool = False, margin: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(decoded fp64 [R, C], scale fp32) of any fp32-scaled granularity; block (R, C) is the tensor, (1, C) a row."""
    x = np.asarray(x, dtype=np.float64)
    scale = fp32_scale(block_amax(x, block), element, pow2=pow2, margin=margin)
    wide = spread(scale.astype(np.float64), block, x.shape)
    return round_exact(x / wide, element) * wide, scale


# --- whole linear layers ----------------------------------------------------------------------------------------


def quantized(x: np.ndarray, scaling: str, element: Element, *, square: bool, rounding: str) -> np.ndarray:
    """Decoded value of `x` quantized along its last axis by the granularity of a scaling."""
    if scaling in ("dynamic", "delayed"):
        return fp32_quantized(x, element, x.shape)[0]
    if scaling == "rowwise":
        return fp32_quantized(x, element, (1, x.shape[1]))[0]
    if scaling == "blockwise":
        return fp32_quantized(x, element, (128, 128) if square else (1, 128))[0]
    return mx_exact(x, element, (32, 32) if square else (1, 32), rounding)[2]


def linear_reference(
    x: np.ndarray, w: np.ndarray, g: np.ndarray, config: Any, flavour: str = "ocp"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(y, dx, dw) in fp64 of one quantized linear layer, each operand quantized from its high-precision value.

    Rowwise dgrad folds the weight's row scales into the gradient (DESIGN section 3). Deterministic parts only: no
    stochastic rounding, no Hadamard.
    """
    a, b, c = (
        ELEMENTS[(name, flavour)] for name in (config.activation_format, config.weight_format, config.gradient_format)
    )
    square = config.weight_block[0] > 1

    def q(value: np.ndarray, element: Element, square: bool = False) -> np.ndarray:
        return quantized(value, config.scaling, element, square=square, rounding=config.scale_rounding)

    y = q(x, a) @ q(w, b, square).T
    dw = q(np.ascontiguousarray(g.T), c) @ q(np.ascontiguousarray(x.T), a).T
    if config.scaling == "rowwise":
        decoded, scale = fp32_quantized(w, b, (1, w.shape[1]))
        codes = decoded / scale.astype(np.float64)
        dx = q(g * scale[:, 0].astype(np.float64), c) @ codes
    else:
        dx = q(g, c) @ q(np.ascontiguousarray(w.T), b, square).T
    return y, dx, dw


def sqnr(reference: Any, value: Any) -> float:
    """Signal to quantization-noise ratio in dB."""
    reference, value = (
        numpy_of(v).astype(np.float64) if isinstance(v, torch.Tensor) else np.asarray(v, np.float64)
        for v in (reference, value)
    )
    noise = np.square(reference - value).sum()
    return float("inf") if noise == 0 else float(10 * np.log10(np.square(reference).sum() / noise))


def relative(reference: Any, value: Any) -> float:
    """Relative Frobenius error."""
    return 10 ** (-sqnr(reference, value) / 20)
