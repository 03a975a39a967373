"""GEMMs that run on any device: the numbers every faster kernel is compared with."""

from __future__ import annotations

import torch

from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK, decode
from lumen_core.tensor import QuantizedTensor
from lumen_core.tracing import as_dtype


def gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, fast_accum: bool = False) -> torch.Tensor:
    """`a @ b.T` in fp32 arithmetic, fp64 for an fp64 output: `[M, C] x [N, C] -> [M, N]`.

    Scales that are constant along the contraction leave the sum, as they do in hardware: then the product of codes is
    taken first and scaled after.
    """
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    if _scale_leaves_sum(a) and _scale_leaves_sum(b):
        codes = as_dtype(decode(a.data, a.fmt, a.shape[1]), wide)
        product = codes @ as_dtype(decode(b.data, b.fmt, b.shape[1]), wide).t()
        scale = a.scale * (b.scale if b.block == TENSOR_BLOCK else b.scale.t())
        return as_dtype(product * scale, out_dtype)
    return as_dtype(a.dequantize(wide) @ b.dequantize(wide).t(), out_dtype)


def gemm_dequantize_bf16(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, fast_accum: bool = False
) -> torch.Tensor:
    """The same on bf16 matrix units with fp32 accumulation, for GPUs without the scaled instruction.

    Exact in its operands where scales are powers of two (8 bits of code and scale fit bf16); an fp32 scale is rounded
    together with its code to 8 bits, 30 dB below the quantization itself.
    """
    return matmul_bf16(a.dequantize(torch.bfloat16), b.dequantize(torch.bfloat16), out_dtype)


def matmul_bf16(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """`a @ b.T` with operands rounded to bf16 (fp16 operands stay fp16) and an fp32 sum (a CPU's fp64 output: fp64).

    On a CPU, where bf16 products are slow, the rounded operands are multiplied in fp32: the same products.
    """
    dtype = torch.float16 if a.dtype == b.dtype == torch.float16 else torch.bfloat16
    if a.device.type == "cpu":
        wide = torch.float64 if out_dtype == torch.float64 else torch.float32
        return as_dtype(as_dtype(_rounded(a, dtype), wide) @ as_dtype(_rounded(b, dtype), wide).t(), out_dtype)
    a, b = a.to(dtype), b.to(dtype)
    if out_dtype == torch.float32:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return as_dtype(a @ b.t(), out_dtype)


def _scale_leaves_sum(x: QuantizedTensor) -> bool:
    return x.block in (TENSOR_BLOCK, ROW_BLOCK)


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values of `x` rounded to `dtype`."""
    if dtype == torch.bfloat16 and x.dtype == torch.float32 and torch.compiler.is_compiling():
        # The compiler drops a round trip through bf16 as needless; integer arithmetic rounds all the same. To nearest,
        # ties to even; NaN keeps its quiet bit because its mantissa is not all ones in practice (0x7FC00000).
        bits = x.contiguous().view(torch.int32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return bits.view(torch.float32)
    return x.to(dtype).to(torch.float32)
