"""FSDP2's communication over our collectives: what `FSDPModule.set_custom_all_gather` and its twin take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

# torch documents the two setters and has no public name for what they take.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from lumen_core.comm.collectives import C10dCollectives, Collectives, ReduceOp, collectives_for
from lumen_core.comm.quantized_reduce import quantized_reduce_scatter
from lumen_fsdp2.say import say_once


@functools.cache
def chosen(group: dist.ProcessGroup, choice: str, device: torch.device) -> Collectives:
    """`collectives_for`, and a line that says which; all ranks of the group must ask.

    One for all modules over a group: choosing may take a collective, and MORI's buffers are hundreds of megabytes.
    Kept as long as the process: letting go of it when the last model does would leave to each rank's garbage collector
    which of them choose again.
    """
    collectives, reason = collectives_for(group, choice, device)
    say_once(f"collectives: {collectives.name} ({reason})")
    return collectives


class _Communication:
    """What both have: the collectives of each group, a name in the meter, and plain buffers."""

    def __init__(self, collectives: Collectives | str, label: str) -> None:
        self._given = collectives
        self._others: dict[dist.ProcessGroup, Collectives] = {}
        self._label = label

    def _collectives(self, group: dist.ProcessGroup, device: torch.device) -> Collectives:
        """Those of the group that FSDP calls with: a model may be sharded over several meshes."""
        given = self._given
        if isinstance(given, str):
            return chosen(group, given, device)
        if given.group == group:
            return given
        if group not in self._others:
            choice = "c10d" if isinstance(given, C10dCollectives) else "auto"
            self._others[group], _ = collectives_for(group, choice, device, given.meter)
        return self._others[group]

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new buffer of the caching allocator."""
        return torch.empty(*size, dtype=dtype, device=device)


class LumenAllGather(_Communication, AllGather):
    """FSDP2's all-gather of parameters."""

    def __init__(
        self,
        collectives: Collectives | str,
        label: str = "parameters",
        shares: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        """What carries the bytes, and how they are counted.

        Args:
            collectives: `auto`, `c10d` or `mori`: chosen for each group when FSDP first calls for it, which all ranks
                do in the same order. Or the collectives of the group to shard over; another group then gets others of
                the same kind where these can serve it, or c10d.
            label: in the meter.
            shares: bytes of one gather by parameter, for the meter; `label` counts what they leave.
        """
        super().__init__(collectives, label)
        self._shares = shares

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `input_tensor` of all ranks, in rank order."""
        collectives = self._collectives(group, input_tensor.device)
        label: str | dict[str, int] = self._label
        if self._shares is not None:
            label = dict(self._shares())
            if rest := output_tensor.nbytes - sum(label.values()):
                label[self._label] = rest
        return collectives.all_gather(output_tensor, input_tensor, async_op=async_op, label=label)


class LumenReduceScatter(_Communication, ReduceScatter):
    """FSDP2's reduce-scatter of gradients, optionally with FP8 on the wire."""

    def __init__(self, collectives: Collectives | str, low_precision: bool = False, label: str = "gradients") -> None:
        """See `LumenAllGather`; `low_precision` sends sums and averages as in `quantized_reduce_scatter`."""
        super().__init__(collectives, label)
        self._low_precision = low_precision

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor` over all ranks, and keep this rank's part."""
        collectives = self._collectives(group, input_tensor.device)
        if self._low_precision and group.size() > 1 and (op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG):
            return quantized_reduce_scatter(
                output_tensor, input_tensor, op, collectives, async_op=async_op, label=self._label
            )
        return collectives.reduce_scatter(output_tensor, input_tensor, op, async_op=async_op, label=self._label)
