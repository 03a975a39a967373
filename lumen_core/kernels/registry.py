"""Which implementation runs an operation here, in which order they are tried, and why one was passed over.

Each candidate has a predicate on the operands. The reference is last and takes everything, so an odd shape is slower,
never an error. The choice is made per call from shapes and formats, never locked by name. An exception inside a kernel
is an error, not a silent fall to the next candidate.

`LUMEN_KERNELS="gemm=reference,quantize=reference"` forces one for an operation (it must still be able to run the
operands).
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lumen_core import casts
from lumen_core.formats import ElementFormat, element_format, resolve_flavour
from lumen_core.kernels import reference, scaled_mm
from lumen_core.kernels.query import GemmQuery, QuantizeQuery
from lumen_core.kernels.triton import cast as triton_cast
from lumen_core.tensor import QuantizedTensor
from lumen_core.tracing import constant_when_traced

ENVIRONMENT = "LUMEN_KERNELS"
Query = GemmQuery | QuantizeQuery


@dataclass(frozen=True)
class Candidate:
    """One implementation of an operation.

    Attributes:
        name: as `LUMEN_KERNELS` spells it.
        unsupported: gives the reason why a query cannot run, or None.
    """

    name: str
    unsupported: Callable[..., str | None]


def _needs_gpu(query: GemmQuery) -> str | None:
    return "a CPU multiplies faster in fp32" if query.device_type == "cpu" else None


def _always(query: Query) -> str | None:
    return None


_CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "gemm": (
        Candidate("scaled_mm", scaled_mm.unsupported),
        Candidate("dequantize_bf16", _needs_gpu),
        Candidate("reference", _always),
    ),
    "quantize": (
        Candidate("triton", triton_cast.unsupported),
        Candidate("reference", _always),
    ),
}


@constant_when_traced
def _forced(op: str) -> str | None:
    return parse_override(os.environ.get(ENVIRONMENT, "")).get(op)


def parse_override(text: str) -> dict[str, str]:
    """Parse `op=name,op=name`.

    Raises:
        ValueError: naming the part that is no known operation or implementation, and what is.
    """
    forced = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        op, _, name = (p.strip() for p in part.partition("="))
        if op not in _CANDIDATES:
            raise ValueError(f"{ENVIRONMENT}: unknown operation {op!r} in {part!r}; known: {', '.join(_CANDIDATES)}")
        names = [c.name for c in _CANDIDATES[op]]
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{ENVIRONMENT}: {op} has no implementation {name!r}{hint}; it has {', '.join(names)}")
        forced[op] = name
    return forced


def explain(op: str, query: Query) -> list[tuple[str, str | None]]:
    """Every candidate in order with the reason why it is passed over; the first with None runs."""
    forced = _forced(op)
    out = []
    for candidate in _CANDIDATES[op]:
        reason = candidate.unsupported(query)
        if reason is None and forced not in (None, candidate.name):
            reason = f"{ENVIRONMENT} names {forced}"
        out.append((candidate.name, reason))
    return out


def choose(op: str, query: Query) -> str:
    """Name of the implementation that runs `query`.

    Raises:
        ValueError: the one that `LUMEN_KERNELS` names cannot.
    """
    forced = _forced(op)
    for candidate in _CANDIDATES[op]:
        if forced not in (None, candidate.name):
            continue
        reason = candidate.unsupported(query)
        if reason is None:
            return candidate.name
        if forced is not None:
            raise ValueError(f"{ENVIRONMENT} names {forced} for {op}, which cannot run here: {reason}")
    raise AssertionError(f"{op} has no reference")


def gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, *, fast_accum: bool = False) -> torch.Tensor:
    """`a @ b.T` by the first implementation that can: `[M, C] x [N, C] -> [M, N]` in `out_dtype`.

    Args:
        fast_accum: allow the tensor core's less exact accumulation where the implementation has it.
    """
    query = GemmQuery(a.data.device.type, a.fmt, a.block, b.fmt, b.block, a.shape[0], b.shape[0], a.shape[1], out_dtype)
    name = choose("gemm", query)
    if torch.compiler.is_compiling():
        return _run_gemm(name, a, b, out_dtype, fast_accum)
    with _told("gemm", name, query):
        return _run_gemm(name, a, b, out_dtype, fast_accum)


@contextlib.contextmanager
def _told(op: str, name: str, query: Query) -> Iterator[None]:
    """An error of a kernel says which one it was, and on what."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(f"{op} by {name} failed on {query}: {error}") from error


