"""The amax of weights that travel with one scale: one fused all-reduce a forward pass for all of them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from lumen_core.comm.collectives import C10dCollectives
from lumen_core.controller import Controller
from lumen_core.kernels.largest import absmax

if TYPE_CHECKING:
    from lumen_fsdp2.attach import Binding

_of: weakref.WeakKeyDictionary[Controller, WeightAmax] = weakref.WeakKeyDictionary()
_hook: object | None = None


class WeightAmax:
    """Largest magnitudes of the whole weights of one sharded model, current when a pass begins.

    Whether to take them again is decided by what all ranks see alike (which weight is gathered, optimizer steps, loaded
    checkpoints), never by a look at this rank's values: a rank that went its own way would leave the others waiting.
    They are taken again by the first gather of a forward pass: after an optimizer step or a load, and when a weight is
    gathered that was gathered since.
    """

    def __init__(self) -> None:
        self.bindings: list[Binding] = []
        self._due = True
        self._seen: set[int] = set()
        _install_hook()

    def take(self, other: WeightAmax) -> None:
        """Keep the weights of another one too."""
        if other is self:
            return
        for binding in other.bindings:
            binding.refresher = self
        self.bindings += other.bindings
        other.bindings = []
        self._due = True

    def mark_changed(self) -> None:
        """The weights were written to, on all ranks."""
        self._due = True

    def before_gather(self, binding: Binding) -> None:
        """Bring all amaxes up to date where a new pass begins."""
        in_backward = torch._C._current_graph_task_id() != -1
        if binding.amax is None or (not in_backward and (self._due or id(binding) in self._seen)):
            self._refresh()
        if not in_backward:
            self._seen.add(id(binding))

    @torch.no_grad()
    def _refresh(self) -> None:
        self._due, self._seen = False, set()
        by_group: dict[dist.ProcessGroup, list[Binding]] = {}
        for binding in self.bindings:
            by_group.setdefault(binding.group, []).append(binding)
        for group, bindings in by_group.items():
            locals_ = [binding.local() for binding in bindings]
            own = absmax(locals_)
            if group.size() > 1:
                C10dCollectives(group).all_reduce(own, dist.ReduceOp.MAX, label="weight amax")
            for binding, value in zip(bindings, own.unbind()):
                # Rounding is monotonic: the amax of the rounded weight is the rounded amax.
                binding.amax = value.to(binding.compute_dtype).to(torch.float32)


def amax_of(controller: Controller) -> WeightAmax:
    """The one of an enabled model, made when first asked for."""
    if controller not in _of:
        _of[controller] = WeightAmax()
    return _of[controller]


def _install_hook() -> None:
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    for amax in list(_of.values()):
        amax.mark_changed()
