"""The product of two quantized matrices."""

from __future__ import annotations

import torch

from lumen_core.kernels import reference, scaled_mm
from lumen_core.kernels.aiter import gemm as aiter_gemm
from lumen_core.kernels.query import GemmQuery
from lumen_core.kernels.registry import Candidate, Operation, always
from lumen_core.tensor import QuantizedTensor


def _needs_gpu(query: GemmQuery) -> str | None:
    return "a CPU multiplies faster in fp32" if query.device_type == "cpu" else None


GEMM = Operation(
    "gemm",
    (
        Candidate("aiter", aiter_gemm.unsupported, aiter_gemm.gemm),
        Candidate("aiter_shuffled", aiter_gemm.shuffled_unsupported, aiter_gemm.gemm_shuffled),
        Candidate("scaled_mm", scaled_mm.unsupported, scaled_mm.gemm),
        Candidate("dequantize_bf16", _needs_gpu, reference.gemm_dequantize_bf16),
        Candidate("reference", always, reference.gemm),
    ),
)


def gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, *, fast_accum: bool = False) -> torch.Tensor:
    """`a @ b.T` by the first implementation that can: `[M, C] x [N, C] -> [M, N]` in `out_dtype`.

    Args:
        fast_accum: allow the tensor core's less exact accumulation where the implementation has it.
    """
    return GEMM(query_of(a, b, out_dtype), a, b, out_dtype, fast_accum)


def query_of(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> GemmQuery:
    """What the candidates are asked about `a @ b.T`."""
    shape = a.shape[0], b.shape[0], a.shape[1]
    return GemmQuery(a.data.device.type, a.fmt, a.block, b.fmt, b.block, *shape, out_dtype)
