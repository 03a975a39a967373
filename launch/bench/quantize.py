"""Bandwidth of each cast from high precision to codes and scales, beside a plain copy and torchao's cast.

Bytes are the least that the algorithm has to move: the input once (twice where a scale depends on the whole tensor or
on whole columns, so that no value can be cast before all were seen), codes and scales once. A fraction of the copy's
bandwidth above what the byte count suggests means that a cache held the second read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from launch.bench import rivals
from launch.bench.timing import Stopwatch
from lumen_core.formats import element_format, resolve_flavour
from lumen_core.rounding import stochastic_noise
from lumen_core.tensor import quantize, quantize_both


@dataclass(frozen=True)
class Cast:
    """One way to quantize: element format, block, kind of scale, reads of the input, what decides the rounding, and
    whether the matrix alone is quantized, or its transpose too (`both`).
    """

    element: str
    block: tuple[int, int]
    mx: bool = False
    reads: int = 1
    known_amax: bool = False
    stochastic: bool = False
    both: bool = False


CASTS: dict[str, Cast] = {
    "tensor": Cast("e4m3", (0, 0), reads=2),
    "tensor, amax known": Cast("e4m3", (0, 0), known_amax=True),
    "row": Cast("e4m3", (1, 0)),
    "1x128": Cast("e4m3", (1, 128)),
    "128x128": Cast("e4m3", (128, 128)),
    "mxfp8 1x32": Cast("e4m3", (1, 32), mx=True),
    "mxfp8 32x32": Cast("e4m3", (32, 32), mx=True),
    "mxfp4 1x32": Cast("e2m1", (1, 32), mx=True),
    "mxfp4 1x32 stochastic": Cast("e2m1", (1, 32), mx=True, stochastic=True),
    "tensor both": Cast("e4m3", (0, 0), reads=2, both=True),
    "tensor both, amax known": Cast("e4m3", (0, 0), known_amax=True, both=True),
    "row both": Cast("e4m3", (1, 0), reads=2, both=True),
    "1x128 both": Cast("e4m3", (1, 128), both=True),
    "mxfp8 1x32 both": Cast("e4m3", (1, 32), mx=True, both=True),
}


def measure(
    names: Sequence[str], m: int, k: int, dtype: torch.dtype, watch: Stopwatch, *, compiled: bool
) -> tuple[float, list[dict[str, Any]]]:
    """Cast an `[M, K]` matrix of `dtype` along K.

    Returns:
        bytes/s of a copy (read and write counted), and rows: cast, bytes, ms, bytes_per_second, of_copy
        (fraction), torchao_ms, torchao_reason (why absent), vs_torchao (speed-up or None).
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, k, generator=generator).to(watch.device, dtype)
    target = torch.empty_like(x)
    copy = 2 * x.numel() * x.element_size() / watch.seconds(lambda: target.copy_(x))
    rows = []
    for name in names:
        function = work(CASTS[name], x, compiled)
        result = function()
        parts = [t for q in (result if CASTS[name].both else (result,)) for t in (q.data, q.scale)]
        size = sum(t.numel() * t.element_size() for t in parts)
        size += CASTS[name].reads * x.numel() * x.element_size()
        seconds = watch.seconds(function)
        rival, reason = rivals.attempt(lambda n=name: rivals.cast(n, x, compiled))
        theirs = None if rival is None else watch.seconds(rival)
        row: dict[str, Any] = {"cast": name, "bytes": size, "ms": seconds * 1e3, "bytes_per_second": size / seconds}
        row |= {"of_copy": size / seconds / copy, "torchao_ms": None if theirs is None else theirs * 1e3}
        row |= {"torchao_reason": reason, "vs_torchao": None if theirs is None else theirs / seconds}
        rows.append(row)
    return copy, rows


def work(cast: Cast, x: torch.Tensor, compiled: bool) -> partial[Any]:
    """A callable that casts `x` once, random bits included."""
    fmt = element_format(cast.element, resolve_flavour("auto", x.device))
    amax = x.abs().amax() if cast.known_amax else None
    if compiled:
        torch.compiler.reset()  # all casts share one function: past eight of them the compiler would run it eagerly

    def function(t: torch.Tensor) -> Any:
        if cast.both:
            return quantize_both(t, fmt, cast.block, mx=cast.mx, amax=amax)
        noise = stochastic_noise((t.shape[0], t.shape[1]), 0, t.device) if cast.stochastic else None
        return quantize(t, fmt, cast.block, mx=cast.mx, amax=amax, noise=noise)

    return partial(torch.compile(function) if compiled else function, x)