def _run_gemm(
    name: str, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    if name == "scaled_mm":
        return scaled_mm.gemm(a, b, out_dtype, fast_accum)
    if name == "dequantize_bf16":
        return reference.gemm_dequantize_bf16(a, b, out_dtype)
    return reference.gemm(a, b, out_dtype)


def quantize(
    x: torch.Tensor,
    fmt: ElementFormat,
    block: tuple[int, int],
    *,
    mx: bool = False,
    noise: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of a contiguous matrix by the first implementation that can: all give the same bits.

    Args: as in `lumen_core.tensor.quantize`.
    """
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and not (x.requires_grad and torch.is_grad_enabled())
    query = QuantizeQuery(x.device.type, x.dtype, fmt, block, mx, noise is not None, x.numel(), plain)
    name = choose("quantize", query)
    if name == "reference":
        return casts.quantize(x, fmt, block, mx=mx, noise=noise, **options)
    with _told("quantize", name, query):
        return triton_cast.quantize(x, fmt, block, mx=mx, **options)


def casts_by_triton(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """True where the Triton casts run for values of `dtype` on x's device; what goes with them asks this, too."""
    if x.device.type == "cpu":
        return False
    fmt = element_format("e4m3", resolve_flavour("auto", x.device))
    query = QuantizeQuery(x.device.type, dtype, fmt, (0, 0), mx=False, noise=False, elements=x.numel())
    return choose("quantize", query) == "triton"


def table(device: torch.device | str) -> list[tuple[str, str, list[tuple[str, str | None]]]]:
    """Rows `(operands, chosen, [(candidate, why not)])` for the usual recipes on `device` at an aligned shape."""
    device = torch.device(device)
    flavour = resolve_flavour("auto", device)
    rows = []
    for label, a, b, block_a, block_b in (
        ("gemm tensorwise e4m3", "e4m3", "e4m3", (0, 0), (0, 0)),
        ("gemm tensorwise e5m2 x e4m3", "e5m2", "e4m3", (0, 0), (0, 0)),
        ("gemm rowwise e4m3", "e4m3", "e4m3", (1, 0), (1, 0)),
        ("gemm 1x128 x 128x128 e4m3", "e4m3", "e4m3", (1, 128), (128, 128)),
        ("gemm mxfp8 1x32", "e4m3", "e4m3", (1, 32), (1, 32)),
        ("gemm mxfp4 1x32", "e2m1", "e2m1", (1, 32), (1, 32)),
    ):
        query = GemmQuery(
            device.type,
            element_format(a, flavour),
            block_a,
            element_format(b, flavour),
            block_b,
            4096,
            4096,
            4096,
            torch.bfloat16,
        )
        rows.append((label, choose("gemm", query), explain("gemm", query)))
    for label, element, block, mx in (
        ("quantize tensorwise e4m3", "e4m3", (0, 0), False),
        ("quantize tensorwise e5m2", "e5m2", (0, 0), False),
        ("quantize rowwise e4m3", "e4m3", (1, 0), False),
        ("quantize 1x128 e4m3", "e4m3", (1, 128), False),
        ("quantize 128x128 e4m3", "e4m3", (128, 128), False),
        ("quantize mxfp8 1x32", "e4m3", (1, 32), True),
        ("quantize mxfp8 32x32", "e4m3", (32, 32), True),
        ("quantize mxfp4 1x32", "e2m1", (1, 32), True),
    ):
        fmt = element_format(element, flavour)
        query = QuantizeQuery(device.type, torch.bfloat16, fmt, block, mx, noise=False, elements=4096 * 4096)
        rows.append((label, choose("quantize", query), explain("quantize", query)))
    return rows
