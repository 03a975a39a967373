"""`torch._scaled_mm`: cuBLASLt on NVIDIA, hipBLASLt on AMD, oneDNN on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK
from lumen_core.formats import arch_of, resolve_flavour
from lumen_core.kernels.query import GemmQuery
from lumen_core.tensor import QuantizedTensor
from lumen_core.tracing import as_dtype, constant_when_traced, is_zero

_ALIGNMENT = 16  # elements; both libraries refuse other sizes of the two matrix dimensions they check
_BLOCK = 128  # of the block-scaled kernels
_BLOCKS = ((1, _BLOCK), (_BLOCK, _BLOCK))
_CPU_SUPPORT: dict[tuple[torch.dtype, torch.dtype, bool, torch.dtype], bool] = {}


@constant_when_traced
def _gpu_has_fp8() -> bool:
    arch = arch_of("cuda")
    if arch.startswith("gfx"):
        return arch.startswith(("gfx94", "gfx95", "gfx12"))
    return torch.cuda.get_device_capability() >= (8, 9)


@constant_when_traced
def _runs_on_cpu(a: torch.dtype, b: torch.dtype, row: bool, out_dtype: torch.dtype) -> bool:
    """Tried on a tiny product: which dtypes and scales the CPU kernel takes differs by torch version and processor."""
    key = (a, b, row, out_dtype)
    if key not in _CPU_SUPPORT:
        scale = torch.ones(16, 1) if row else torch.ones(())
        left, right = torch.ones(16, 16).to(a), torch.ones(16, 16).to(b)
        try:
            out = torch._scaled_mm(left, right.t(), scale_a=scale, scale_b=scale.t(), out_dtype=out_dtype)
            _CPU_SUPPORT[key] = bool((out == 16).all())
        except (RuntimeError, ValueError, NotImplementedError):
            _CPU_SUPPORT[key] = False
    return _CPU_SUPPORT[key]


def unsupported(q: GemmQuery) -> str | None:
    """Why this product cannot run here, or None where it can."""
    if any(block not in (TENSOR_BLOCK, ROW_BLOCK) for block in (q.a_block, q.b_block)):
        return _blocks_unsupported(q)
    if q.a_fmt.packed or q.b_fmt.packed:
        return "4-bit elements"
    if q.out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"output dtype {q.out_dtype}"
    if q.device_type == "cpu":
        row = ROW_BLOCK in (q.a_block, q.b_block)
        return None if _runs_on_cpu(q.a_fmt.dtype, q.b_fmt.dtype, row, q.out_dtype) else "not in this torch's CPU build"
    if q.device_type != "cuda" or not _gpu_has_fp8():
        return "no FP8 matrix instructions"
    for fmt in (q.a_fmt, q.b_fmt):
        if torch.version.hip is None and fmt.flavour == "fnuz":
            return "FNUZ elements on an NVIDIA device"
        if torch.version.hip is not None and fmt.flavour != resolve_flavour("auto", torch.device("cuda")):
            return f"{fmt.flavour.upper()} elements on this device"
    if q.n % _ALIGNMENT:
        return f"N={q.n} must be a multiple of {_ALIGNMENT}"
    if q.a_fmt.name == q.b_fmt.name == "e5m2":
        return "E5M2 x E5M2 has no kernel"
    if ROW_BLOCK in (q.a_block, q.b_block) and q.b_fmt.name == "e5m2":
        return "row-wise with E5M2 on the right has no kernel"
    return None


@constant_when_traced
def _has_block_scaling() -> bool:
    """cuBLASLt 12.9 and newer, on Hopper only."""
    if torch.version.cuda is None or tuple(int(part) for part in torch.version.cuda.split(".")[:2]) < (12, 9):
        return False
    return torch.cuda.get_device_capability()[0] == 9


def _blocks_unsupported(q: GemmQuery) -> str | None:
    if q.a_block not in _BLOCKS or q.b_block not in _BLOCKS or q.a_block == q.b_block == _BLOCKS[1]:
        return "scales vary along the contraction"
    if q.a_fmt.packed or q.a_fmt.name != "e4m3" or q.a_fmt != q.b_fmt or q.a_fmt.flavour != "ocp":
        return "block scales come with E4M3 elements"
    if q.device_type != "cuda" or not _has_block_scaling():
        return "block scales need cuBLASLt 12.9 on Hopper"
    if q.out_dtype not in (torch.bfloat16, torch.float32):
        return f"output dtype {q.out_dtype}"
    if q.n % _ALIGNMENT or q.m % 4:
        return f"M={q.m} must be a multiple of 4 and N={q.n} of {_ALIGNMENT}"
    return None


def gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, fast_accum: bool = False) -> torch.Tensor:
    """`a @ b.T`: `[M, C] x [N, C] -> [M, N]` in `out_dtype`.

    Args:
        fast_accum: let NVIDIA's tensor cores keep fewer bits of the running sum.
    """
    if a.block in _BLOCKS:
        return _block_gemm(a, b, out_dtype)
    a_data, b_data = _fill_contraction(a.data), _fill_contraction(b.data)
    scale_a, scale_b = a.scale, b.scale
    dtype = out_dtype
    if a.block == ROW_BLOCK or b.block == ROW_BLOCK:
        # The row-wise kernel wants one scale a row on both sides, and on GPUs gives bf16 only.
        scale_a = scale_a.expand(a.shape[0], 1).contiguous() if a.block == TENSOR_BLOCK else scale_a
        scale_b = scale_b.expand(b.shape[0], 1).contiguous() if b.block == TENSOR_BLOCK else scale_b
        scale_b = scale_b.t()
        dtype = torch.bfloat16 if a.data.is_cuda else out_dtype
    out = torch._scaled_mm(
        a_data,
        b_data.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        out_dtype=dtype,
        use_fast_accum=fast_accum and a.data.is_cuda and torch.version.hip is None,
    )
    return as_dtype(out, out_dtype)


def _block_gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The block-scaled product, which the library gives in bf16 only."""
    out = torch._scaled_mm(
        _fill_contraction(a.data, _BLOCK),
        _fill_contraction(b.data, _BLOCK).t(),
        scale_a=_block_scale(a),
        scale_b=_block_scale(b).t(),
        out_dtype=torch.bfloat16,
    )
    return as_dtype(out, out_dtype)


def _block_scale(q: QuantizedTensor) -> torch.Tensor:
    """Scales `[rows or blocks of rows, blocks]` as the library reads them.

    One row of scales a block of the contraction for 1x128, one column for 128x128, padded to four blocks.
    """
    if q.block[0] == 1:
        return q.scale.t().contiguous().t()
    blocks = q.scale.shape[1]
    return q.scale if blocks % 4 == 0 else F.pad(q.scale, (0, -blocks % 4))[:, :blocks]


def _fill_contraction(codes: torch.Tensor, multiple: int = _ALIGNMENT) -> torch.Tensor:
    """Zero codes up to the next aligned size: they add nothing, and an odd token count keeps the fast kernel."""
    if codes.device.type == "cpu":
        return codes
    pad = -codes.shape[1] % multiple
    if is_zero(pad):
        return codes
    return F.pad(codes.view(torch.uint8), (0, pad)).view(codes.dtype)
