"""A low-precision matrix: codes, scales, and along which blocks they were taken."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lumen_core import casts
from lumen_core.casts import TENSOR_BLOCK
from lumen_core.formats import E8M0_DTYPE, ElementFormat


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix `[R, C]` quantized along its last dimension, the one a GEMM contracts.

    Attributes:
        data: codes, `[R, C]` in `fmt.dtype`, or `[R, ceil(C / 2)]` uint8 for E2M1 (low nibble first).
        scale: multiplies to dequantize. 0-dim fp32 for `(0, 0)`, `[R, 1]` fp32 for `(1, 0)`, otherwise one fp32 or
            `float8_e8m0fnu` value a block, `[ceil(R / rows), ceil(C / columns)]`, compact and row-major.
        fmt: element format.
        block: `(rows, columns)` that share a scale.
        shape: `(R, C)`.
    """

    data: torch.Tensor
    scale: torch.Tensor
    fmt: ElementFormat
    block: tuple[int, int]
    shape: tuple[int, int]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """High-precision values, `[R, C]`."""
        return casts.dequantize(self.data, self.scale, self.fmt, self.block, self.shape, dtype)

    @property
    def transposes_exactly(self) -> bool:
        """True where the transpose is blocked the same way, so that turning it re-quantizes nothing."""
        return self.block[0] == self.block[1]

    def transpose(self) -> QuantizedTensor:
        """`[C, R]` with contiguous codes: exact, nothing is quantized again.

        Raises:
            ValueError: the blocks are not square; quantize the high-precision transpose instead.
        """
        if not self.transposes_exactly:
            raise ValueError(
                f"blocks of {self.block[0]}x{self.block[1]} cannot be transposed without quantizing again: "
                "quantize the transpose of the high-precision tensor"
            )
        rows, columns = self.shape
        if self.fmt.packed:
            data = casts.pack_fp4(casts.unpack_fp4(self.data, columns).t())
        else:
            data = self.data.t().contiguous()
        scale = self.scale if self.block == TENSOR_BLOCK else transpose_scale(self.scale)
        return replace(self, data=data, scale=scale, shape=(columns, rows))


def transpose_scale(scale: torch.Tensor) -> torch.Tensor:
    """Block scales of the transposed matrix."""
    if scale.dtype == E8M0_DTYPE:  # a byte copy: compilers have no arithmetic for this dtype
        return scale.view(torch.uint8).t().contiguous().view(E8M0_DTYPE)
    return scale.t().contiguous()


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
) -> QuantizedTensor:
    """Quantize a matrix along its last dimension at any granularity.

    Args:
        x: `[R, C]`, any float dtype.
        fmt: element format.
        block: `(0, 0)` tensor, `(1, 0)` row, otherwise rows and columns of a block.
        mx: E8M0 scales rather than fp32.
        rounding: how an E8M0 scale is rounded.
        margin: tensor granularity only, see `casts.quantize_tensor`.
        amax: what to scale by instead of x's own, 0-dim for a tensor, `[R, 1]` for rows.
        pow2: fp32 scales rounded up to a power of two.
        noise: see `casts.encode`.
    """
    # Codes must come out row-major whatever the strides of x (a transposed view, an expanded gradient).
    x = x.contiguous()
    options = {"mx": mx, "rounding": rounding, "margin": margin, "pow2": pow2, "amax": amax, "noise": noise}
    if torch.compiler.is_compiling():
        # The compiler fuses plain torch with what surrounds it.
        data, scale = casts.quantize(x, fmt, block, **options)
    else:
        from lumen_core.kernels import quantize as kernels  # here: the package's other operations take QuantizedTensor

        data, scale = kernels.quantize(x, fmt, block, **options)
    return QuantizedTensor(data, scale, fmt, block, (x.shape[0], x.shape[1]))


def quantize_both(
    x: torch.Tensor,
    fmt: ElementFormat,
    block: tuple[int, int],
    *,
    rows: bool = True,
    mx: bool = False,
    rounding: str = "ceil",
    margin: int = 0,
    pow2: bool = False,
    amax: torch.Tensor | None = None,
) -> tuple[QuantizedTensor | None, QuantizedTensor]:
    """Quantize a matrix and its transpose, each along its last dimension, from one read where a kernel is there.

    Args:
        x: `[R, C]`, any float dtype.
        rows: False leaves out the first (None).
        others: as in `quantize`.

    Returns:
        `[R, C]` and `[C, R]`.
    """
    from lumen_core.kernels import quantize_both as kernels  # as above

    x, (r, c) = x.contiguous(), x.shape
    options = {"mx": mx, "rounding": rounding, "margin": margin, "pow2": pow2, "amax": amax}
    first, turned = kernels.quantize_both(x, fmt, block, rows=rows, **options)
    straight = None if first is None else QuantizedTensor(*first, fmt, block, (r, c))
    return straight, QuantizedTensor(*turned, fmt, block, (c, r))
