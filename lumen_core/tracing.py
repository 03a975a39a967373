"""Help for code that `torch.compile` traces, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable)


def constant_when_traced(fn: _Function) -> _Function:
    """Decorator: a traced call runs `fn` once and its result becomes a constant of the graph.

    `torch.compiler.assume_constant_result` sets the same mark, but importing it loads the whole compiler and sympy with
    it, a second and a half that eager users should not pay.
    """
    fn._dynamo_marked_constant = True
    return fn


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x.to(dtype)` that leaves no trace where it changes nothing.

    On torch 2.11 a conversion of an autograd function's output to the dtype it has already cuts its gradient in a
    compiled graph: backward then gets zeros, with no error. 2.13 does not need this.
    """
    return x if x.dtype == dtype else x.to(dtype)


def is_zero(size: int) -> bool:
    """`size == 0`; for a traced, varying size only where that is certain, so that no graph is tied to it."""
    if not torch.compiler.is_compiling():
        return size == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size == 0)
