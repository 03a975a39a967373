"""What the launchers share: launch parameters and checks. Does not import `triton`."""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lumen_core.casts import MIN_SCALE
from lumen_core.formats import ElementFormat
from lumen_core.kernels.query import RowsQuery

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 8192  # values a program
INT32_END = 2**31


@functools.cache
def has_triton() -> bool:
    """Whether the `triton` package is there, without importing it."""
    return importlib.util.find_spec("triton") is not None


def rows_unsupported(q: RowsQuery) -> str | None:
    """Why a kernel over rows of a fp32, bf16 or fp16 matrix cannot run here, or None where it can."""
    if q.device_type != "cuda":
        return "needs a GPU"
    if not has_triton():
        return "triton is not installed"
    if q.dtype not in DTYPES:
        return f"input dtype {q.dtype}"
    if q.rows == 0 or q.columns == 0:
        return "an empty tensor"
    if q.rows >= INT32_END or q.columns >= INT32_END:
        return "a side of 2**31 or more"
    return None


def warps(values: int, hip: bool | None = None) -> int:
    """Warps for a program of so many values: 32 values a thread (`hip`: AMD's warps are twice as wide)."""
    hip = torch.version.hip is not None if hip is None else hip
    return max(1, min(8, values // (2048 if hip else 1024)))


def power_of_two(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << max(n - 1, 0).bit_length()


def element_constants(fmt: ElementFormat, hip: bool | None = None) -> dict[str, Any]:
    """Compile-time arguments of every kernel that casts to `fmt` (`hip`: on AMD; default: as this torch is built)."""
    hip = torch.version.hip is not None if hip is None else hip
    # On AMD, OCP means gfx950.
    by_hand = hip and fmt.flavour == "ocp" and not _triton_casts_on_gfx950()
    return {"LIMIT": fmt.max, "CAST": {"e4m3": "fp8", "e5m2": "bf8"}[fmt.name] if by_hand else ""}


@functools.cache
def _triton_casts_on_gfx950() -> bool:
    """Whether Triton itself uses the instruction: since 3.7; before, a cast to OCP takes fifty others."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7)


def scale_constants(fmt: ElementFormat, pow2: bool, hip: bool | None = None) -> dict[str, Any]:
    """Compile-time arguments of every kernel that casts to `fmt` at an fp32 scale that it computes."""
    return {**element_constants(fmt, hip), "LEAST_AMAX": MIN_SCALE * fmt.max, "POW2": pow2}


def on_device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it x's, at no cost where it is already."""
    return nullcontext() if x.device.index == torch.cuda.current_device() else torch.cuda.device(x.device)


def check_contiguous(x: torch.Tensor) -> None:
    """Raises:
    ValueError: `x` is strided.
    """
    if not x.is_contiguous():
        raise ValueError(f"needs a contiguous tensor, not shape {tuple(x.shape)} with strides {x.stride()}")
