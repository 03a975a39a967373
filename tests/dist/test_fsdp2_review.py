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


class Headed(nn.Module):
    """Two blocks, a norm and an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(*stack(1)) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(128), nn.Linear(128, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def headed(rank: int, size: int, together: bool, root: bool) -> None:
    """The head's output is that of its high-precision weight, and only the blocks travel quantized."""
    from lumen_fsdp2 import plan

    model = Headed()
    rest = [[model.norm, model.lm_head]] if together else [model.norm, model.lm_head]
    policy = policy_of("mxfp8-32x32")
    if root:
        shard(model, size, policy, parts=[*model.layers, *rest])
    else:
        for each in (*model.layers, model.norm, model.lm_head):
            shard(each, size, policy)
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    model(batch()).square().mean().backward()
    ((x, out),) = seen
    assert torch.equal(out, nn.functional.linear(x, model.lm_head.weight.full_tensor()))
    rows = {row.name: row for row in plan(model).rows}
    assert {name for name, row in rows.items() if row.mode != "-"} == {"layers.0.0.weight", "layers.1.0.weight"}
    assert "sharded by itself" in rows["lm_head.weight"].reason and "itself" not in rows["norm.weight"].reason


@pytest.mark.parametrize("together, root", [(True, True), (False, True), (False, False)])
def test_an_output_head_in_a_group_of_its_own_stays_in_high_precision(pools, together: bool, root: bool) -> None:
    pools[2].run(headed, together, root)


def lone(rank: int, size: int) -> None:
    """A model that is nothing but linears: refused where nothing would be quantized, and quantized when asked for."""
    import lumen_core.quantize as quant
    from lumen_fsdp2 import plan

    for parts in ([], [0, 1]):
        model = stack(2) if parts else nn.Linear(128, 128)
        policy = policy_of("mxfp8", param_dtype=torch.bfloat16 if parts else None)  # one that no other model has
        shard(model, size, policy, parts=[model[i] for i in parts])
        with recorded() as calls, pytest.raises(RuntimeError, match=r"no effect.*quant\.enable"):
            model(batch())
        assert not calls
    for recipe in (None, "mxfp8,ignored_modules=1"):
        model = quant.enable(stack(2), recipe="mxfp8,ignored_modules=1")
        shard(model, size, policy_of(recipe), parts=list(model))
        model(batch()).sum().backward()
        assert [row.mode for row in plan(model).rows if row.name.endswith("weight")] == ["row", "-"]


def test_a_linear_alone_is_never_ignored_silently(pools) -> None:
    pools[2].run(lone)


class Checkpointed(nn.Module):
    """A linear whose activations are kept, recomputed or moved, as the rank is told."""

    how = "kept"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "recomputed":
            return torch.utils.checkpoint.checkpoint(self._forward, x, use_reentrant=False)
        if self.how == "moved":
            with torch.autograd.graph.save_on_cpu():
                return self._forward(x)
        return self._forward(x)


def unlike(rank: int, size: int, recipe: str, how: str) -> None:
    """One rank recomputes from the second step on: the gradients are those of mode `row` then, and told."""
    from lumen_fsdp2 import plan

    models = []
    for mode in ("on-demand", "row"):
        torch.manual_seed(0)
        model = nn.Sequential(Checkpointed(), Checkpointed())
        for block in model:
            block.down.weight.data[::3] *= 100.0  # so that blocks of the two directions have other scales
        models.append(shard(model, size, policy_of(f"{recipe},stochastic_rounding=false", all_gather_mode=mode), parts=model))
    for step in range(3):
        grads = []
        for model in models:
            for block in model:
                block.how = how if step and rank == size - 1 else "kept"
            with recorded() as calls:
                model(batch(rank).requires_grad_()).square().mean().backward()
            grads.append([p.grad.full_tensor() for p in model.parameters()])
            model.zero_grad()
            asked = [kind for kind, _, _ in calls].count("all_reduce")
            assert asked == (2 if model is models[0] and step < 2 else 0), (step, asked, plan(model))
        same = [torch.equal(a, b) for a, b in zip(*grads)]
        assert all(same) == (step > 0), (step, same)
        modes = {row.mode for row in plan(models[0]).rows if row.name.endswith("weight")}
        assert modes == {"row" if step else "on-demand"}


