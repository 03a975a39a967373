"""AITER's GEMMs: hipBLASLt for one scale a tensor, CK for one a row and for 1x128 by 128x128, ASM for MXFP4.

All compute `a @ b.T` and none has a gradient. `unsupported` keeps away whatever they would refuse, or get wrong without
a word: sizes, dtypes and scale layouts are hardly checked over there.
"""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F

from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK
from lumen_core.formats import ElementFormat, flavour_of
from lumen_core.kernels.aiter import probe
from lumen_core.kernels.query import GemmQuery
from lumen_core.tensor import QuantizedTensor

_CODES_BLOCK, _WEIGHT_BLOCK, _MX_BLOCK = (1, 128), (128, 128), (1, 32)
_NARROW = (torch.bfloat16, torch.float16)
_SHUFFLE = (16, 16)  # rows and bytes of a tile in the layout that the kernels with shuffled weights read
_HEURISTIC = 0  # hipBLASLt chooses the kernel
_HIPBLASLT_K, _CK_K = 16, 256  # the contraction is filled with zeros to a multiple of these
_FUNCTIONS = {
    "tensor": ("hipb_create_extension", "hipb_mm"),
    "row": ("gemm_a8w8",),
    "block": ("gemm_a8w8_blockscale",),
    "shuffled": ("shuffle_weight", "gemm_a8w8_blockscale_bpreshuffle"),
    "mxfp4": ("shuffle_weight", "e8m0_shuffle", "gemm_a4w4"),
}


# --- what can run -----------------------------------------------------------------------------------------------------


def unsupported(q: GemmQuery) -> str | None:
    """Why AITER cannot run this product here, or None where it can."""
    return _said(q, _kind(q))


def shuffled_unsupported(q: GemmQuery) -> str | None:
    """The same for the kernels that read 1x128 by 128x128 operands with a shuffled right side."""
    return _said(q, "shuffled" if _kind(q) == "block" else None)


def _said(q: GemmQuery, kind: str | None) -> str | None:
    if torch.compiler.is_compiling():
        return "AITER: torch.compile fuses what torch itself can run"
    reason = probe.unusable(q.device_type)
    if reason is None:
        reason = _blocks_reason(q) if kind is None else _reason(q, kind)
    return None if reason is None else f"AITER: {reason}"


def _kind(q: GemmQuery) -> str | None:
    blocks = q.a_block, q.b_block
    if q.a_fmt.packed or q.b_fmt.packed:
        both = q.a_fmt.packed and q.b_fmt.packed
        return "mxfp4" if both and blocks == (_MX_BLOCK, _MX_BLOCK) else None
    if blocks == (TENSOR_BLOCK, TENSOR_BLOCK):
        return "tensor"
    if all(block in (TENSOR_BLOCK, ROW_BLOCK) for block in blocks):
        return "row"
    return "block" if blocks == (_CODES_BLOCK, _WEIGHT_BLOCK) else None


def _blocks_reason(q: GemmQuery) -> str:
    (ar, ac), (br, bc) = q.a_block, q.b_block
    return f"no such GEMM of {q.a_fmt.name} {ar}x{ac} by {q.b_fmt.name} {br}x{bc} blocks"


def _reason(q: GemmQuery, kind: str) -> str | None:
    arch = probe.state().arch
    if kind == "mxfp4":
        if arch != "gfx950":
            return f"{arch} has no 4-bit matrix instructions"
    else:
        reason = _element_reason(q.a_fmt, arch) or _element_reason(q.b_fmt, arch)
        if reason is not None:
            return reason
    outputs = {"tensor": (*_NARROW, torch.float32), "mxfp4": (torch.bfloat16,)}.get(kind, _NARROW)
    if q.out_dtype not in outputs:
        return f"output dtype {q.out_dtype}"
    if 0 in (q.m, q.n, q.k):
        return "an empty operand"
    # Kernels fill up M (and what `gemm` fills with zeros of K); the rest is refused or read beyond its end over there.
    multiples = {
        "mxfp4": (("M", q.m, 16), ("N", q.n, 16), ("K", q.k, 256)),
        "block": (("N", q.n, 128), ("K", q.k, 128)),
        "shuffled": (("N", q.n, 128), ("K", q.k, 128)),
    }.get(kind, (("N", q.n, 16),))
    for name, size, multiple in multiples:
        if size % multiple:
            return f"{name}={size} must be a multiple of {multiple}"
    return probe.lacking(*_FUNCTIONS[kind]) or (_fp4_reason() if kind == "mxfp4" else None)


def _element_reason(fmt: ElementFormat, arch: str) -> str | None:
    if fmt.name != "e4m3":
        return f"{fmt.name.upper()} elements"
    return None if fmt.flavour == flavour_of(arch) else f"{fmt.flavour.upper()} elements on {arch}"


