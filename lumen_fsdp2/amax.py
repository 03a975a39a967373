"""The amax of weights that travel with one scale: one fused all-reduce a forward pass for all of them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lumen_core.comm.collectives import C10dCollectives
from lumen_core.controller import Controller
from lumen_core.kernels.largest import absmax
from lumen_fsdp2 import torch_internals

if TYPE_CHECKING:
    from lumen_fsdp2.binding import Binding

_of: weakref.WeakKeyDictionary[Controller, AmaxKeeper] = weakref.WeakKeyDictionary()


class AmaxKeeper:
    """Largest magnitudes of the whole weights of one sharded model, current when a pass begins.

    Whether to take them again is decided by what all ranks see alike (which weight is gathered, and when), never by a
    look at this rank's values: a rank that went its own way would leave the others waiting. The first gather of a
    forward pass takes all of them again, whatever happened to the weights before it. A gather outside of any pass
    (`module.unshard()`) takes those that travel with it.
    """

    def __init__(self) -> None:
        self.bindings: list[Binding] = []
        self._due = True

    def take(self, other: AmaxKeeper) -> None:
        """Keep the weights of another one too."""
        if other is self:
            return
        for binding in other.bindings:
            binding.keeper = self
        self.bindings += other.bindings
        other.bindings = []
        self._due = True

    def begin_pass(self) -> None:
        """A forward pass begins, on all ranks; weights may have been written to."""
        self._due = True

    def before_gather(self, binding: Binding) -> None:
        """Bring the amax of what is gathered up to date."""
        if binding.amax is None or (self._due and not torch_internals.in_backward()):
            self._due = False
            self._take(self.bindings)
        elif not torch_internals.in_backward() and not binding.in_forward_pass():
            together = [b for b in self.bindings if b.companions is binding.companions]
            if binding is together[0]:
                self._take(together)

    @torch.no_grad()
    def _take(self, bindings: list[Binding]) -> None:
        by_group: dict[dist.ProcessGroup, list[Binding]] = {}
        for binding in bindings:
            by_group.setdefault(binding.group, []).append(binding)
        for group, members in by_group.items():
            locals_ = [binding.local() for binding in members]
            # Offloaded parts are on the CPU; the group's backend, and the shards that are quantized, on its device.
            own = absmax(locals_).to(members[0].device)
            if group.size() > 1:
                C10dCollectives(group).all_reduce(own, dist.ReduceOp.MAX, label="weight amax")
            for binding, value in zip(members, own.unbind()):
                # Rounding is monotonic: the amax of the rounded weight is the rounded amax.
                binding.amax = value.to(binding.compute_dtype).to(torch.float32)


def keeper_of(controller: Controller) -> AmaxKeeper:
    """The one of an enabled model, made when first asked for."""
    if controller not in _of:
        _of[controller] = AmaxKeeper()
    return _of[controller]
