"""Groups, plans and decisions that a review of the FSDP2 adapter found wrong."""

from __future__ import annotations

import pytest
import torch
from sharded import batch, policy_of, shard, stack
from torch import nn
from traffic import recorded


def _bindings(model: nn.Module) -> list:
    from lumen_fsdp2.binding import BINDINGS

    return [b for m in model.modules() for b in m.__dict__.get(BINDINGS, {}).values()]


def grouped(rank: int, size: int, recipe: str, ours: bool) -> None:
    """A group of two modules is one group: in the keeper, in the plan, and when gathered by hand."""
    import lumen_core.quantize as quant
    from lumen_fsdp2 import plan

    model = nn.Sequential(nn.Sequential(*stack(2)), nn.Sequential(*stack(2)), nn.Sequential(*stack(1)))
    quant.enable(model, recipe=recipe)
    shard(model, size, policy_of(None), parts=[[model[0], model[1]]], ours=ours)
    weights = [name for name, _ in model.named_parameters()]
    assert sorted(row.name for row in plan(model).rows) == sorted(weights)
    with torch.no_grad():
        model(batch())
    assert sorted(row.name for row in plan(model).rows) == sorted(weights)
    keepers = {id(b.keeper): b.keeper for b in _bindings(model) if b.keeper is not None}
    if recipe == "tensorwise":
        (keeper,) = keepers.values()
        assert sorted(map(id, keeper.bindings)) == sorted(map(id, _bindings(model)))
        from lumen_fsdp2.attach import bind

        bind(model[1], _bindings(model)[0].policy, keeper)  # again, where torch's state was given another policy
        assert sorted(map(id, keeper.bindings)) == sorted(map(id, _bindings(model)))
    linear = model[1][0]
    with torch.no_grad():
        linear.weight.to_local().mul_(100)
        whole = linear.weight.full_tensor()
        with recorded() as calls:
            model[1].unshard()
        error = (linear.weight + 0 - whole).abs().max() / whole.abs().max()
        assert error < 0.07, error
        assert [kind for kind, _, _ in calls].count("all_reduce") == (recipe == "tensorwise")
        model[1].reshard()


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch's"])
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_a_group_of_several_modules_is_bound_once(pools, recipe: str, ours: bool) -> None:
    pools[2].run(grouped, recipe, ours)
