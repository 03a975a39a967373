"""Delayed scaling: the amax history of one layer, and the counter its stochastic rounding draws from.

The scale of a step comes from the amax of earlier steps, so a cast need not read its tensor twice. Each tensor role
(input, weight, gradient) gets one history entry a training step:

* the micro-batches of a step take their maximum, which makes a recomputed forward a no-op;
* evaluation and passes without gradients record nothing;
* with no history yet (first step, after `reset`, after zeros) the tensor's own amax is used;
* a step ends when an optimizer that holds the model's parameters has stepped, when the host says so, or, with neither,
  when the weight is seen to have been written to.

Everything is a device tensor and a step never waits for the host. The tensors are no buffers: they must not enter
`state_dict`, follow `model.to(torch.bfloat16)`, or be broadcast by DDP. `quantize.state_dict` saves them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lumen_core.kernels.largest import largest_magnitude

INPUT, WEIGHT, GRADIENT = 0, 1, 2
ROLES = ("input", "weight", "gradient")

# `current` holds this where no pass of the running step has seen the tensor.
_NOT_SEEN = -1.0
_COUNT_MASK = 0xFFFFFFFF


class ScalingState:
    """Mutable scaling state of one quantized layer.

    Attributes:
        history: fp32 `[history_len, 3]`, newest entry last, 0 where there is none yet; columns are `ROLES`.
        current: fp32 `[3]`, largest amax seen in the running step.
        in_use: fp32 `[3]`, the amax that scales are taken from during this step; 0 means the tensor's own.
        counter: int64 0-dim, the key of the next stochastic rounding: gradient casts so far in the low 32 bits, above
            them a number that separates layers and ranks. (In one tensor, because compiled code treats a Python number
            as a constant and would compile every layer again.)
        fresh: no step has ended since the history began.
    """

    @torch.inference_mode(False)  # made during an evaluation, it must still take part in training
    def __init__(self, history_len: int, device: torch.device | str, base_key: int = 0) -> None:
        self._base_key = base_key
        self.history = torch.zeros(history_len, len(ROLES), device=device)
        self.current = torch.full((len(ROLES),), _NOT_SEEN, device=device)
        self.in_use = torch.zeros(len(ROLES), device=device)
        self.counter = torch.full((), base_key, dtype=torch.int64, device=device)
        self.fresh = True
        self._weight_version: int | None = None

    @property
    def device(self) -> torch.device:
        """Where the state lives; it follows the layer's weight."""
        return self.history.device

    @torch.inference_mode(False)
    def to(self, device: torch.device) -> None:
        """Move to `device`. From the meta device the state starts afresh: there are no values to move."""
        if self.device == device:
            return
        if self.device.type == "meta":
            self.__init__(self.history.shape[0], device, self._base_key)
            return
        for name in ("history", "current", "in_use", "counter"):
            setattr(self, name, getattr(self, name).to(device).clone())

    def amax(
        self,
        role: int,
        x: torch.Tensor,
        record: bool,
        over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The amax to scale `x` by, 0-dim fp32; with `record` this step's maximum takes x's own in.

        A value that is not finite is never scaled away: infinity would saturate to a finite code, and no check for a
        bad step would see it. A weight never saturates either: it may have been written since the last step (a loaded
        checkpoint, in whatever way), and the experts of a bank that share one amax are not all seen in each step.

        Args:
            role: `INPUT`, `WEIGHT` or `GRADIENT`.
            x: a tensor with at least one element.
            over_ranks: takes the maximum over the ranks that hold parts of x. Once a history is there, an activation
                or gradient is scaled by that, which is the same on all ranks: nothing is sent then.
        """
        own = largest_magnitude(x)
        if over_ranks is not None and (role == WEIGHT or self.fresh):
            own = over_ranks(own)
        if record:
            self.note(role, own)
        if role == WEIGHT:
            return self.weight_amax(own)
        in_use = self.in_use[role]
        return torch.where((in_use > 0) & torch.isfinite(own), in_use, own)

    def note(self, role: int, own: torch.Tensor) -> None:
        """Let this step's maximum take in a tensor's own amax, 0-dim fp32."""
        slot = self.current[role]
        slot.copy_(torch.maximum(slot, own))

    def weight_amax(self, own: torch.Tensor) -> torch.Tensor:
        """The amax to scale a weight by whose own is `own`."""
        return torch.maximum(self.in_use[WEIGHT], own)

    def coming_weight_amax(self, own: torch.Tensor, current: torch.Tensor, algo: str) -> torch.Tensor:
        """The same once the running step is over, for a host that casts weights before it ends the step.

        Args:
            own: of the weight as it is now, 0-dim fp32.
            current: the amax that the running step saw, 0-dim fp32, of all ranks that `end_step` will ask.
            algo: as in `end_step`.
        """
        history = self.history[:, WEIGHT]
        pushed = torch.cat([history[1:], current[None]])
        history = torch.where(torch.isfinite(current) & (current >= 0), pushed, history)
        return torch.maximum(history.amax() if algo == "max" else history[-1], own)

    def notice_update(self, weight_version: int, algo: str) -> None:
        """End this layer's step if its weight was written since the last pass (a hand-written update).

        After `end_step` the next version seen is taken as it is: the optimizer's own write must not end a second step.
        """
        if self._weight_version not in (None, weight_version):
            end_step([self], algo)
        self._weight_version = weight_version

    def next_key(self) -> torch.Tensor:
        """A fresh 0-dim int64 key for one gradient's stochastic rounding."""
        key = self.counter.clone()
        self.counter.add_(1)
        return key

    def rekey(self, base_key: int) -> None:
        """Draw from another stream from now on: the layer's name became known."""
        self._base_key = base_key
        self.counter.copy_((self.counter & _COUNT_MASK) | base_key)

    def set_count(self, counter: torch.Tensor) -> None:
        """Continue counting from a saved counter, which may be another rank's: only its count is taken."""
        self.counter.copy_((self.counter & ~_COUNT_MASK) | (counter & _COUNT_MASK))

    def set_history(self, history: torch.Tensor, current: torch.Tensor, algo: str) -> None:
        """Take over a saved history; one of another length gives its newest entries."""
        keep = min(history.shape[0], self.history.shape[0])
        self.history.zero_()
        self.history[-keep:] = history[-keep:].to(self.device)
        self.current.copy_(current)
        self.in_use.copy_(_chosen(self.history, algo))
        self.fresh = not bool(history.any())  # saved before a step ended: the tensors' own amax counts, as then

    def reset(self) -> None:
        """Forget history, so that the next pass scales by current values."""
        self.history.zero_()
        self.current.fill_(_NOT_SEEN)
        self.in_use.zero_()
        self.fresh = True


def end_step(
    states: list[ScalingState],
    algo: str,
    *,
    reduce: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Close a training step for a whole model: push one entry a role, choose the next step's amax.

    A role that nobody ran, or whose amax is not finite, keeps its history. Calling it twice changes nothing.

    Args:
        states: one a layer, in the same order on every rank, all of one history length.
        algo: `max` of the history or its `most_recent` entry.
        reduce: take the maximum over `group` (default: all ranks) first, in one all-reduce for the whole model; every
            rank must then call, whichever layers it ran.
    """
    states = [s for s in states if s.device.type != "meta"]
    if not states:
        return
    with torch.no_grad():
        # One device as a rule; layers spread over several, or one not run since the model moved, are gathered.
        device = states[-1].device
        current = torch.stack([s.current.to(device) for s in states])
        if reduce and torch.distributed.is_available() and torch.distributed.is_initialized():
            # With NaN a maximum depends on the order of ranks in some backends; infinity does not (dropped below).
            current = torch.nan_to_num(current, nan=float("inf"), posinf=float("inf"))
            torch.distributed.all_reduce(current, op=torch.distributed.ReduceOp.MAX, group=group)
        history = torch.stack([s.history.to(device) for s in states])
        valid = torch.isfinite(current) & (current >= 0)
        pushed = torch.cat([history[:, 1:], current[:, None]], dim=1)
        history = torch.where(valid[:, None], pushed, history)
        in_use = _chosen(history, algo)
        torch._foreach_copy_([s.history for s in states], list(history.unbind()))
        torch._foreach_copy_([s.in_use for s in states], list(in_use.unbind()))
        torch._foreach_copy_([s.current for s in states], list(torch.full_like(in_use, _NOT_SEEN).unbind()))
        for state in states:
            state._weight_version = None
            state.fresh = False


def _chosen(history: torch.Tensor, algo: str) -> torch.Tensor:
    """`[..., history_len, 3] -> [..., 3]`: the amax that the next step scales by."""
    return history.amax(dim=-2) if algo == "max" else history[..., -1, :]
