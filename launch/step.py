"""One training step: forward, backward, accumulation, clipping, and the gate in front of the optimizer.

Nothing here waits for the device. What the host wants to know comes back as one small tensor a step, which the loop
reads at its logging interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from launch.data import IGNORE, Batch, model_inputs, supervised_tokens
from launch.distributed import World, fsdp_modules, gradient_sync, local
from lumen_core import quantize as quant
from lumen_core.comm.meter import METER
from lumen_core.optim import set_skip_flag


class StepRecord(NamedTuple):
    """What one step came to, the same on every rank.

    Attributes:
        loss: sum of token losses / supervised tokens, over the whole global batch; 0 where there are none.
        grad_norm: of the whole gradient, before clipping.
        tokens: supervised tokens of the global batch.
        nonfinite: 1 where loss or gradient was not finite and the step was skipped.
        stop: how many ranks have been asked to stop.
    """

    loss: float
    grad_norm: float
    tokens: float
    nonfinite: float
    stop: float

    @classmethod
    def read(cls, vector: torch.Tensor) -> StepRecord:
        """From the tensor `TrainStep` returns; waits for the device."""
        return cls(*vector.tolist())


def logits_of(output: Any) -> torch.Tensor:
    """The logits in whatever a model returned: ``[batch, sequence, vocabulary]``."""
    return output if isinstance(output, torch.Tensor) else output.logits


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of cross-entropies in fp32 over the labels that are not `IGNORE`; 0 (with a gradient of 0) without any.

    Args:
        logits: ``[B, S, V]``, any float dtype.
        labels: int64 ``[B, S]``, shifted already.
    """
    flat = logits.float().flatten(0, -2)
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE, reduction="sum")


class Forward:
    """The model as a function from a batch to its loss."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        config = getattr(model, "config", None)
        self.attention = getattr(config, "_attn_implementation", None) or "sdpa"
        # Inference caches would be filled again by a recomputed forward.
        self.extra = {"use_cache": False} if config is not None else {}
        self.aux_weight = float(getattr(config, "router_aux_loss_coef", None) or 0.0)

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum of token losses (fp32, 0-dim), and the weighted auxiliary loss of the model's routers, a mean, if any."""
        output = self.model(**model_inputs(batch, attention=self.attention, dtype=self.dtype), **self.extra)
        auxiliary = getattr(output, "aux_loss", None)
        if auxiliary is not None:
            auxiliary = self.aux_weight * auxiliary
        return token_loss_sum(logits_of(output), batch.labels), auxiliary


