"""AITER's casts, where they give the bits of `lumen_core.casts`.

Most do not, as their sources say, and are passed over with the reason:

- per row, per 1x128: the scale is amax times a rounded 1/max, one unit off `amax / max`; a row of zeros gets scale 0
  and NaN or no NaN by its width, a block's amax is raised to 1e-10, so that small gradients lose bits;
- MXFP8: the HIP cast raises amax to 1e-10 as well; the Triton one has our `ceil` scales, but doubles them where amax is
  the largest code times a power of two, and passes over NaN;
- MXFP4: the same floor in HIP; the Triton one has our `even` scales and our codes, but passes over NaN;
- HIP casts at a given scale turn NaN into the largest number, so that a delayed scale would hide it.

What is left: one scale a tensor from its own amax, which we compute (NaN then arrives in the scale), and MXFP4 by
`even`, with NaN put into the scale. Whether they round as we do is tried once on the device, with values halfway
between two codes: some builds take an approximate reciprocal of the scale, which is right for powers of two only.

Values below the fp32 normal range may count as 0, and amax must lie below 1.75 * 2**127.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from lumen_core import casts
from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK
from lumen_core.formats import E8M0_DTYPE, E8M0_NAN, ElementFormat, flavour_of
from lumen_core.kernels.aiter import probe
from lumen_core.kernels.query import QuantizeQuery

_DTYPES = (torch.bfloat16, torch.float16)
_VECTOR = 16  # codes that a thread writes at once, beyond the end of a row that is no multiple
_ROW = 8192  # longest row that one scale a tensor is cut into
_END = 2**31
_MX_BLOCK = (1, 32)


# --- what can run -----------------------------------------------------------------------------------------------------


def unsupported(q: QuantizeQuery) -> str | None:
    """Why AITER cannot run this quantization here with our bits, or None where it can."""
    if torch.compiler.is_compiling():
        return "AITER: torch.compile fuses the reference"
    reason = probe.unusable(q.device_type) or _format_reason(q) or _operand_reason(q)
    if reason is None:
        reason = _mxfp4_reason(q) if q.fmt.packed else _fp8_reason(q)
    return None if reason is None else f"AITER: {reason}"


def _format_reason(q: QuantizeQuery) -> str | None:
    arch = probe.state().arch
    if q.fmt.packed:
        return None if arch == "gfx950" else f"FP4 elements on {arch}"
    if q.fmt.name != "e4m3":
        return f"{q.fmt.name.upper()} elements"
    return None if q.fmt.flavour == flavour_of(arch) else f"{q.fmt.flavour.upper()} elements on {arch}"


def _operand_reason(q: QuantizeQuery) -> str | None:
    if q.noise:
        return "stochastic rounding"
    if q.dtype not in _DTYPES:
        return f"input dtype {q.dtype}"
    if not q.plain:
        return "a tensor subclass, or one that autograd follows"
    if q.elements == 0:
        return "an empty tensor"
    return None if q.elements < _END else f"{q.elements} elements: it counts them in 32 bits"


def _fp8_reason(q: QuantizeQuery) -> str | None:
    if q.mx:
        return "its MXFP8 casts raise amax to 1e-10 (HIP) or double the scale of an exact 448 (Triton)"
    if q.block == ROW_BLOCK:
        return "its scale of a row is one unit off ours, and 0 for zeros"
    if q.block != TENSOR_BLOCK:
        return "its scale of a block is one unit off ours, and at least 1e-10 / max"
    if q.given_amax:
        return "its cast at a given scale makes NaN a number"
    if q.elements % _VECTOR:
        return f"{q.elements} elements, not a multiple of {_VECTOR}"
    return probe.lacking("static_per_tensor_quant") or _tried(q)


def _mxfp4_reason(q: QuantizeQuery) -> str | None:
    if not q.mx or q.block != _MX_BLOCK:
        return f"FP4 with blocks of {q.block[0]}x{q.block[1]}" + ("" if q.mx else " and fp32 scales")
    if q.rounding != "even":
        return f"its FP4 scales are rounded by `even`, not `{q.rounding}`"
    if q.columns % _MX_BLOCK[1]:
        return f"rows of {q.columns} values, not a multiple of {_MX_BLOCK[1]}"
    return probe.lacking("dynamic_mxfp4_quant") or _tried(q)


# --- casts ------------------------------------------------------------------------------------------------------------


def quantize(
    x: torch.Tensor, fmt: ElementFormat, block: tuple[int, int], *, margin: int = 0, pow2: bool = False, **others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale as `lumen_core.tensor.quantize` gives them, with its arguments, where `unsupported` allows.

    In a block of E2M1 that holds NaN the codes may differ; its scale is NaN.
    """
    with torch.cuda.device_of(x):
        if fmt.packed:
            return _cast_mxfp4(x)
        from lumen_core.kernels.largest import absmax  # here: it asks whether the casts run by Triton, as we are asked

        scale = casts.scale_from_amax(absmax([x])[0], fmt, margin, pow2)
        return _cast_at(x, fmt, scale), scale


