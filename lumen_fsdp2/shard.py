"""`fully_shard`: torch's, which quantizes, plans and attaches collectives on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import lumen_core.quantize as quant
from lumen_core.controller import Controller, controller_over, controllers
from lumen_core.experts import is_expert_bank
from lumen_fsdp2.amax import AmaxKeeper, keeper_of
from lumen_fsdp2.attach import LEFT, bind, fewer_ranks
from lumen_fsdp2.policy import LumenPolicy

_OURS = "_lumen_enabled_by_fully_shard"


def fully_shard(
    module: torch.nn.Module | list[torch.nn.Module],
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    **options: Any,
) -> torch.nn.Module | list[torch.nn.Module]:
    """Shard `module` in place with FSDP2, its weights quantized and gathered as `mp_policy` says.

    A drop-in for `torch.distributed.fsdp.fully_shard`: call it on each block, then on the root. A module that
    `quant.enable` has not prepared is prepared here with the policy's recipe. With another policy than a `LumenPolicy`
    it is torch's.

    A `torch.nn.Linear` that is given itself, alone or in a list, stays in high precision: its name, which tells an
    output head from a projection, is known to `quant.enable` only. Call that on the whole model first to have such a
    module quantized. A model that is nothing but a linear needs it too, and raises at its first forward pass without.

    Args:
        module: a module, or several that share a group.
        mp_policy: a `LumenPolicy`.
        reshard_after_forward: True, False, or None (all but the root).
        **options: torch's own: `mesh`, `shard_placement_fn`, `offload_policy`, `ignored_params`, ...

    Returns:
        `module`.

    Raises:
        ValueError: the policy has no recipe and the module is not quantized; its recipe is not the module's;
            `reshard_after_forward` is a number (FSDP2 cannot keep quantized weights on fewer ranks).
    """
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    options["reshard_after_forward"] = reshard_after_forward
    if not isinstance(policy, LumenPolicy):
        return torch_fully_shard(module, mp_policy=policy, **options)
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise fewer_ranks(reshard_after_forward)
    modules = list(module) if isinstance(module, Iterable) and not isinstance(module, torch.nn.Module) else [module]
    for each in modules:
        _prepare(each, policy)
    torch_fully_shard(module, mp_policy=policy, **options)
    owners = [owner for owner in map(controller_over, modules) if owner is not None]
    bind(modules[0], policy, keeper_of(owners[0]) if owners else AmaxKeeper())
    return module


def _prepare(module: torch.nn.Module, policy: LumenPolicy) -> None:
    """Quantize what is not: the module, or under a root what its blocks left."""
    inside = controllers(module)
    if not inside and (controller_over(module) is not None or quant.is_enabled(module)):
        return  # a part of a model that quant.enable prepared, which decided about it; bind compares the recipes
    if policy.recipe is None:
        if not inside and not _is_leftover(module):
            raise ValueError(
                f"LumenPolicy without a recipe on {type(module).__name__}, which is not quantized: "
                "give the policy a recipe, or call quant.enable on the model first"
            )
        return
    if type(module) is torch.nn.Linear:
        module.__dict__[LEFT] = True
        return
    if not inside and _is_leftover(module):
        return
    if any(not c.model.__dict__.get(_OURS) for c in inside):
        return
    _enable_around(module, policy, inside)


def _is_leftover(module: torch.nn.Module) -> bool:
    """True for a module with nothing to quantize: embeddings, norms."""
    return not any(isinstance(m, torch.nn.Linear) or is_expert_bank(m) for m in module.modules())


def _enable_around(module: torch.nn.Module, policy: LumenPolicy, inside: list[Controller]) -> None:
    """Enable what is left in `module`; one controller for it and the blocks that were enabled before."""
    before = [keeper_of(c) for c in inside]
    quant.enable_rest(module, policy.recipe, may_be_empty=True)
    if not controllers(module):
        return  # an embedding or a norm in a group of its own, or a root whose blocks are such
    module.__dict__[_OURS] = True
    (owner,) = controllers(module)
    for each in before:
        keeper_of(owner).take(each)
