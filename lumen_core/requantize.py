"""MXFP8 codes re-expressed with one scale for the whole matrix, for GEMMs that take no block scales.

E8M0 scales are powers of two, so going to the largest of them only moves exponents: nothing is lost but what falls
below the element format's subnormals. Plain torch, free of host synchronisation, traceable by `torch.compile`;
`lumen_core.kernels.triton.retile` does the same in one pass.
"""

from __future__ import annotations

import torch

from lumen_core import casts
from lumen_core.formats import E8M0_BIAS, ElementFormat
from lumen_core.tracing import is_zero


def mx_to_tensor(
    codes: torch.Tensor, scale: torch.Tensor, fmt: ElementFormat, block: tuple[int, int], shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of MX blocks as codes of one scale, `2**(largest block exponent)`, in the same format.

    A code becomes `code * 2**(its exponent - the largest)`, rounded to nearest, ties to even. In a block that lies d
    binary orders below the largest that is exact for every code whose magnitude is at least `2**d` times the format's
    smallest normal number, and errs by at most half the smallest subnormal for the rest.

    Args:
        codes: `[R, C]` as `casts.quantize_mx` gives them.
        scale: one a block, `float8_e8m0fnu` or its bytes as uint8 (inductor takes no E8M0 tensor into a CPU graph).
        fmt: element format of both.
        block: `(rows, columns)` that share a scale.
        shape: `(R, C)`.

    Returns:
        codes, scale 0-dim fp32: a normal number, or NaN where a block's scale is NaN.
    """
    if is_zero(codes.numel()):
        return codes, torch.full((), casts.MIN_SCALE, dtype=torch.float32, device=codes.device)
    byte = scale.view(torch.uint8).to(torch.int32)
    # Byte 0 is 2**-127, a subnormal number: the common scale stays normal.
    largest = byte.amax().clamp(min=1)
    # Below 2**-126 every product underflows any format to zero, as it does at 2**-126.
    factor = ((byte - largest + E8M0_BIAS).clamp(min=1) << 23).view(torch.float32)
    values = casts.dequantize(codes, factor, fmt, block, shape)
    return casts.encode(values, fmt), casts.e8m0_decode(largest)