def sum_of_squares(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares of all elements (float64, 0-dim): norms in fp32, a tensor each, then added in float64."""
    present = [t for t in tensors if t.numel()]
    if not present:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm([t.float() if t.dtype != torch.float32 else t for t in present])
    return torch.stack([n.to(device) for n in norms]).double().square().sum()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Every gradient there is, DTensors as such; frozen and unused parameters have none."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def _shard_groups(tensor: torch.Tensor) -> tuple:
    """The process groups over which the elements of ``tensor`` are split; () for a tensor every rank has whole."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(tensor.device_mesh.get_group(dim) for dim, place in enumerate(tensor.placements) if place.is_shard())


def split_sum_of_squares(grads: Sequence[torch.Tensor], world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of squares of the whole gradient in two parts, float64 0-dim each.

    Returns:
        ``(split, whole)``: ``split`` is yet to be summed over `World.mesh`; ``whole`` is the same on all ranks already
        (replicated gradients, and those on other meshes, which are reduced here).
    """
    parts: dict[tuple, list[torch.Tensor]] = {}
    for grad in grads:
        parts.setdefault(_shard_groups(grad), []).append(local(grad))
    split = sum_of_squares((), world.device)
    whole = sum_of_squares((), world.device)
    for groups, tensors in parts.items():
        part = sum_of_squares(tensors, world.device)
        if groups == (world.mesh.get_group(),):
            split = split + part
        else:
            for group in groups:
                torch.distributed.all_reduce(part, group=group)
            whole = whole + part
    return split, whole


class TrainStep:
    """Forward, backward, clip and update, over all micro-batches of this rank and all ranks.

    A step whose loss or gradient is not finite on any rank changes neither weights nor optimizer state, on all of them,
    and neither does one without a single supervised token. The decision is a flag on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        dtype: torch.dtype = torch.float32,
        grad_clip: float = 1.0,
    ) -> None:
        self.model = model
        self.forward = Forward(model, dtype)
        self.optimizer = optimizer
        self.world = world
        self.grad_clip = grad_clip
        self.gated_on_device = True
        try:
            set_skip_flag(optimizer, None)
        except TypeError:  # another optimizer: the host looks before each step
            self.gated_on_device = False

    def place(self, batches: Sequence[Batch]) -> list[Batch]:
        """``batches`` on this rank's device."""
        if self.world.device.type == "cpu":
            return list(batches)
        return [b.pin_memory().to(self.world.device, non_blocking=True) for b in batches]

    def backward(self, batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the gradient of the global batch's mean token loss to ``.grad``.

        Args:
            batches: this rank's micro-batches, on the host; as many on every rank.

        Returns:
            This rank's share of the loss, and the supervised tokens of all ranks (float64, 0-dim each).
        """
        device = self.world.device
        tokens = torch.full((), supervised_tokens(batches), dtype=torch.float64, device=device)
        tokens = self.world.sum_(tokens)
        weight = (1.0 / tokens.clamp(min=1.0)).float()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for index, batch in enumerate(self.place(batches)):
            with gradient_sync(self.model, index == len(batches) - 1):
                loss_sum, auxiliary = self.forward(batch)
                objective = loss_sum * weight
                if auxiliary is not None:
                    objective = objective + auxiliary * (weight * (batch.labels != IGNORE).sum())
                objective.backward()
            total += loss_sum.detach().double() * weight
        self._reduce_replicated()
        return total, tokens

    def _reduce_replicated(self) -> None:
        """Sums the gradients that FSDP does not manage."""
        if self.world.size > 1:
            for grad in gradients(self.model):
                if not isinstance(grad, DTensor):
                    torch.distributed.all_reduce(grad)
                    METER.record("all_reduce", "gradients", grad.nbytes)

    def __call__(self, batches: Sequence[Batch], *, stop: bool = False) -> torch.Tensor:
        """One step.

        Args:
            batches: this rank's micro-batches, on the host; as many on every rank.
            stop: whether this rank was asked to stop; the answer for all ranks is in the result.

        Returns:
            The fields of `StepRecord` in order, float64 ``[5]`` on the device.
        """
        loss, tokens = self.backward(batches)
        grads = gradients(self.model)
        split, whole = split_sum_of_squares(grads, self.world)
        bad = ~(torch.isfinite(loss) & torch.isfinite(split + whole))
        asked = torch.full((), float(stop), dtype=torch.float64, device=self.world.device)
        loss, split, bad, asked = self.world.sum_(torch.stack([loss, split, bad.double(), asked])).unbind()
        norm = (split + whole).sqrt()
        bad = (bad > 0) | ~torch.isfinite(norm) | ~torch.isfinite(loss)
        norm = norm.masked_fill(bad, float("nan"))  # on every rank, whatever each of them saw
        if self.grad_clip > 0 and grads:
            scale = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0).float()
            torch._foreach_mul_([local(g) for g in grads], scale)
        self._update(bad | (tokens == 0))
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss, norm, tokens, bad.double(), asked])

    def _update(self, skip: torch.Tensor) -> None:
        """Steps the optimizer unless ``skip`` (bool, 0-dim): then nothing it owns changes."""
        if self.gated_on_device:
            set_skip_flag(self.optimizer, skip.float())
            self.optimizer.step()
        elif skip.item():
            quant.step_end(self.model)  # what the optimizer's post-step hook would have done
        else:
            self.optimizer.step()


@torch.no_grad()
def evaluate(forward: Forward, batches: Iterable[Batch], world: World) -> torch.Tensor:
    """Mean token loss over all batches of all ranks (float64, 0-dim, NaN without a token); training is not touched.

    Args:
        batches: this rank's, on the host; as many on every rank.
    """
    model, device = forward.model, world.device
    training = model.training
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.eval()
        try:
            for batch in batches:
                totals[1] += supervised_tokens(batch)
                loss_sum, _ = forward(batch.to(device))
                totals[0] += loss_sum.double()
        finally:
            model.train(training)
            # Groups that stay gathered between forward and backward would stay so for good: until the next backward
            # pass the model's parameters were other objects than the optimizer's.
            for module in fsdp_modules(model):
                module.reshard()
    world.sum_(totals)
    return totals[0] / totals[1]