def _fp4_reason() -> str | None:
    known = probe.takes("gemm_a4w4", "out") or probe.takes("gemm_a4w4", "dtype")
    return None if known else "gemm_a4w4 has neither of the signatures that we know"


# --- products ---------------------------------------------------------------------------------------------------------


def gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, fast_accum: bool = False) -> torch.Tensor:
    """`a @ b.T`: `[M, C] x [N, C] -> [M, N]` in `out_dtype`, where `unsupported` gives no reason.

    Args:
        a, b: codes may be column-major where both have one scale; others are copied to rows where they are not.
        fast_accum: has no meaning on AMD.
    """
    with torch.cuda.device_of(a.data):  # results are allocated on the current device, kernels launched there
        if a.fmt.packed:
            return _mxfp4(a, b)
        if a.block == _CODES_BLOCK:
            x, w = a.data.contiguous(), b.data.contiguous()
            scales = a.scale.contiguous(), b.scale.contiguous()
            return probe.function("gemm_a8w8_blockscale")(x, w, *scales, dtype=out_dtype)
        if a.block == b.block == TENSOR_BLOCK:
            return _one_scale(a, b, out_dtype)
        x, w = _filled(a.data, _CK_K).contiguous(), _filled(b.data, _CK_K).contiguous()
        # The kernel reads M and N scales without asking how many there are.
        x_scale = a.scale.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
        w_scale = b.scale.reshape(1, -1).expand(1, b.shape[0]).contiguous()
        return probe.function("gemm_a8w8")(x, w, x_scale, w_scale, dtype=out_dtype)


def gemm_shuffled(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, fast_accum: bool = False
) -> torch.Tensor:
    """`gemm` of 1x128 by 128x128 operands with the right one shuffled first, where `shuffled_unsupported` allows."""
    with torch.cuda.device_of(a.data):
        w = probe.function("shuffle_weight")(b.data.contiguous(), layout=_SHUFFLE)
        # These kernels read the scales of a column next to each other, under the shape of the row-major ones.
        x_scale = a.scale.t().contiguous().view(a.scale.shape)
        run = probe.function("gemm_a8w8_blockscale_bpreshuffle")
        return run(a.data.contiguous(), w, x_scale, b.scale.contiguous(), dtype=out_dtype)


def _one_scale(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> torch.Tensor:
    done = probe.state().done
    if "hipblaslt" not in done:
        probe.function("hipb_create_extension")()
        done["hipblaslt"] = True
    left, right = (_dense(_filled(codes, _HIPBLASLT_K)) for codes in (a.data, b.data))
    # Without an `out_dtype` the result would be FP8.
    return probe.function("hipb_mm")(
        left, right.t(), _HEURISTIC, out_dtype=out_dtype, scaleA=a.scale.reshape(1), scaleB=b.scale.reshape(1)
    )


def _mxfp4(a: QuantizedTensor, b: QuantizedTensor) -> torch.Tensor:
    pair = importlib.import_module("aiter.utility.dtypes").fp4x2  # a dtype of its own, or uint8 in older torch
    scales = [probe.function("e8m0_shuffle")(q.scale.contiguous().view(torch.uint8)) for q in (a, b)]
    scales = [scale.view(q.scale.dtype) for scale, q in zip(scales, (a, b))]
    w = probe.function("shuffle_weight")(b.data.contiguous(), layout=_SHUFFLE).view(pair)
    x = a.data.contiguous().view(pair)
    run, rows = probe.function("gemm_a4w4"), a.shape[0]
    if not probe.takes("gemm_a4w4", "out"):
        return run(x, w, *scales, dtype=torch.bfloat16, bpreshuffle=True)
    out = torch.empty((rows + -rows % 32, b.shape[0]), dtype=torch.bfloat16, device=a.data.device)
    return run(x, w, *scales, out=out, bpreshuffle=True)[:rows]


def _filled(codes: torch.Tensor, multiple: int) -> torch.Tensor:
    """Zero codes up to the next multiple along the contraction: they add nothing to the sum."""
    pad = -codes.shape[1] % multiple
    return codes if pad == 0 else F.pad(codes.view(torch.uint8), (0, pad)).view(codes.dtype)


def _dense(codes: torch.Tensor) -> torch.Tensor:
    """Row- or column-major codes as they are, others copied: the C++ side checks strides in debug builds only."""
    rows, columns = codes.stride()
    row_major = columns == 1 and rows >= codes.shape[1]
    return codes if row_major or (rows == 1 and columns >= codes.shape[0]) else codes.contiguous()
