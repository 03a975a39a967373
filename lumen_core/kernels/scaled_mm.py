"""`torch._scaled_mm`: cuBLASLt on NVIDIA, hipBLASLt on AMD, oneDNN on a CPU."""

from __future__ import annotations

import torch

from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK
from lumen_core.kernels.query import GemmQuery
from lumen_core.tensor import QuantizedTensor

_ALIGNMENT = 16  # elements; both libraries refuse other sizes of the two matrix dimensions they check


def unsupported(q: GemmQuery) -> str | None:
    """Why this product cannot run here, or None where it can."""
    if any(block not in (TENSOR_BLOCK, ROW_BLOCK) for block in (q.a_block, q.b_block)):
        return "scales vary along the contraction"
    if q.a_fmt.packed or q.b_fmt.packed:
        return "4-bit elements"
    if q.out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"output dtype {q.out_dtype}"
    if q.device_type == "cpu":
        return None
    if q.k % _ALIGNMENT or q.n % _ALIGNMENT:
        return f"K={q.k} and N={q.n} must be multiples of {_ALIGNMENT}"
    if q.a_fmt.name == q.b_fmt.name == "e5m2":
        return "E5M2 x E5M2 has no kernel"
    return None


def gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, fast_accum: bool = False) -> torch.Tensor:
    """`a @ b.T`: `[M, C] x [N, C] -> [M, N]` in `out_dtype`.

    Args:
        fast_accum: let NVIDIA's tensor cores keep fewer bits of the running sum.
    """
    scale_a, scale_b = a.scale, b.scale
    dtype = out_dtype
    if a.block == ROW_BLOCK or b.block == ROW_BLOCK:
        # The row-wise kernel wants one scale a row on both sides, and on GPUs gives bf16 only.
        scale_a = scale_a.expand(a.shape[0], 1).contiguous() if a.block == TENSOR_BLOCK else scale_a
        scale_b = scale_b.expand(b.shape[0], 1).contiguous() if b.block == TENSOR_BLOCK else scale_b
        scale_b = scale_b.t()
        dtype = torch.bfloat16 if a.data.is_cuda else out_dtype
    out = torch._scaled_mm(
        a.data,
        b.data.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        out_dtype=dtype,
        use_fast_accum=fast_accum and a.data.is_cuda and torch.version.hip is None,
    )
    return out.to(out_dtype)
