"""What is on the wire, counted by a wrapper of the process group itself, and what every rank makes of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from traffic import recorded
from torch import nn
from torch.utils.checkpoint import checkpoint

OWN = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "mxfp8-32x32", "mxfp4")
FOREIGN = (
    ("tensorwise", "mxfp8-32x32"),
    ("mxfp8", "mxfp8-32x32"),
    ("mxfp8", "mxfp4"),
    ("bf16", "mxfp8"),
    ("bf16", "tensorwise"),
    ("blockwise", "rowwise"),
)


def _weights(size: int, rows: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(96, rows * size, bias=False), nn.GELU(), nn.Linear(rows * size, 128 * size, bias=False)
    )
    with torch.no_grad():
        for p in model.parameters():
            p[3] *= 40.0
            p[:, 5] = 0.0
    return model


def _shard(model: nn.Module, size: int, **policy: object) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    from lumen_fsdp2 import LumenPolicy, fully_shard

    return fully_shard(
        model,
        mesh=init_device_mesh("cpu", (size,)),
        mp_policy=LumenPolicy(print_plan=False, **policy),
        reshard_after_forward=True,
    )


def _bits(q) -> tuple[torch.Tensor, torch.Tensor]:
    scale = q.scale if q.scale.dtype.itemsize == 1 else q.scale.reshape(-1)
    return q.data.view(torch.uint8), scale.contiguous().view(torch.uint8)


def identity(rank: int, size: int, recipe: str, wire: str | None, mode: str) -> None:
    from lumen_core.config import QuantConfig
    from lumen_core.gathered import GatheredWeight
    from lumen_core.wire import WireFormat
    from lumen_fsdp2 import plan

    model = _weights(size, 128)
    full = [p.detach().clone() for p in model.parameters()]
    _shard(model, size, recipe=recipe, wire=wire, all_gather_mode=mode)
    checked: list[str] = []
    form = WireFormat.of(QuantConfig.from_recipe(wire or recipe), torch.device("cpu"))

    def check(module, *_):
        weight, whole = module.weight, full[0] if module is model[0] else full[1]
        assert isinstance(weight, GatheredWeight)
        view = weight.view_of()
        if view.info.direction != "columns":
            expected = form.decode(*form.encode(whole, whole.abs().amax()), tuple(whole.shape))
            assert all(torch.equal(a, b) for a, b in zip(_bits(view.rows()), _bits(expected)))
        if view.has_columns:
            expected = form.decode_columns(*form.encode_columns(whole), tuple(whole.shape))
            assert all(torch.equal(a, b) for a, b in zip(_bits(view.columns()), _bits(expected)))
        checked.append(view.info.direction)

    for linear in (model[0], model[2]):
        linear.register_forward_hook(check)
        linear.register_full_backward_pre_hook(check)
    with recorded() as calls:
        model(torch.randn(32, 96)).square().mean().backward()
    assert checked == {"on-demand": ["rows"] * 2 + ["columns"] * 2, "all": ["both"] * 4}.get(mode, ["rows"] * 4)
    gathers = [(dtype, size_) for kind, dtype, size_ in calls if kind == "all_gather"]
    planned = sum(row.bytes_per_gather for row in plan(model).rows)
    assert all(row.mode != "-" for row in plan(model).rows)
    assert gathers == ([] if size == 1 else [(torch.uint8, planned)] * 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("recipe, wire", [*((recipe, None) for recipe in OWN), *FOREIGN])
def test_gathered_bytes_are_those_of_the_whole_weight(pools, recipe: str, wire: str | None, size: int) -> None:
    pools[size].run(identity, recipe, wire, "auto")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("recipe, mode", [(r, m) for r in ("mxfp8", "mxfp4") for m in ("on-demand", "all")])
def test_both_directions_too(pools, recipe: str, mode: str, size: int) -> None:
    pools[size].run(identity, recipe, None, mode)


def metered(rank: int, size: int, recipe: str, recompute: bool, wire: str | None = None) -> dict[str, float]:
    from lumen_core.comm.meter import METER
    from lumen_fsdp2 import plan

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    low = recipe != "bf16"
    _shard(
        model,
        size,
        recipe=recipe if low else "mxfp8",
        low_precision_all_gather=low,
        param_dtype=torch.bfloat16,
        wire=wire,
    )
    start = METER.snapshot()
    with recorded() as calls:
        # bfloat16: torch 2.11 casts no inputs when it recomputes, with any policy.
        x = torch.randn(32, 512, dtype=torch.bfloat16, requires_grad=True)
        out = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        out.square().mean().backward()
    traffic = METER.since(start)
    counted = {
        kind: sum(n for k, _, n in calls if k == kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    assert {kind: traffic.total(kind) for kind in counted} == counted
    rows = plan(model).rows
    assert {row.name: traffic.total("all_gather", row.name) for row in rows} == {
        row.name: row.bytes_per_step for row in rows
    }
    return {kind: n / (2 * 512 * 512) for kind, n in counted.items()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "recipe, wire, expected",
    [
        ("bf16", None, 4.0),
        ("tensorwise", None, 2.0),
        ("rowwise", None, 2 + 8 / 512),
        ("blockwise", None, 2 + 8 / 128**2),
        ("mxfp8", None, 2.0625),
        ("mxfp8-32x32", None, 2 + 2 / 1024),
        ("mxfp4", None, 1.0625),
        ("tensorwise", "mxfp8-32x32", 2 + 2 / 1024),
    ],
)
def test_bytes_a_value_and_step(pools, recipe: str, wire: str | None, expected: float, recompute: bool) -> None:
    for bytes_ in pools[2].run(metered, recipe, recompute, wire):
        assert bytes_["all_gather"] == pytest.approx(expected, abs=1e-9)
        assert bytes_["reduce_scatter"] == 2.0  # bf16 gradients
        assert bytes_["all_reduce"] == (8 / (2 * 512 * 512) if recipe == "tensorwise" and wire is None else 0)


def left_over(rank: int, size: int, recipe: str) -> None:
    model = _shard(_weights(size, 128), size, recipe=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randn(32, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    least = 96 * 128 // 2  # smaller than the codes of any shard
    alive = [
        (tuple(o.shape), o.dtype)
        for o in gc.get_objects()
        if isinstance(o, torch.Tensor)
        and type(o).__name__ != "GatheredWeight"
        and o.dtype.itemsize == 1
        and o.untyped_storage().nbytes() >= least
    ]
    assert not alive, alive


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "mxfp8-32x32", "mxfp4"])
def test_no_quantized_copy_outlives_the_step(pools, recipe: str) -> None:
    for size in (1, 2):
        pools[size].run(left_over, recipe)
