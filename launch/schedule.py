"""Learning rate as a function of the step: no state, so nothing to save and nothing to restore wrongly."""

from __future__ import annotations

import math

import torch


def learning_rate_factor(step: int, *, max_steps: int, warmup_steps: int, schedule: str, min_lr_ratio: float) -> float:
    """Share of the peak learning rate that step ``step`` (from 0) uses.

    Rises linearly over ``warmup_steps`` (the first step already moves the weights, the step after the warm-up has the
    peak), then falls to ``min_lr_ratio`` in the last step.

    Args:
        schedule: "cosine" (Loshchilov and Hutter, 2017, without restarts), "linear" or "constant".
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(max_steps - 1 - warmup_steps, 1), 1.0)
    if schedule == "cosine":
        fall = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif schedule == "linear":
        fall = 1.0 - progress
    else:
        raise ValueError(f"optim.schedule must be cosine, linear or constant, got {schedule!r}")
    return min_lr_ratio + (1.0 - min_lr_ratio) * fall


class Schedule:
    """Sets the learning rate of every parameter group, each scaled from the rate it was built with."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_steps: int,
        warmup_steps: int,
        schedule: str,
        min_lr_ratio: float,
    ) -> None:
        self.optimizer = optimizer
        self.shape = {
            "max_steps": max_steps,
            "warmup_steps": warmup_steps,
            "schedule": schedule,
            "min_lr_ratio": min_lr_ratio,
        }
        self.peaks = [float(group["lr"]) for group in optimizer.param_groups]

    def set(self, step: int) -> float:
        """Sets the rate of step ``step`` (from 0); returns that of the first group."""
        factor = learning_rate_factor(step, **self.shape)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor
        return self.peaks[0] * factor
