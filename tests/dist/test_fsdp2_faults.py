"""Weights, policies and models used in unusual orders: nothing is ignored, nothing is stale, nothing hangs."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from sharded import batch, policy_of, shard, stack
from torch import nn
from traffic import recorded


class Switch(nn.Module):
    """Runs the linears that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        for name in which:
            if name == "!":
                raise KeyError("in the middle of a pass")
            x = getattr(self, name)(x)
        return x


def _write(model: nn.Module, how: str) -> None:
    if how == "load":
        model.load_state_dict({k: v * 100 for k, v in model.state_dict().items()})
    else:
        model.b.weight.data.mul_(100)


def _fresh(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output of a sharded linear from its whole weight as it is now."""
    from lumen_core.linear import quantized_linear

    state = copy.deepcopy(linear.quant_state)
    return quantized_linear(x, linear.weight.full_tensor(), linear.bias.full_tensor(), linear.quant_config, state)


def partial(rank: int, size: int, recipe: str, how: str, root: str) -> None:
    import lumen_core.quantize as quant

    model, policy = quant.enable(Switch(), recipe=recipe), policy_of(recipe)
    shard(model.a, size, policy, reshard_after_forward=True)
    shard(model.b, size, policy, reshard_after_forward=True)
    if root != "none":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        shard(model, size, policy if root == "ours" else MixedPrecisionPolicy())
    x = batch()
    with torch.no_grad():
        model(x, "a")  # leaves b out
        _write(model, how)
        expected = _fresh(model.b, x)
        assert torch.equal(model(x, "b"), expected)
        _write(model, how)
        expected = _fresh(model.b, x)
        assert torch.equal(model(x, "b"), expected)


@pytest.mark.parametrize("root", ["ours", "torch's", "none"])
@pytest.mark.parametrize("how", ["load", "data"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_b34_nothing_is_stale_after_a_pass_that_left_it_out(pools, recipe: str, how: str, root: str) -> None:
    pools[2].run(partial, recipe, how, root)


def interrupted(rank: int, size: int, by_hand: bool) -> None:
    import lumen_core.quantize as quant

    model = quant.enable(Switch(), recipe="tensorwise")
    shard(model, size, policy_of("tensorwise"), parts=[model.a, model.b])
    x = batch()
    with torch.no_grad():
        if not by_hand:
            with pytest.raises(KeyError):
                model(x, "ab!")
        else:
            model(x, "ab")
        _write(model, "data")
        expected = _fresh(model.b, x)
        if by_hand:
            model.b.unshard()
        assert torch.equal(model(x, "b"), expected)


@pytest.mark.parametrize("by_hand", [False, True], ids=["exception", "unshard"])
def test_b34_nothing_is_stale_after_an_exception_or_when_unsharded_by_hand(pools, by_hand: bool) -> None:
    pools[2].run(interrupted, by_hand)


def one_reduction(rank: int, size: int, root: str) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model, policy = nn.Sequential(*(nn.Sequential(*stack(1)) for _ in range(3))), policy_of("tensorwise")
    for each in model:
        shard(each, size, policy)
    shard(model, size, policy if root == "ours" else MixedPrecisionPolicy())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        with recorded() as calls:
            model(batch()).square().mean().backward()
        count = [kind for kind, _, _ in calls].count("all_reduce")
        assert count == 1, (step, count, calls)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("root", ["ours", "torch's"])
def test_one_fused_reduction_of_amax_a_pass(pools, root: str) -> None:
    pools[2].run(one_reduction, root)


def second_model(rank: int, size: int) -> None:
    import lumen_core.quantize as quant

    policy = policy_of(None)
    first = shard(quant.enable(stack(), recipe="mxfp8"), size, policy, ours=False)
    first(batch()).sum().backward()
    second = shard(stack(), size, policy, ours=False)
    with recorded() as calls, pytest.raises(RuntimeError, match="no effect"):
        second(batch())
    assert not calls
    first(batch())  # which goes on
    third = shard(quant.enable(stack(), recipe="mxfp8"), size, policy, ours=False)
    assert [row.mode for row in _plan(third) if row.name.endswith("weight")] == ["row"] * 3
    third(batch()).sum().backward()


def _plan(model: nn.Module):
    from lumen_fsdp2 import plan

    return plan(model).rows


def test_b30_a_policy_in_use_is_not_ignored_by_a_second_model(pools) -> None:
    pools[2].run(second_model)


def planned_first(rank: int, size: int) -> None:
    import lumen_core.quantize as quant

    model = quant.enable(stack(), recipe="mxfp8")
    shard(model, size, policy_of(None), ours=False)
    before = _plan(model)
    model(batch())
    assert before == _plan(model) and [row.wire for row in before if row.name.endswith("weight")] == ["mxfp8"] * 3


def test_the_plan_is_there_before_the_first_pass(pools) -> None:
    pools[2].run(planned_first)


def used(rank: int, size: int, ours: bool) -> None:
    import lumen_core.quantize as quant

    policy = policy_of("tensorwise")
    model = stack() if ours else quant.enable(stack(), recipe="tensorwise")
    shard(model, size, policy, ours=ours)(batch())
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), dataclasses.replace(policy)):
        assert twin == policy and bool(twin.cast_forward_inputs)
        shard(stack(), size, twin)(batch())


@pytest.mark.parametrize("ours", [True, False])
def test_a_policy_in_use_is_a_value_still(pools, ours: bool) -> None:
    pools[1].run(used, ours)


def recipes_change(rank: int, size: int) -> None:
    import lumen_core.quantize as quant

    model = stack()
    shard(model, size, policy_of("mxfp8"))
    model(batch()).sum().backward()
    model.zero_grad()
    with pytest.raises(ValueError, match="disable before sharding"):
        quant.disable(model)
    with pytest.raises(ValueError, match="quantized already"):
        quant.enable(model, recipe="tensorwise")
    model(batch())


def test_another_recipe_on_a_sharded_model_is_refused(pools) -> None:
    pools[2].run(recipes_change)


def moe(rank: int, size: int, ours: bool) -> list[str]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import lumen_core.quantize as quant

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=96, num_hidden_layers=2, **sizes, **experts))
    if not ours:
        quant.enable(model, recipe="mxfp8-32x32")
    shard(model, size, policy_of("mxfp8-32x32"), parts=list(model.model.layers), ours=ours)
    ids = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(rank))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    return [loss.item(), [row.name for row in _plan(model) if row.mode != "-"], grads]


def test_layers_then_root_is_as_the_whole_model_prepared_first(pools) -> None:
    """Banks of experts too, which a second look must not take for banks that nobody quantized."""
    ours, theirs = pools[2].run(moe, True)[0], pools[2].run(moe, False)[0]
    assert ours[:2] == theirs[:2] and any("experts" in name for name in ours[1])
    assert all(torch.equal(a, b) for a, b in zip(ours[2], theirs[2]))


def only_bytes(rank: int, size: int, recipe: str, flavour: str) -> None:
    from lumen_core.config import QuantConfig

    # Nothing else in its group, so that no other dtype makes it bytes.
    model = nn.Sequential(nn.Linear(128, 256, bias=False))
    shard(model, size, policy_of(QuantConfig.from_recipe(recipe, flavour=flavour)))
    with recorded() as calls:
        model(batch()).square().mean().backward()
    assert {dtype for kind, dtype, _ in calls if kind == "all_gather"} == {torch.uint8}
    assert {dtype for kind, dtype, _ in calls if kind != "all_gather"} <= {torch.float32, torch.int32}


@pytest.mark.parametrize("flavour", ["ocp", "fnuz"])
@pytest.mark.parametrize("recipe", ["tensorwise", "hybrid", "rowwise", "blockwise"])
def test_b08_codes_travel_as_bytes_and_are_never_reduced(pools, recipe: str, flavour: str) -> None:
    pools[2].run(only_bytes, recipe, flavour)


def unlike_counts(rank: int, size: int, recipe: str) -> list[float]:
    import lumen_core.quantize as quant
    from lumen_core.config import QuantConfig

    config = QuantConfig.from_recipe(recipe, **({"reduce_amax": True} if recipe == "delayed" else {}))
    model = stack()
    shard(model, size, policy_of(config), reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        count = 3 - rank
        for micro in range(count):
            model.set_requires_gradient_sync(micro == count - 1)
            model.set_reshard_after_backward(micro == count - 1)
            (model(batch(step + micro)) * (1 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = quant.state_dict(model)
    return [p.full_tensor().double().sum().item() for p in model.parameters()] + [
        v.double().sum().item() for k, v in sorted(state.items()) if "history" in k or "in_use" in k
    ]


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8"])
def test_b21_ranks_may_run_other_numbers_of_micro_batches(pools, recipe: str) -> None:
    """Where weights stay gathered between them: no collective may hang on a pass that another rank does not make."""
    first, second = pools[2].run(unlike_counts, recipe)
    assert first == second


def made_by(rank: int, size: int, how: str, ours: bool) -> None:
    import lumen_core.quantize as quant

    options = {"param_dtype": torch.bfloat16} if how == "param_dtype" else {}
    with torch.device("meta" if how == "meta" else "cpu"):
        model = stack(2)
    if not ours:
        quant.enable(model, recipe="mxfp8")
    shard(model, size, policy_of("mxfp8" if ours else None, **options), ours=ours, reshard_after_forward=True)
    if how == "meta":
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.constant_(p, 0.01)
    elif how == "to":
        model.to(torch.bfloat16)
    elif how == "load":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    elif how == "unshard":
        model.unshard()
        model.reshard()
    x = batch()
    with recorded() as calls:
        model(x.bfloat16() if how == "to" else x).float().square().mean().backward()
    assert [row.mode for row in _plan(model) if row.name.endswith("weight")] == ["row", "row"]
    biases = 2 * 128 * (2 if how in ("param_dtype", "to") else 4)
    assert sum(n for kind, _, n in calls if kind == "all_gather") <= 2 * (1.04 * 2 * 128 * 128 + biases)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("how", ["plain", "param_dtype", "meta", "to", "load", "unshard"])
def test_b30_the_wire_is_low_in_every_way_of_making_a_model(pools, how: str, ours: bool) -> None:
    pools[2].run(made_by, how, ours)


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128, bias=False)

    def forward(self, x, cos, positions):
        self.seen = (x.dtype, cos.dtype, positions.dtype, float((cos - torch.cos(positions.double())).abs().max()))
        return self.linear(x) * cos[:, None].to(x.dtype)


def uncast(rank: int, size: int, ours: bool) -> None:
    import lumen_core.quantize as quant

    model = Rotated() if ours else quant.enable(Rotated(), recipe="mxfp8")
    policy = policy_of("mxfp8" if ours else None, param_dtype=torch.bfloat16, cast_forward_inputs=False)
    shard(model, size, policy, ours=ours)
    positions = torch.arange(4096)
    model(torch.randn(4096, 128).bfloat16(), torch.cos(positions.float()), positions).float().mean().backward()
    x, cos, kept, off = model.seen
    assert (x, cos, kept) == (torch.bfloat16, torch.float32, torch.int64) and off < 1e-3


@pytest.mark.parametrize("ours", [True, False])
def test_b44_inputs_are_cast_only_where_asked(pools, ours: bool) -> None:
    pools[2].run(uncast, ours)


def by_number(rank: int, size: int) -> None:
    import lumen_core.quantize as quant

    with recorded() as calls:
        with pytest.raises(ValueError, match="reshard_after_forward=2"):
            shard(stack(), size, policy_of("mxfp8"), reshard_after_forward=2)
        model = quant.enable(stack(), recipe="mxfp8")
        shard(model, size, policy_of(None), ours=False, reshard_after_forward=2)
        with pytest.raises(ValueError, match="reshard_after_forward"):
            model(batch())
    assert not [kind for kind, _, _ in calls if kind == "all_gather"]


def test_b40_fewer_ranks_after_forward_are_refused_before_anything_is_sent(pools) -> None:
    pools[4].run(by_number)


def worded(rank: int, size: int) -> None:
    """What a user reads: bytes beside those of the dtype in use, and which weight `on-demand` gave up on."""
    import contextlib
    import io

    from lumen_fsdp2 import plan, say

    say._said.clear()
    for dtype, text in ((None, "(in float32: 8)"), (torch.bfloat16, "(in bfloat16: 4)")):
        policy = policy_of("mxfp8", param_dtype=dtype, all_gather_mode="on-demand")
        model = shard(nn.Sequential(nn.Sequential(*stack(2))), size, policy, reshard_after_forward=True)
        assert text in str(plan(model))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for _ in range(2):
            with torch.autograd.graph.save_on_cpu():
                model(batch()).sum().backward()
    lines = [line for line in out.getvalue().splitlines() if "on-demand" in line]
    assert len(lines) == (rank == 0) and all("became row for 0.0.weight" in line for line in lines)


def test_messages(pools) -> None:
    pools[2].run(worded)
