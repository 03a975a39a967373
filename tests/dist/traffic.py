"""A counter of bytes at the process group itself, below all of our code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, torch.dtype, int]]]:
    """`(kind, dtype, bytes of the output of a gather, of the input of a reduction)` of each call of a process group."""
    calls: list[tuple[str, torch.dtype, int]] = []
    group = dist.ProcessGroup
    measures = {  # by the names of torch 2.11 and of 2.13
        "_allgather_base": ("all_gather", lambda output, input: (input.dtype, output.nbytes)),
        "all_gather_single": ("all_gather", lambda output, input: (input.dtype, output.nbytes)),
        "_reduce_scatter_base": ("reduce_scatter", lambda output, input: (input.dtype, input.nbytes)),
        "reduce_scatter_single": ("reduce_scatter", lambda output, input: (input.dtype, input.nbytes)),
        "allreduce": ("all_reduce", lambda tensors, *_: (tensors[0].dtype, sum(t.nbytes for t in tensors))),
    }
    # As they are in the class: what getattr gives would not bind again when it is put back.
    kept = {name: vars(group)[name] for name in measures if name in vars(group)}
    called = {name: getattr(group, name) for name in kept}

    def counting(name: str):
        kind, measure = measures[name]

        def call(self, *args, **kwargs):
            calls.append((kind, *measure(*args[:2])))
            return called[name](self, *args, **kwargs)

        return call

    for name in kept:
        setattr(group, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in kept.items():
            setattr(group, name, function)