def _cast_at(x: torch.Tensor, fmt: ElementFormat, scale: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    # A thread block takes a row: one scale serves them all, so rows can be as long as is good for it.
    rows = (-1, math.gcd(x.numel(), _ROW))
    probe.function("static_per_tensor_quant")(codes.view(rows), x.view(rows), scale.view(1))
    return codes


def _cast_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = probe.function("dynamic_mxfp4_quant")(x, scaling_mode="even")
    # Its maximum ignores NaN, torch's does not; and its scales lie column by column.
    poisoned = x.view(x.shape[0], -1, _MX_BLOCK[1]).amax(-1).isnan()
    return codes, torch.where(poisoned, E8M0_NAN, scale).to(torch.uint8).contiguous().view(E8M0_DTYPE)


# --- does it round as we do? ------------------------------------------------------------------------------------------


def _tried(q: QuantizeQuery) -> str | None:
    """Cast a few values on the device, once for each kind of cast, and compare bits with the reference."""
    known = probe.state()
    key = (q.fmt.name, q.dtype, q.pow2)
    if key not in known.done:
        on_gpu = known.device_type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return "not tried before this graph was captured"
        before = torch.cuda.get_sync_debug_mode() if on_gpu else 0
        if before:
            torch.cuda.set_sync_debug_mode("default")  # comparing waits for the device, this once
        try:
            known.done[key] = _differences(q, torch.device(known.device_type))
        finally:
            if before:
                torch.cuda.set_sync_debug_mode(before)
    wrong = known.done[key]
    return f"{wrong} of its codes or scales differ from ours" if wrong else None


def _differences(q: QuantizeQuery, device: torch.device) -> int:
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for values in _fp4_sample() if q.fmt.packed else _halfway(q.fmt):
        x = values.to(device, q.dtype)
        if q.fmt.packed:
            got, want = _cast_mxfp4(x), casts.quantize_mx(x, q.fmt, q.block, q.rounding)
            wrong += (got[1].view(torch.uint8) != want[1].view(torch.uint8)).sum()
        else:
            want = casts.quantize_tensor(x, q.fmt, pow2=q.pow2)
            got = _cast_at(x, q.fmt, want[1]), want[1]
        wrong += (got[0].view(torch.uint8) != want[0].view(torch.uint8)).sum()
    return int(wrong)


def _halfway(fmt: ElementFormat) -> list[torch.Tensor]:
    """For each amax of 8 bits a row of all values of 8 bits that its scale puts halfway between two codes.

    For bf16 that is complete: a quotient of such numbers that is not halfway is further from it than the reciprocal can
    be wrong. `fmt.max` is a small odd number times a power of two.
    """
    odd = int(fmt.max) // (int(fmt.max) & -int(fmt.max))
    samples = []
    for amax in range(128, 256):
        halves = [t for t in range(17, 32, 2) if amax * t % odd == 0]  # between the codes 16, 18, ... 32
        values = [n * amax / fmt.max for n in halves if _significand(amax * n // odd) < 256]
        if values:
            row = torch.tensor([float(amax), *values, *(-v for v in values)])
            samples.append(F.pad(row, (0, -row.numel() % _VECTOR))[None])
    return samples


def _significand(n: int) -> int:
    return n // (n & -n)


def _fp4_sample() -> list[torch.Tensor]:
    """A matrix with zeros, large and small rows (within fp16), and values halfway between two codes."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(24, 128, generator=generator) * torch.logspace(-6, 4, 24)[:, None]
    ties = torch.arange(-24, 24).to(torch.float32).repeat(3)[:128] / 4
    return [torch.cat((random, ties[None], torch.zeros(1, 128)))]