@pytest.mark.parametrize("how", ["recomputed", "moved"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_do_not_recompute_alike_send_the_same_direction(pools, size: int, recipe: str, how: str) -> None:
    pools[size].run(unlike, recipe, how)


def one_rank_asks(rank: int, size: int, ours: bool) -> None:
    """`plan` on rank 0 alone: a collective would wait for the others. Another model's groups are left alone."""
    import lumen_core.quantize as quant
    from lumen_fsdp2 import attach, comm, plan

    policy = policy_of(None)
    model, other = (shard(quant.enable(stack(), recipe="mxfp8"), size, policy, ours=ours) for _ in range(2))
    comm.chosen.cache_clear()
    asked = []

    def choose(group, choice, device, *rest):
        asked.append(choice)
        torch.distributed.barrier(group)  # as on a ROCm build, where ranks come to the choice together
        return kept(group, choice, device, *rest)

    kept, comm.collectives_for = comm.collectives_for, choose
    try:
        if rank == 0:
            assert [row.mode for row in plan(model).rows if row.name.endswith("weight")] == ["row"] * 3
        assert not asked
        for _ in range(2):
            model(batch()).sum().backward()
        other(batch())
        assert asked == ["auto"]  # one for all modules of a group
    finally:
        comm.collectives_for = kept
        comm.chosen.cache_clear()
    if not ours:
        third = shard(quant.enable(stack(), recipe="mxfp8"), size, policy, ours=False)
        plan(other)
        assert all(attach._BOUND not in m.__dict__ for m in third.modules())


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch's"])
def test_a_plan_makes_no_collective(pools, ours: bool) -> None:
    pools[2].run(one_rank_asks, ours)


def asked_for(rank: int, size: int) -> None:
    """Every group gets what the policy asks for, the second mesh of a model too."""
    import torch.distributed as dist

    from lumen_fsdp2.comm import LumenAllGather

    everyone, pairs = dist.group.WORLD, [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    gather = LumenAllGather("mori")
    for group in (everyone, pairs[rank // 2]):
        with pytest.raises(RuntimeError, match="MORI collectives cannot be used"):
            gather(torch.empty(group.size()), torch.ones(1), group)


def test_collectives_that_were_asked_for_are_not_replaced(pools) -> None:
    pools[4].run(asked_for)


def many_models(rank: int, size: int) -> None:
    """Binding another model leaves a root as it was: one hook, and not introduced again."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from lumen_fsdp2 import attach

    def made():
        model = nn.Sequential(*(nn.Sequential(*stack(1)) for _ in range(2)))
        for each in model:
            shard(each, size, policy_of("tensorwise"))
        return shard(model, size, MixedPrecisionPolicy())

    introduced, counts, kept = [], set(), attach._introduce
    attach._introduce = lambda policy, root: (introduced.append(root), kept(policy, root))
    try:
        first = made()
        for _ in range(3):
            first(batch()).sum().backward()
            made()(batch())
            with recorded() as calls:
                first(batch())
            assert [kind for kind, _, _ in calls].count("all_reduce") == 1
            counts.add(len(first._forward_pre_hooks))
        assert len(introduced) == 4  # each model once
        (hooks,) = counts
        attach.bind(first[0], policy_of("tensorwise"), _bindings(first)[0].keeper)
        first(batch())
        assert len(introduced) == 5 and len(first._forward_pre_hooks) == hooks
    finally:
        attach._introduce = kept


def test_models_beside_each_other_do_not_disturb_each_other(pools) -> None:
    pools[2].run(many_models)


def printed(rank: int, size: int) -> None:
    """Only what runs prints its plan, once, and only where the policy prints."""
    import contextlib
    import io

    import lumen_core.quantize as quant

    def output(model):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            model(batch())
            model(batch())
        return text.getvalue().count("low-precision all-gather:")

    def made(prints: bool, ours: bool):
        model = quant.enable(nn.Sequential(*stack()), recipe="mxfp8")
        return shard(model, size, policy_of(None, print_plan=prints), ours=ours)

    for ours in (True, False):
        waiting, silent, loud = made(True, ours), made(False, ours), made(True, ours)
        expected = int(rank == 0)
        assert [output(m) for m in (silent, loud, silent, waiting)] == [0, expected, 0, expected]


def test_only_the_model_that_runs_prints_its_plan(pools) -> None:
    pools[2].run(printed)


def offloaded(rank: int, size: int) -> None:
    """CPU offload beside a GPU, which this machine has not: FSDP2's groups say that they gather on device `meta`.

    Shows where the amax is when it is reduced and where the scale comes from; nothing is gathered or computed there.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy

    from lumen_fsdp2 import amax

    model = nn.Sequential(*stack())
    shard(model, size, policy_of("tensorwise"), offload_policy=CPUOffloadPolicy(pin_memory=False))
    reduced = []

    class Spy:
        def __init__(self, group):
            pass

        def all_reduce(self, tensor, op, label=None):
            reduced.append(tensor.device.type)

    bindings = _bindings(model)
    for binding in bindings:
        assert binding.local().device.type == "cpu"
        binding._fsdp_group().device = torch.device("meta")
    kept, amax.C10dCollectives = amax.C10dCollectives, Spy
    try:
        bindings[0].keeper.before_gather(bindings[0])
    finally:
        amax.C10dCollectives = kept
    assert reduced == ["meta"] and {b.amax.device.type for b in bindings} == {"meta"}


def test_amax_of_offloaded_weights_is_reduced_where_they_are_gathered(pools) -> None:
    pools[2].run(offloaded)


def inference(rank: int, size: int, kind: str) -> None:
    """Under inference mode, after training and at once, a model gives what it gives under no_grad."""
    if kind == "moe":
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
        config = Qwen3MoeConfig(vocab_size=96, num_hidden_layers=1, **sizes, **experts)
        models = [Qwen3MoeForCausalLM(config) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        ids = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(rank))
        calls = [lambda model=model: model(input_ids=ids).logits for model in models]
    else:
        models = [nn.Sequential(*stack()) for _ in range(2)]
        calls = [lambda model=model: model(batch(rank)) for model in models]
    for model in models:
        shard(model, size, policy_of("mxfp8-32x32"), reshard_after_forward=True)
    trained, fresh = calls
    trained().sum().backward()
    outs = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outs.append(trained())
    if size > 1:  # on one rank torch 2.13 itself cannot begin in inference mode
        with torch.inference_mode():
            outs.append(fresh())
    assert all(torch.equal(out, outs[0]) for out in outs)
    trained().sum().backward()


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("size", [1, 2])
def test_inference_mode(pools, size: int, kind: str) -> None:
    pools[size].run(inference, kind)


def patterns(rank: int, size: int) -> None:
    """Names in patterns are relative to a block; the error says so. What holds in every block may be used."""
    from lumen_fsdp2 import plan

    for option in ("ignored_modules", "apply_modules"):
        config = f"mxfp8,{option}=layers.0.*"
        with pytest.raises(ValueError, match=rf"{option}: .*relative to .*Sequential: .*quant\.enable\(root\)"):
            shard(Headed().layers[0], size, policy_of(config))
    for recipe in ("mxfp8,apply_modules=*1", "mxfp8,ignored_modules=*0"):
        model = Headed()
        for i in range(2):
            model.layers[i] = nn.Sequential(*stack(2))
        shard(model, size, policy_of(recipe), parts=[model.norm, *model.layers])
        low = [row.name for row in plan(model).rows if row.mode != "-"]
        assert low == ["layers.0.1.weight", "layers.1.1.weight"]


def test_patterns_block_by_block(pools) -> None:
    pools[2].run(patterns)
