"""Run the Triton casts in Triton's interpreter, on a CPU, and print what differs from the reference.

A program of its own (`test_triton_compile.py` starts it): `TRITON_INTERPRET` must be set before a kernel is defined.
The interpreter's own FP8 casts do not round to nearest even and its bf16 reads lose subnormals, so torch's stand in
for them: this checks indices, masks, scales and the order of operations. Hardware casts are checked in `tests/gpu`.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from triton.runtime import interpreter

from lumen_core import casts, requantize
from lumen_core.formats import element_format
from lumen_core.kernels.triton import amax, cast, retile

SHAPES = ((1, 1), (3, 33), (130, 257), (70, 512))
_TORCH = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
    "bf16": torch.bfloat16,
}


def patch() -> None:
    """Torch's conversions for the interpreter's, and a CPU for the GPU."""
    theirs = interpreter._convert_float

    def convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        raw = torch.from_numpy(np.ascontiguousarray(values))
        if str(source) == "fp32" and str(target) in _TORCH:
            rounded = raw.view(torch.float32).to(_TORCH[str(target)])
            return rounded.view(torch.uint8 if rounded.itemsize == 1 else torch.uint16).numpy()
        if str(source) in _TORCH and str(target) == "fp32":
            return raw.view(_TORCH[str(source)]).to(torch.float32).numpy()
        return theirs(values, source, target, rounding)

    interpreter._convert_float = convert
    for module in (amax, cast, retile):
        module.on_device_of = lambda x: nullcontext()
    amax._to_device = lambda table, device: table


def sample(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Values over many binary orders, with rows of zeros and of subnormals where there is room."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-9, 9, shape).float())
    x[: shape[0] // 3] = 0
    if shape[0] > 60:
        x[40] *= 2.0**-130
        x[50] = 2.0**-140
        x[60, 1:4] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    return x.to(dtype)


def differs(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> bool:
    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        if a.dtype != b.dtype or a.shape != b.shape or not a.is_contiguous():
            return False
        if a.dtype == casts.E8M0_DTYPE:
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        a, b = a.to(torch.float32), b.to(torch.float32)
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(
            a.nan_to_num(0.0, 1.0, -1.0).view(torch.int32), b.nan_to_num(0.0, 1.0, -1.0).view(torch.int32)
        )

    return not (same(got[0], want[0]) and same(got[1], want[1]))


def check_casts(flavour: str) -> int:
    count = 0
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16) if flavour == "ocp" else (torch.bfloat16,):
            x = sample(shape, dtype)
            for name in ("e4m3", "e5m2"):
                fmt = element_format(name, flavour)
                cases: list[tuple[tuple[int, int], dict[str, Any]]] = [
                    (block, {"mx": True, "rounding": rounding})
                    for block in cast.MX_BLOCKS
                    for rounding in ("ceil", "floor", "even")
                ]
                cases += [(block, {}) for block in ((0, 0), (1, 0), *cast.FP32_BLOCKS)]
                cases += [(block, {"pow2": True}) for block in ((0, 0), (1, 0), (1, 128))]
                cases += [((0, 0), {"margin": 2, "amax": torch.tensor(0.75)})]
                for block, options in cases:
                    count += 1
                    if differs(cast.quantize(x, fmt, block, **options), casts.quantize(x, fmt, block, **options)):
                        print(shape, dtype, fmt.name, fmt.flavour, block, options)
    return count


def check_amax() -> int:
    tensors = [torch.randn(5), torch.empty(0), torch.randn(200, 150), torch.randn(3, 7), torch.empty(0, 4)]
    tensors += [torch.tensor([1.0, float("nan"), float("inf")]), -torch.ones(9000), torch.tensor([float("-inf")])]
    tensors += [t.bfloat16() for t in tensors] + [torch.randn(100)[1:]]
    want = torch.stack([t.abs().amax().float() if t.numel() else torch.tensor(0.0) for t in tensors])
    for got, expected in [(amax.absmax(tensors), want)] + [(amax.absmax([t]), w[None]) for t, w in zip(tensors, want)]:
        if not torch.equal(got.nan_to_num(-1.0), expected.nan_to_num(-1.0)):
            print("absmax", got, expected)
    return len(tensors) + 1


def check_retile(flavour: str) -> int:
    shapes = ((1, 1), (33, 70), (130, 257), (256, 128))
    for shape in shapes:
        fmt = element_format("e4m3", flavour)
        codes, scale = casts.quantize_mx(sample(shape, torch.float32).nan_to_num(), fmt, (32, 32))
        want, tensor_scale = requantize.mx_to_tensor(codes, scale, fmt, (32, 32), shape)
        if differs(retile.mx_to_tensor(codes, scale, fmt), (want, tensor_scale)):
            print("mx_to_tensor", shape)
        if differs(retile.mx_to_tensor(codes, scale, fmt, transposed=True), (want.t().contiguous(), tensor_scale)):
            print("mx_to_tensor transposed", shape)
        if not torch.equal(retile.transpose_bytes(codes).view(torch.uint8), codes.view(torch.uint8).t()):
            print("transpose_bytes", shape)
    return 3 * len(shapes)


if __name__ == "__main__":
    torch.manual_seed(0)
    patch()
    total = check_amax()
    for flavour in ("ocp", "fnuz"):
        total += check_casts(flavour) + check_retile(flavour)
    print(f"{total} compared")
