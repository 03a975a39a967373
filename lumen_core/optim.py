"""The optimizer of a low-precision run: AdamW with fp32 master weights, one-byte moments and a device-side
skip.

`build_optimizer` is the way in; `lumen_core.adamw` has the class it returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lumen_core.adamw import AdamW

__all__ = ["AdamW", "build_optimizer", "set_skip_flag"]


def build_optimizer(
    params: nn.Module | Iterable[Any],
    *,
    name: str = "adamw",
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    state: str = "fp32",
    master_weights: str | bool = "auto",
    fused: str | bool = "auto",
) -> AdamW:
    """The optimizer of a training run.

    Args:
        params: a module, its parameters, (name, parameter) pairs, or groups (dicts) as torch.optim takes
            them. Frozen parameters are left out. Biases and tensors of fewer than two dimensions get no
            weight decay, except in a group that names its own `weight_decay`.
        name: "adamw".
        state: precision of the moments: "fp32", or "int8" and "fp8" through torchao (tensors of two or more
            dimensions and 4096 or more values; chosen from the global shape, never from the local shard).
        master_weights: "auto" and True keep an fp32 copy of each bf16 or fp16 parameter; False updates them
            in place and loses every update smaller than half a unit in the last place.
        fused: one kernel for many tensors. "auto" uses it where the device has one; False computes tensor by
            tensor.

    Raises:
        ValueError: an unknown name or value, or nothing to train.
        TypeError: a parameter that is no real floating-point tensor.
        ImportError: `state` needs torchao and it is absent.
    """
    if name != "adamw":
        raise ValueError(f"optimizer name is {name!r}; allowed: 'adamw'")
    groups = _groups(params, weight_decay)
    if not groups:
        raise ValueError("nothing to train: no parameter has requires_grad=True")
    optimizer = AdamW(
        groups,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        state=state,
        master_weights=master_weights,
        fused=fused,
    )
    if isinstance(params, nn.Module):
        optimizer.watch(params)
    return optimizer


def set_skip_flag(optimizer: torch.optim.Optimizer, flag: Tensor | None) -> None:
    """Let a device value decide whether each following `step` happens; the host never reads it.

    Args:
        optimizer: one from `build_optimizer`, or a `torch.optim` Adam or AdamW made with `fused=True`.
        flag: 0-dim float32 tensor, read when `step` runs: 0.0 steps; 1.0 skips, whatever the gradients hold.
            All ranks must agree on it. None always steps.

    A skipped step leaves weights, masters, moments and step counters bitwise as they were. Step hooks still
    run.

    Raises:
        TypeError, ValueError: another optimizer, or another kind of flag.
    """
    if flag is not None and not (isinstance(flag, Tensor) and flag.ndim == 0 and flag.dtype == torch.float32):
        found = f"{tuple(flag.shape)} {flag.dtype}" if isinstance(flag, Tensor) else type(flag).__name__
        raise ValueError(f"skip flag is {found}; expected a 0-dim float32 tensor")
    if isinstance(optimizer, AdamW):
        optimizer.skip_flag = flag
    elif isinstance(optimizer, torch.optim.Adam) and all(g.get("fused") for g in optimizer.param_groups):
        optimizer.found_inf = flag
    else:
        raise TypeError(
            f"{type(optimizer).__name__} cannot be skipped by a device flag; use lumen_core.optim.build_optimizer, "
            "or torch.optim.AdamW(fused=True)"
        )


def _groups(params: nn.Module | Iterable[Any], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of the trainable parameters, split by whether they decay."""
    if isinstance(params, nn.Module):
        entries: list[Any] = list(params.named_parameters())
    elif isinstance(params, Tensor):
        raise TypeError("params is a single tensor; pass a module, or a list of parameters")
    else:
        entries = list(params)
    given = [dict(e) for e in entries if isinstance(e, dict)]
    loose = [e for e in entries if not isinstance(e, dict)]
    groups = []
    for group in [*given, *([{"params": loose}] if loose else [])]:
        members = group.pop("params")
        members = [members] if isinstance(members, Tensor) else list(members)
        named = [m if isinstance(m, tuple) else ("", m) for m in members]
        named = [(n, p) for n, p in named if p.requires_grad]
        if "weight_decay" in group:
            parts = [[p for _, p in named]]
            decays = [group["weight_decay"]]
        else:
            flat = [p.ndim < 2 or n.split(".")[-1].endswith("bias") for n, p in named]
            parts = [[p for (_, p), f in zip(named, flat) if f is which] for which in (False, True)]
            decays = [weight_decay, 0.0]
        groups += [{**group, "params": part, "weight_decay": d} for part, d in zip(parts, decays) if part]
    return groups
