"""Which implementation runs an operation here, in which order they are tried, and why one was passed over.

An operation is a name and its candidates; each has a predicate on a query (formats, dtypes, shapes, device). The last
one is the reference and takes everything, so an odd shape is slower, never an error. The choice is made per call, never
locked by name. An exception inside a kernel is an error, not a silent fall to the next candidate.

`LUMEN_KERNELS="gemm=reference,quantize=reference"` forces one for an operation (it must still be able to run the
operands).

Each operation has a file of its own, named in `FILES`, with an `Operation` of that name in capitals.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lumen_core.tracing import constant_when_traced

ENVIRONMENT = "LUMEN_KERNELS"
FILES = ("gemm", "quantize", "quantize_both", "attention", "norm", "swiglu", "cross_entropy", "rope")


@dataclass(frozen=True)
class Candidate:
    """One implementation of an operation.

    Attributes:
        name: as `LUMEN_KERNELS` spells it.
        unsupported: gives the reason why a query cannot run, or None.
        run: takes what the operation takes.
    """

    name: str
    unsupported: Callable[[Any], str | None]
    run: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation and what can run it, first choice first, the reference last."""

    name: str
    candidates: tuple[Candidate, ...]

    def explain(self, query: Any) -> list[tuple[str, str | None]]:
        """Every candidate in order with the reason why it is passed over; the first with None runs."""
        forced = _forced(self.name)
        out = []
        for candidate in self.candidates:
            reason = candidate.unsupported(query)
            if reason is None and forced not in (None, candidate.name):
                reason = f"{ENVIRONMENT} names {forced}"
            out.append((candidate.name, reason))
        return out

    def choose(self, query: Any) -> Candidate:
        """What runs `query`.

        Raises:
            ValueError: the one that `LUMEN_KERNELS` names cannot.
        """
        forced = _forced(self.name)
        for candidate in self.candidates:
            if forced not in (None, candidate.name):
                continue
            reason = candidate.unsupported(query)
            if reason is None:
                return candidate
            if forced is not None:
                raise ValueError(f"{ENVIRONMENT} names {forced} for {self.name}, which cannot run here: {reason}")
        raise AssertionError(f"{self.name} has no reference")

    def __call__(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Run what `choose` gives on the arguments.

        Raises:
            RuntimeError: from the kernel, with its name and the query.
        """
        candidate = self.choose(query)
        if torch.compiler.is_compiling():
            return candidate.run(*args, **kwargs)
        with _told(self.name, candidate.name, query):
            return candidate.run(*args, **kwargs)


class Passes:
    """`Candidate.run` of an operation with several passes: the first argument names the one to run."""

    def __init__(self, **passes: Callable[..., Any]) -> None:
        self.passes = passes

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.passes[name](*args, **kwargs)


def always(query: Any) -> str | None:
    """The predicate of a reference."""
    return None


@contextlib.contextmanager
def _told(op: str, name: str, query: Any) -> Iterator[None]:
    """An error of a kernel says which one it was, and on what."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(f"{op} by {name} failed on {query}: {error}") from error


def operations() -> dict[str, Operation]:
    """All operations by name."""
    files = (importlib.import_module(f"lumen_core.kernels.{name}") for name in FILES)
    return {name: getattr(file, name.upper()) for name, file in zip(FILES, files)}


@constant_when_traced
def _forced(op: str) -> str | None:
    text = os.environ.get(ENVIRONMENT, "")
    return parse_override(text).get(op) if text else None


def parse_override(text: str) -> dict[str, str]:
    """Parse `op=name,op=name`.

    Raises:
        ValueError: naming the part that is no known operation or implementation, and what is.
    """
    forced, known = {}, operations()
    for part in filter(None, (p.strip() for p in text.split(","))):
        op, _, name = (p.strip() for p in part.partition("="))
        if op not in known:
            raise ValueError(f"{ENVIRONMENT}: unknown operation {op!r} in {part!r}; known: {', '.join(known)}")
        names = [c.name for c in known[op].candidates]
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{ENVIRONMENT}: {op} has no implementation {name!r}{hint}; it has {', '.join(names)}")
        forced[op] = name
    return forced
