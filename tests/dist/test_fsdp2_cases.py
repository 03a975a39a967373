"""Faults that hit users of packages like this one (shared/cases.md), and what may be asked of a sharded model."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import nn


def _mesh(size: int):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (size,))


def _model(rows: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, rows), nn.GELU(), nn.Linear(rows, 64, bias=False))


def _shard(model: nn.Module, size: int, *, mesh=None, offload=None, **policy: object) -> nn.Module:
    from lumen_fsdp2 import LumenPolicy, fully_shard

    options = {} if offload is None else {"offload_policy": offload}
    return fully_shard(model, mesh=mesh or _mesh(size), mp_policy=LumenPolicy(print_plan=False, **policy), **options)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> list[float]:
    losses = []
    for step in range(count):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _plain(recipe: str, rows: int) -> nn.Module:
    import lumen_core.quantize as quant

    return quant.enable(_model(rows), recipe=recipe, **({"dgrad_weight": "from_rows"} if recipe == "mxfp8" else {}))


def uneven(rank: int, size: int, recipe: str, rows: int, options: dict) -> None:
    from lumen_fsdp2 import plan

    sharded, whole = _shard(_model(rows), size, recipe=recipe), _plain(recipe, rows)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, **options) for m in (sharded, whole)]
    assert _steps(sharded, optimizers[0]) == pytest.approx(_steps(whole, optimizers[1]), rel=1e-6)
    for mine, other in zip(sharded.parameters(), whole.parameters()):
        assert (mine.full_tensor() - other).abs().max() <= 1e-6
    (row,) = [row for row in plan(sharded).rows if row.name == "0.weight"]
    assert (row.mode == "-") == bool(rows % size) and (row.mode != "-" or "do not divide" in row.reason)
    sources = {m.quant_config.dgrad_weight for m in sharded.modules() if hasattr(m, "quant_config")}
    assert sources == {"from_rows" if recipe == "mxfp8" else "direct"}  # whatever the number of ranks
    steps = {float(state["step"]) for state in optimizers[0].state.values()}
    assert steps == {3.0}


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("size, rows", [(3, 8), (2, 7), (4, 7), (4, 3)])
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_b05_b07_b59_rows_that_do_not_divide(pools, recipe: str, size: int, rows: int, options: dict) -> None:
    pools[size].run(uneven, recipe, rows, options)


def fresh(rank: int, size: int, recipe: str) -> None:
    model = _shard(_model(), size, recipe=recipe)
    linear, x = model[2], torch.randn(32, 64, generator=torch.Generator().manual_seed(9))
    linear_in: list[torch.Tensor] = []
    linear.register_forward_pre_hook(lambda m, a: linear_in.append(a[0].detach()))

    def check(what: str) -> None:
        with torch.no_grad():
            out = model(x)
            model.reshard()
        full = linear.weight.full_tensor()
        from lumen_core.linear import quantized_linear

        expected = quantized_linear(linear_in[-1], full, None, linear.quant_config)
        assert torch.equal(out, expected), what

    check("at first")
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        _steps(model, optimizer, 1)
        check(str(options))
    state = {name: p.detach().clone() * 100 for name, p in model.state_dict().items()}
    model.load_state_dict(state)
    check("load_state_dict")
    model.load_state_dict({name: p * 0.01 for name, p in state.items()}, assign=True)
    check("load_state_dict(assign=True)")
    with torch.no_grad():
        linear.weight.data.copy_(linear.weight * 3)
        check("data.copy_")
        linear.weight.mul_(5)
        check("in place")
        linear.weight.to_local().add_(1.0)
        check("the local tensor")
        kept = [p.detach().clone() for p in model.parameters()]
        torch._foreach_mul_(list(model.parameters()), 0.5)  # an EMA swapped in, and out
        check("foreach")
        for p, before in zip(model.parameters(), kept):
            p.copy_(before)
        check("swapped back")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8-32x32"])
@pytest.mark.parametrize("size", [1, 2])
def test_b34_nothing_goes_stale(pools, recipe: str, size: int) -> None:
    pools[size].run(fresh, recipe)


def refused(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    import lumen_core.quantize as quant
    from lumen_fsdp2 import LumenPolicy, fully_shard

    model = torch_fully_shard(_model(), mesh=_mesh(size), mp_policy=LumenPolicy(recipe="mxfp8"))
    with pytest.raises(RuntimeError, match="LumenPolicy has no effect.*quant.enable"):
        model(torch.randn(4, 64))
    with pytest.raises(ValueError, match="mxfp8.*prepared with 'rowwise'"):
        fully_shard(quant.enable(_model(), recipe="rowwise"), mesh=_mesh(size), mp_policy=LumenPolicy(recipe="mxfp8"))
    with pytest.raises(ValueError, match="reshard_after_forward=2"):
        fully_shard(_model(), mesh=_mesh(size), mp_policy=LumenPolicy(recipe="mxfp8"), reshard_after_forward=2)
    with pytest.raises(ValueError, match="without a recipe"):
        fully_shard(_model(), mesh=_mesh(size), mp_policy=LumenPolicy())
    sharded = fully_shard(_model(), mesh=_mesh(size), mp_policy=LumenPolicy(recipe="mxfp8"))
    with pytest.raises(ValueError, match="disable before sharding"):
        quant.disable(sharded)


def test_what_is_refused_is_refused_before_anything_is_sent(pools) -> None:
    pools[2].run(refused)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"all_gather_mode": "rows"}, "auto, on-demand, all, row \\(nearest: 'row'\\)"),
        ({"all_gather_mode": "ondemand"}, "nearest: 'on-demand'"),
        ({"collectives": "nccl"}, "auto, c10d, mori"),
        ({"recipe": "mxfp9"}, "mxfp9"),
        ({"wire": "fp8"}, "fp8"),
        ({"low_precision_all_gather": False, "wire": "mxfp8"}, "low_precision_all_gather=False"),
    ],
)
def test_wrong_values_name_what_is_allowed(options: dict, text: str) -> None:
    from lumen_fsdp2 import LumenPolicy

    with pytest.raises(ValueError, match=text):
        LumenPolicy(**options)


@pytest.mark.parametrize(
    "name", ["cast_forward_inputs", "low_precision_all_gather", "low_precision_reduce_scatter", "print_plan"]
)
def test_a_switch_is_true_or_false(name: str) -> None:
    from lumen_fsdp2 import LumenPolicy

    with pytest.raises(TypeError, match=f"{name}=None: must be True or False"):
        LumenPolicy(**{name: None})


def copies_of_a_policy(rank: int, size: int) -> None:
    import dataclasses
    import pickle

    from lumen_fsdp2 import LumenPolicy

    policy = LumenPolicy(recipe="mxfp8", cast_forward_inputs=False)
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), dataclasses.replace(policy)):
        assert twin == policy and "cast_forward_inputs=False" in repr(twin)


def test_a_policy_is_a_value(pools) -> None:
    pools[1].run(copies_of_a_policy)


def hsdp(rank: int, size: int, recipe: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded, whole = _shard(_model(), size, mesh=mesh, recipe=recipe), _plain(recipe, 64)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, whole)]
    assert _steps(sharded, optimizers[0]) == pytest.approx(_steps(whole, optimizers[1]), rel=1e-6)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8-32x32", "mxfp8"])
def test_hsdp(pools, recipe: str) -> None:
    pools[4].run(hsdp, recipe)


def offloaded(rank: int, size: int, recipe: str) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    from lumen_fsdp2 import plan

    sharded = _shard(_model(), size, offload=CPUOffloadPolicy(pin_memory=False), recipe=recipe)
    whole = _plain(recipe, 64)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, whole)]
    assert _steps(sharded, optimizers[0]) == pytest.approx(_steps(whole, optimizers[1]), rel=1e-6)
    assert [row.wire for row in plan(sharded).rows if row.name.endswith("weight")] == [recipe] * 2


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8-32x32"])
def test_cpu_offload(pools, recipe: str) -> None:
    pools[2].run(offloaded, recipe)


def from_meta(rank: int, size: int, recipe: str) -> None:
    import lumen_core.quantize as quant

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        whole = _plain(recipe, 64)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64, bias=False))
        quant.enable(model, recipe=recipe, **({"dgrad_weight": "from_rows"} if recipe == "mxfp8" else {}))
        _shard(model, size)
        model.to_empty(device="cpu")
        for mine, other in zip(model.parameters(), whole.parameters()):
            from torch.distributed.tensor import distribute_tensor

            mine.data.copy_(distribute_tensor(other.detach(), mine.device_mesh, mine.placements))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole)]
        assert _steps(model, optimizers[0]) == pytest.approx(_steps(whole, optimizers[1]), rel=1e-6)
        from lumen_fsdp2 import plan

        assert all(row.mode != "-" for row in plan(model).rows if row.name.endswith("weight"))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8"])
def test_b31_meta_device(pools, recipe: str) -> None:
    pools[2].run(from_meta, recipe)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid = nn.Embedding(96, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.embed(ids)))


def tied(rank: int, size: int, everything: bool) -> None:
    import lumen_core.quantize as quant
    from lumen_fsdp2 import plan

    options = {"apply_modules": ("head", "mid")} if everything else {}
    torch.manual_seed(0)
    plain = Tied()
    model = quant.enable(copy.deepcopy(plain), recipe="mxfp8-32x32", **options)
    quant.enable(plain, recipe="mxfp8-32x32", **options)
    _shard(model, size)
    ids = torch.arange(32)
    for m in (model, plain):
        torch.nn.functional.cross_entropy(m(ids), ids).backward()
    assert model.embed.weight is model.head.weight and len(list(model.parameters())) == 3
    assert torch.allclose(model.embed.weight.grad.full_tensor(), plain.embed.weight.grad, atol=1e-7)
    rows = {row.name: row for row in plan(model).rows}
    assert rows["mid.weight"].mode != "-"
    (shared,) = [row for name, row in rows.items() if row.shape == (96, 64)]
    assert shared.mode == "-"


@pytest.mark.parametrize("everything", [False, True])
def test_b10_tied_weights(pools, everything: bool) -> None:
    pools[2].run(tied, everything)


def frozen(rank: int, size: int, recipe: str) -> None:
    import lumen_core.quantize as quant
    from lumen_core.operands import LinearOperands

    torch.manual_seed(0)
    model = _model()
    model[0].weight.requires_grad_(False)
    quant.enable(model, recipe=recipe)
    before = [p.requires_grad for p in model.parameters()]
    _shard(model, size)
    assert [p.requires_grad for p in model.parameters()] == before
    wgrads = []
    kept = LinearOperands._gradients
    LinearOperands._gradients = lambda self, *a: (wgrads.append(a[3]), kept(self, *a))[1]
    try:
        model(torch.randn(32, 64)).square().mean().backward()
    finally:
        LinearOperands._gradients = kept
    assert sum(wgrads) == 1 and model[0].weight.grad is None and model[2].weight.grad is not None


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8-32x32", "mxfp8"])
def test_b23_b74_frozen_weights_stay_frozen(pools, recipe: str) -> None:
    pools[2].run(frozen, recipe)


def saved(rank: int, size: int, folder: str, recipe: str, save: bool) -> list[torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import lumen_core.quantize as quant

    model = _shard(_model(96), size, recipe=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert set(model.state_dict()) == set(_model(96).state_dict())
    if save:
        _steps(model, optimizer)
    parts = get_state_dict(model, optimizer)
    state = {"model": parts[0], "optimizer": parts[1], "scaling": quant.state_dict(model)}
    if save:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        quant.load_state_dict(model, state["scaling"])
    after = torch.tensor(_steps(model, optimizer, 2))
    return [after, *(p.full_tensor().detach() for p in model.parameters())]


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8-32x32"])
def test_b20_checkpoints_load_at_another_world_size(pools, tmp_path, recipe: str) -> None:
    expected = pools[2].run(saved, str(tmp_path), recipe, True)[0]
    for size in (1, 2, 3, 4):
        for got in pools[size].run(saved, str(tmp_path), recipe, False):
            assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, expected))


def different_layers(rank: int, size: int) -> None:
    """Ranks run other numbers of micro-batches' worth of collectives only where FSDP2 itself allows it: evaluation."""
    model = _shard(_model(), size, recipe="tensorwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(2):
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 64))
        model.train()
        model(torch.randn(32, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    everyone = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(everyone, torch.stack(norms))
    assert all(torch.equal(a, everyone[0]) for a in everyone)


def test_b69_gradient_norm_is_that_of_all_ranks(pools) -> None:
    for size in (2, 3):
        pools[size].run(different_layers)


def gathers_off(rank: int, size: int, recipe: str, wide: bool, from_rows: bool = False) -> bool:
    """Whether a pass gives the same bits with the low-precision gather and without."""
    import lumen_core.quantize as quant

    results = []
    for low in (True, False):
        model = _model()
        nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(0))
        if wide:
            model[0].weight.data[::2] *= 1e5
        options = {"stochastic_rounding": False} if recipe == "mxfp4" else {}
        options |= {"dgrad_weight": "from_rows"} if from_rows else {}
        config = quant.QuantConfig.from_recipe(recipe, **options)
        _shard(model, size, recipe=config, low_precision_all_gather=low)
        if not wide:
            _steps(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        x = torch.randn(32, 64, requires_grad=True, generator=torch.Generator().manual_seed(7))
        out = model(x)
        out.square().mean().backward()
        assert out.isfinite().all()
        results.append([out, x.grad, *(p.grad.full_tensor() for p in model.parameters())])
    return all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize(
    "recipe", ["tensorwise", "delayed", "hybrid", "rowwise", "blockwise", "mxfp8-32x32", "mxfp8", "mxfp4"]
)
def test_what_the_low_precision_gather_changes(pools, recipe: str) -> None:
    """As docs/fsdp2.md says: nothing but dgrad's blocks of 1x32 recipes, in MXFP8 where magnitudes lie far apart."""
    same = {wide: pools[2].run(gathers_off, recipe, wide)[0] for wide in (False, True)}
    assert same == {False: recipe != "mxfp4", True: recipe not in ("mxfp4", "mxfp8")}
    if not all(same.values()):
        assert all(pools[2].run(gathers_off, recipe, wide, True)[0] for wide in same)
