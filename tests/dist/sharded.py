"""Small models and how tests shard them."""

from __future__ import annotations

import torch
from torch import nn


def policy_of(recipe: str | None, **options):
    """A `LumenPolicy` that prints nothing."""
    from lumen_fsdp2 import LumenPolicy

    return LumenPolicy(recipe=recipe, **({"print_plan": False} | options))


def shard(model: nn.Module, size: int, policy, *, parts=(), ours: bool = True, **options) -> nn.Module:
    """`parts` (modules, or lists of them), then `model`, by our `fully_shard` or by torch's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as theirs

    import lumen_fsdp2

    mesh = init_device_mesh("cpu", (size,))
    for each in (*parts, model):
        (lumen_fsdp2.fully_shard if ours else theirs)(each, mesh=mesh, mp_policy=policy, **options)
    return model


def batch(seed: int = 0) -> torch.Tensor:
    """`[32, 128]`, the same on every rank."""
    return torch.randn(32, 128, generator=torch.Generator().manual_seed(seed))


def stack(count: int = 3) -> nn.Module:
    """Linears of 128 by 128, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(count)])
