"""Who produced the first NaN or infinity: a skipped step run again, under observation.

The training loop only counts steps whose loss or gradient was not finite. When there was one, its batch is run once
more with hooks on every module. That is slow and waits for the device, and happens at most once a logging interval.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from launch.data import Batch
from launch.distributed import World, local
from launch.step import TrainStep
from lumen_core import quantize as quant


class NonFiniteError(RuntimeError):
    """The run was stopped because too many steps had to be skipped."""

    def __init__(self, message: str, *, step: int, module: str | None) -> None:
        super().__init__(message)
        self.step = step
        self.module = module


@dataclass(frozen=True, order=True)
class Culprit:
    """The first non-finite value of a step.

    Attributes:
        order: when it appeared, to compare ranks by.
        rank: which rank saw it.
        module: name of the module that produced it; "" is the model itself, as it is for the loss.
        what: the value, in words.
    """

    order: int
    rank: int
    module: str
    what: str

    def __str__(self) -> str:
        return f"{self.what} of {self.module or 'the model'} (rank {self.rank})"


def _finite(value: Any) -> bool:
    return all(
        bool(torch.isfinite(local(leaf)).all())
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    )


class _Observer:
    """Hooks that note the first non-finite value of a forward and backward pass."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.model = model
        self.rank = rank
        self.clock = 0
        self.found: Culprit | None = None
        self.in_place = any(getattr(module, "inplace", False) for module in model.modules())

    def note(self, module: str, what: str, value: Any) -> None:
        self.clock += 1
        if self.found is None and not _finite(value):
            self.found = Culprit(self.clock, self.rank, module, what)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for name, module in self.model.named_modules():
            handles += self._hook(name, module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, module: nn.Module) -> list[Any]:
        parent = name.rpartition(".")[0]

        def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
            # Bad before any module returned it: the code of the parent made it, between modules.
            self.note(parent, f"the input of {name}, computed in the forward pass", (args, kwargs))

        def returned(module: nn.Module, args: Any, output: Any) -> None:
            self._output(name, module, output)

        def gradient_entered(module: nn.Module, grads: Any) -> None:
            self.note(parent, f"the gradient that reaches {name}, computed in the backward pass", grads)

        def gradient_returned(module: nn.Module, grads: Any, outputs: Any) -> None:
            self.note(name, "the input gradient", grads)

        handles = [module.register_forward_hook(returned)]
        if name:
            handles.append(module.register_forward_pre_hook(entered, with_kwargs=True))
        # Backward hooks put views around inputs and outputs, which FSDP and in-place modules do not bear.
        leaf = next(module.children(), None) is None and not isinstance(module, FSDPModule)
        if leaf and not self.in_place:
            handles.append(module.register_full_backward_pre_hook(gradient_entered))
            handles.append(module.register_full_backward_hook(gradient_returned))
        return handles

    def _output(self, name: str, module: nn.Module, output: Any) -> None:
        what = "the output"
        if self.found is None and not _finite(output):
            for label, param in module.named_parameters(recurse=False):
                if not _finite(param.detach()):
                    what = f"the output (its {label} is not finite)"
        self.note(name, what, output)


def find_culprit(step: TrainStep, batches: Sequence[Batch], world: World) -> Culprit | None:
    """Runs ``batches`` forward and backward and names the module of the first non-finite value on any rank.

    Weights, gradients, scaling state and random numbers are afterwards as they were. Collective: every rank calls it,
    with its own micro-batches of the same step, and all get the same answer; None when everything was finite.
    """
    model = step.model
    observer = _Observer(model, world.rank)
    scaling = quant.state_dict(model) if quant.is_enabled(model) else None
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
        with observer.watching(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on modules whose inputs need no gradient
            loss, _ = step.backward(batches)
        observer.note("", "the loss", loss)
        for name, param in model.named_parameters():
            if param.grad is not None:
                observer.note(name.rpartition(".")[0], f"the gradient of {name.rpartition('.')[2]}", param.grad)
    step.optimizer.zero_grad(set_to_none=True)
    if scaling is not None:
        quant.load_state_dict(model, scaling)
    found = [c for c in world.gather(observer.found) if c is not None]
    return min(found, default=None)


class NonFiniteWatch:
    """Keeps the batches of the steps since the last look, counts skipped steps, and explains the first of them."""

    def __init__(self, step: TrainStep, world: World, limit: int, count: int = 0) -> None:
        self.step = step
        self.world = world
        self.limit = limit
        self.count = count
        self._kept: dict[int, Sequence[Batch]] = {}

    def keep(self, number: int, batches: Sequence[Batch]) -> None:
        """Remembers the batches (on the host) of step ``number``."""
        self._kept[number] = batches

    def look(self, skipped: Sequence[int]) -> str | None:
        """Takes note of the skipped steps since the last look, the same on all ranks; returns a message, if any.

        Raises:
            NonFiniteError: there have been ``limit`` of them.
        """
        kept, self._kept = self._kept, {}
        if not skipped:
            return None
        self.count += len(skipped)
        first = skipped[0]
        culprit = find_culprit(self.step, kept[first], self.world)
        cause = (
            f"first non-finite value: {culprit}"
            if culprit is not None
            else "run again with the present weights, its batch gave finite values"
        )
        more = f" (and {len(skipped) - 1} more up to step {skipped[-1]})" if len(skipped) > 1 else ""
        message = f"step {first}{more} was skipped, its loss or gradient was not finite; {cause}"
        if self.count >= self.limit:
            raise NonFiniteError(
                f"stopped after {self.count} skipped step(s), train.max_nonfinite_steps={self.limit}: {message}",
                step=first,
                module=None if culprit is None else culprit.module,
            )
        return message
