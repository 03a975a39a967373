"""A strict stand-in for AITER on a CPU, in two generations: the wheel on PyPI, and the head of the repository.

It computes with fp32 torch, returns tensors without a gradient, and refuses what the real one refuses as well as what
it gets silently wrong. Signatures are those of the sources (tests/contract/test_aiter.py compares them); the arithmetic
and the rules were read there. Shuffled operands are unshuffled, so that a forgotten shuffle gives wrong numbers.

`installed()` lets `import aiter` find it; as with the real one, most functions hide their parameters behind
`(*args, **kwargs)`, and an operator registered with torch tells them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lumen_core import casts
from lumen_core.formats import element_format

FP4X2 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
FLOOR = 1e-10
calls: list[str] = []
_now: dict[str, Any] = {}


class dtypes:
    """`aiter.utility.dtypes`, as far as signatures name it."""

    bf16, fp16, fp32, i8, fp4x2 = torch.bfloat16, torch.float16, torch.float32, torch.int8, FP4X2


class Both:
    """Functions with the same signature in both generations."""

    def hipb_create_extension():
        _now["extension"] = True

    def gemm_a8w8(XQ, WQ, x_scale, w_scale, bias=None, dtype=dtypes.bf16, splitK=None):
        m, n, k = _fp8_operands(XQ, WQ)
        # The kernels read M and N scales, whatever is there.
        _check(x_scale.shape == (m, 1) and w_scale.shape == (1, n), "one scale a row, (M, 1) and (1, N)")
        _scales(x_scale, w_scale)
        _check(dtype in (dtypes.bf16, dtypes.fp16), "Unsupported scales/output dtype!")
        deep = 256 if m < 64 and k > 2048 else 128
        _check(k % deep == 0 and n % 8 == 0, "This GEMM is not supported!")
        return ((XQ.float() @ WQ.float().t()) * x_scale * w_scale).to(dtype)

    def gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, dtype=dtypes.bf16, isBpreshuffled=False):
        _check(not isBpreshuffled, "gfx950_a8w8_blockscale_ASM is broken")
        return _blockscale(XQ, WQ, x_scale, w_scale, dtype)

    def e8m0_shuffle(scale):
        _check(scale.dim() == 2, "scale must be a 2D tensor")
        m, n = scale.shape
        padded = torch.full((m + -m % 256, n + -n % 8), casts.E8M0_NAN, dtype=torch.uint8)  # uninitialised over there
        padded[:m, :n] = scale.view(torch.uint8)
        rows, columns = padded.shape
        turned = padded.view(rows // 32, 2, 16, columns // 8, 2, 4).permute(0, 3, 5, 2, 4, 1)
        return turned.reshape(rows, columns).view(scale.dtype)

    def static_per_tensor_quant(out, input, scale):
        _quant_operands(out, input)
        columns = input.shape[-1]
        _check(columns % 16 == 0, "16 codes are written at once, over the next row")
        _check(scale.numel() == 1 and scale.dtype == dtypes.fp32, "one fp32 scale")
        out.copy_(_hip_codes(input.float(), _reciprocal(scale.reshape(()))))

    def dynamic_per_token_scaled_quant(
        out, input, scales, scale_ub=None, shuffle_scale=False, num_rows=None, num_rows_factor=1
    ):
        _quant_operands(out, input)
        _check(scales.dtype == dtypes.fp32 and scales.numel() == input.shape[0], "one fp32 scale a row")
        _check(scale_ub is None and not shuffle_scale and num_rows is None, "not in this fake")
        amax = input.float().abs().nan_to_num(0.0).amax(-1, keepdim=True)  # its maximum ignores NaN
        if input.shape[1] in (32, 64, 128):
            amax = amax.clamp(min=FLOOR)
        scale = amax * torch.tensor(1.0 / _fp8().max)
        scales.copy_(scale.view(scales.shape))
        out.copy_(_hip_codes(input.float(), _reciprocal(scale)))

    def dynamic_mxfp4_quant(x, scaling_mode="even"):
        _check(x.dim() == 2 and x.shape[1] % 4 == 0, "(N // 2) % 2 == 0")
        _check(x.dtype in (dtypes.bf16, dtypes.fp16), "half-precision input")
        codes, scale = casts.quantize_mx(x.detach().nan_to_num(0.0), element_format("e2m1"), (1, 32), "even")
        return codes, scale.view(torch.uint8).t().contiguous().t()


class Wheel(Both):
    """amd-aiter 0.1.7 on PyPI."""

    def hipb_mm(
        mat1,
        mat2,
        solution_index,
        bias=None,
        out_dtype=None,
        scaleA=None,
        scaleB=None,
        scaleOut=None,
        bpreshuffle=None,
    ):
        return _hipb_mm(mat1, mat2, out_dtype, scaleA, scaleB)

    def gemm_a8w8_blockscale_bpreshuffle(XQ, WQ, x_scale, w_scale, dtype=dtypes.bf16):
        return _shuffled_blockscale(XQ, WQ, x_scale, w_scale, dtype)

    def gemm_a4w4(A, B, A_scale, B_scale, out, bias=None, alpha=1.0, beta=0.0, bpreshuffle=True):
        _check(out.shape[0] % 32 == 0, "Dim0 of gemm_a4w4_asm output needs to be padded to multiples of 32!")
        _check(out.shape == (A.shape[0] + -A.shape[0] % 32, B.shape[0]) and out.dtype == dtypes.bf16, "bf16 output")
        out[: A.shape[0]] = _a4w4(A, B, A_scale, B_scale, bpreshuffle)
        return out

    def shuffle_weight(x, layout=(16, 16), use_int4=False):
        return _shuffle(x, layout)


class Head(Both):
    """The head of the repository."""

    def hipb_mm(
        mat1,
        mat2,
        solution_index,
        bias=None,
        out_dtype=None,
        scaleA=None,
        scaleB=None,
        scaleOut=None,
        bpreshuffle=None,
        use_gelu=None,
    ):
        return _hipb_mm(mat1, mat2, out_dtype, scaleA, scaleB)

    def gemm_a8w8_blockscale_bpreshuffle(XQ, WQ, x_scale, w_scale, dtype=dtypes.bf16, out=None):
        return _shuffled_blockscale(XQ, WQ, x_scale, w_scale, dtype)

    def gemm_a4w4(
        A,
        B,
        A_scale,
        B_scale,
        bias=None,
        dtype=dtypes.bf16,
        alpha=1.0,
        beta=0.0,
        bpreshuffle=True,
        apreshuffle=False,
        global_A_scale=None,
        global_B_scale=None,
    ):
        _check(dtype == dtypes.bf16, "only support BFloat16 output now!")
        return _a4w4(A, B, A_scale, B_scale, bpreshuffle)

    def shuffle_weight(x, layout=(16, 16), use_int4=False, is_guinterleave=False, gate_up=False, pad_k_to=0):
        return _shuffle(x, layout)

    def dynamic_mxfp8_quant(x, scale=None, quant_dtype=torch.float8_e4m3fn):
        _check(x.shape[-1] % 32 == 0, "last dim must be a multiple of 32")
        fmt = element_format("e4m3")
        amax = x.float().view(x.shape[0], -1, 32).abs().amax(-1)
        rounded = ((amax.view(torch.int32) + 0x200000) & 0x7F800000).view(torch.float32)  # up from 1.75 on
        byte = casts.e8m0_from_amax(rounded, fmt, "floor")
        return (x.float() / casts.e8m0_decode(byte).repeat_interleave(32, -1)).to(quant_dtype), byte


GENERATIONS = {"wheel": Wheel, "head": Head}
MODULES = {
    "aiter.ops.gradlib": ("hipb_create_extension", "hipb_mm"),
    "aiter.ops.gemm_op_a8w8": ("gemm_a8w8", "gemm_a8w8_blockscale", "gemm_a8w8_blockscale_bpreshuffle"),
    "aiter.ops.gemm_op_a4w4": ("gemm_a4w4",),
    "aiter.ops.shuffle": ("shuffle_weight",),
    "aiter.utility.fp4_utils": ("e8m0_shuffle",),
    "aiter.ops.quant": ("static_per_tensor_quant", "dynamic_per_token_scaled_quant"),
    "aiter.ops.triton.quant": ("dynamic_mxfp4_quant", "dynamic_mxfp8_quant"),
}
_PLAIN = {"shuffle_weight", "e8m0_shuffle", "dynamic_mxfp4_quant", "dynamic_mxfp8_quant"}
PACKAGES = ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.utility")


# --- what the real ones check, and what they should -------------------------------------------------------------------


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _fp8():
    return element_format("e4m3", "fnuz" if _now["arch"] == "gfx942" else "ocp")


def _fp8_operands(x: torch.Tensor, w: torch.Tensor) -> tuple[int, int, int]:
    _check(x.dim() == w.dim() == 2 and x.shape[1] == w.shape[1], "2-D operands of one K")
    _check(x.dtype == w.dtype == _fp8().dtype, "Weights and activations should be both of this device's fp8")
    _check(x.is_contiguous() and w.is_contiguous(), "strides are not read: both must be contiguous")
    return x.shape[0], w.shape[0], x.shape[1]


def _scales(*scales: torch.Tensor) -> None:
    _check(all(s.dtype == dtypes.fp32 and s.is_contiguous() for s in scales), "contiguous fp32 scales")


def _blockscale(x, w, x_scale, w_scale, dtype):
    m, n, k = _fp8_operands(x, w)
    _check(dtype in (dtypes.bf16, dtypes.fp16), f"Output {dtype=} is currently not supported in gemm_a8w8")
    _check(k % 128 == 0 and n % 128 == 0, "This GEMM is not supported!")
    _check(x_scale.shape == (m, k // 128) and w_scale.shape == (n // 128, k // 128), "1x128 by 128x128 scales")
    _scales(x_scale, w_scale)
    left = x.float() * x_scale.repeat_interleave(128, 1)
    right = w.float() * w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (left @ right.t()).to(dtype)


def _shuffled_blockscale(x, w, x_scale, w_scale, dtype):
    _check(x_scale.is_contiguous(), "contiguous scales")
    rows = x_scale.reshape(-1).view(x_scale.shape[1], x_scale.shape[0]).t().contiguous()
    return _blockscale(x, _unshuffle(w), rows, w_scale, dtype)


def _a4w4(a, b, a_scale, b_scale, bpreshuffle):
    _check(_now["arch"] != "gfx942", "A4W4 GEMM kernel is not supported on gfx942, but got gfx942!")
    _check(a.dtype == b.dtype == FP4X2, "packed pairs of fp4")
    _check(bpreshuffle is True, "only with shuffled weights in this fake")
    (m, half), n = a.shape, b.shape[0]
    _check(m % 16 == 0 and n % 16 == 0 and half % 128 == 0, "sizes that the kernels do not fill up")
    values = []
    for codes, scale in ((a, a_scale), (_unshuffle(b), b_scale)):
        rows, groups = codes.shape[0], half // 16
        _check(scale.shape == (rows + -rows % 256, groups + -groups % 8), "scales padded to 256 rows and 8 columns")
        _check(scale.dtype == torch.float8_e8m0fnu, "e8m0 scales")
        sr, sc = scale.shape
        turned = scale.view(torch.uint8).view(sr // 32, sc // 8, 4, 16, 2, 2).permute(0, 5, 3, 1, 4, 2)
        byte = turned.reshape(sr, sc)[:rows, :groups].contiguous()
        decoded = casts.decode(codes.view(torch.uint8), element_format("e2m1"))
        values.append(decoded * casts.e8m0_decode(byte).repeat_interleave(32, 1))
    return (values[0] @ values[1].t()).to(torch.bfloat16)


def _hipb_mm(mat1, mat2, out_dtype, scale_a, scale_b):
    _check(_now.get("extension"), "hipb_create_extension was not called")
    _check(mat1.dim() == 2 and mat2.dim() == 2, "tensors must be 2-D")
    _check(mat1.dtype == mat2.dtype == _fp8().dtype, "expected mat1 and mat2 to have the same dtype, this device's fp8")
    _check(mat1.shape[1] == mat2.shape[0], "mat1 dim 1 must match mat2 dim 0")
    for mat in (mat1, mat2):
        rows, columns = mat.stride()
        dense = (columns == 1 and rows >= mat.shape[1]) or (rows == 1 and columns >= mat.shape[0])
        _check(dense, "unusual strides detected, may need to clone a contiguous tensor")
    _check(out_dtype is not None, "the result would be fp8")
    _check(mat1.shape[1] % 16 == 0 and mat2.shape[1] % 16 == 0, "no algorithm for these sizes")
    _check(scale_a.dtype == scale_b.dtype == dtypes.fp32, "Both scale_a and scale_b must be float (fp32) tensors.")
    if scale_a.numel() > 1 or scale_b.numel() > 1:
        shapes = (mat1.shape[0], 1), (1, mat2.shape[1])
        _check((scale_a.shape, scale_b.shape) == shapes, "Invalid scaling configuration.")
        _check(out_dtype == dtypes.bf16, "row-wise scales give bf16 only")
    return ((mat1.float() @ mat2.float()) * scale_a * scale_b).to(out_dtype)


def _shuffle(x: torch.Tensor, layout: tuple[int, int]) -> torch.Tensor:
    _check(layout == (16, 16), "the layout that these GEMMs read")
    _check(x.shape[-2] % 16 == 0 and x.shape[-1] % 32 == 0, "does not divide into tiles")
    out = x.view(torch.uint8).view(-1, 16, x.shape[-1] // 32, 2, 16).permute(0, 2, 3, 1, 4).reshape(x.shape)
    return out.view(x.dtype)


def _unshuffle(w: torch.Tensor) -> torch.Tensor:
    tiles = w.view(torch.uint8).view(-1, w.shape[-1] // 32, 2, 16, 16).permute(0, 3, 1, 2, 4)
    return tiles.reshape(w.shape).view(w.dtype)


def _quant_operands(out: torch.Tensor, input: torch.Tensor) -> None:
    _check(input.dtype in (dtypes.bf16, dtypes.fp16), "half-precision input")
    _check(out.dtype == _fp8().dtype, f"not support output type: {out.dtype}")
    _check(out.shape == input.shape and out.is_contiguous() and input.is_contiguous(), "contiguous, of one shape")


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale; the head takes an instruction that may be one unit off, and is right for powers of two."""
    exact = 1.0 / scale
    if _now["generation"] == "wheel":
        return exact
    bits = exact.view(torch.int32)
    return torch.where(bits & 0x7FFFFF == 0, bits, bits + 1).view(torch.float32)


