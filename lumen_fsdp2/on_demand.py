"""Mode `on-demand`: which direction the weights of a group travel in, decided by all of its ranks together."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lumen_core.comm.collectives import C10dCollectives
from lumen_core.gathered import COLUMNS, ROWS
from lumen_fsdp2 import torch_internals
from lumen_fsdp2.say import say_once

if TYPE_CHECKING:
    from lumen_fsdp2.binding import Binding

SWITCHED = "weights are read again outside the pass that they were gathered for"
_COLUMNS_NOW, _ROWS_NOW, _ROWS_ALWAYS = range(3)  # the largest answer of any rank holds


class OnDemand:
    """The direction of one FSDP2 group.

    What rules columns out is what this rank's forward pass did (recomputation, a compiler, no gradients), and another
    rank may have done something else. So each gather within a backward pass begins with the maximum of what all ranks
    want, which every one of them takes part in, as in the gather itself. The host waits for it. Once rows are wanted
    for good there is nothing left to ask.

    Attributes:
        bindings: of the group, in the order in which FSDP2 asks for their bytes.
        rows_only: columns are ruled out, on every rank.
    """

    def __init__(self, fsdp_group: Any) -> None:
        self._fsdp_group = weakref.ref(fsdp_group)
        self.bindings: list[Binding] = []
        self.rows_only = False
        self._now = ROWS

    def direction(self, binding: Binding) -> str:
        """What `binding` sends in the gather that begins now."""
        if self.rows_only or not torch_internals.in_backward():
            return ROWS
        if binding is self.bindings[0]:
            self._now = self._agree(binding.group)
        return self._now

    def _agree(self, group: dist.ProcessGroup) -> str:
        fsdp_group = self._fsdp_group()
        wanted = _COLUMNS_NOW if torch_internals.gathers_for_backward_only(fsdp_group) else _ROWS_NOW
        if any(binding.info.rows_only for binding in self.bindings):
            wanted = _ROWS_ALWAYS
        if group.size() > 1:
            answer = torch.tensor(wanted, dtype=torch.int32, device=fsdp_group.device)
            C10dCollectives(group).all_reduce(answer, dist.ReduceOp.MAX, label="weight direction")
            wanted = int(answer)
        if wanted == _ROWS_ALWAYS:
            self.rows_only = True
            say_once("on-demand became row", f"for {self.bindings[0].info.name} and what is used like it: {SWITCHED}")
        return COLUMNS if wanted == _COLUMNS_NOW else ROWS