def _hip_codes(x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Clamped to the format's range by the median of three, which gives the least of the others for NaN."""
    values = x * inverse
    return torch.where(values.isnan(), -_fp8().max, values.clamp(-_fp8().max, _fp8().max)).to(_fp8().dtype)


# --- import -----------------------------------------------------------------------------------------------------------


class _Finder:
    """Finds and loads the modules of `MODULES`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in (*MODULES, *PACKAGES, "aiter.utility.dtypes"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name in PACKAGES)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "aiter":
            calls.append("import")
            if _now["import_error"] is not None:
                raise _now["import_error"]
        if module.__name__ == "aiter.utility.dtypes":
            vars(module).update({k: v for k, v in vars(dtypes).items() if not k.startswith("_")}, fp8=_fp8().dtype)
        for name in MODULES.get(module.__name__, ()):
            function = getattr(GENERATIONS[_now["generation"]], name, None)
            if function is not None and name not in _now["without"]:
                setattr(module, name, _published(name, function))


def _published(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        inspect.signature(function).bind(*args, **kwargs)
        calls.append(name)
        if _now["call_error"] is not None:
            raise _now["call_error"]
        with torch.no_grad():
            return function(*args, **kwargs)

    if name in _PLAIN or (_now["generation"] == "head" and "quant" in name):
        return functools.wraps(function)(run)
    arguments = ", ".join(f"Tensor? {parameter}" for parameter in inspect.signature(function).parameters)
    _now["library"].define(f"{name}({arguments}) -> ()")
    return run


@contextlib.contextmanager
def installed(
    generation: str,
    arch: str,
    *,
    import_error: BaseException | None = None,
    call_error: BaseException | None = None,
    without: tuple[str, ...] = (),
) -> Iterator[None]:
    """Let `import aiter` find this fake.

    Args:
        generation: one of `GENERATIONS`.
        arch: `gfx942` or `gfx950`.
        import_error: raised by the import.
        call_error: raised by every call.
        without: functions that are missing.
    """
    calls.clear()
    _now.clear()
    library = torch.library.Library("aiter", "FRAGMENT")
    _now.update(generation=generation, arch=arch, import_error=import_error, call_error=call_error, without=without)
    _now["library"] = library
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
            del sys.modules[name]
        library._destroy()
