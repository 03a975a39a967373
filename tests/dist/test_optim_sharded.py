"""The optimizer over sharded parameters: any world size, empty shards, plain tensors among DTensors, DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lumen_core.optim import build_optimizer, set_skip_flag

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


class Net(nn.Module):
    """Rows 66 over 4 ranks are uneven; a head of 3 rows leaves a rank with nothing; `plain` stays unsharded."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wide = nn.Linear(96, 66)
        self.head = nn.Linear(66, 3)
        self.plain = nn.Parameter(torch.ones(3))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.wide(x))) * self.plain


def make(size: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Net, Any]:
    model = Net(dtype)
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(model.wide, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.plain})
    return model, build_optimizer(model, **{**OPTIONS, **options})


def step(model: Net, optimizer: Any, seed: int) -> None:
    """One step on data that every rank has, so that the mean over ranks is what one rank computes."""
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(seed)).to(model.plain)
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def everything(model: Net, optimizer: Any) -> dict[str, Tensor]:
    """Weights and optimizer state, gathered."""
    out = {n: full(p.detach()).clone() for n, p in model.named_parameters()}
    for name, param in model.named_parameters():
        out |= {f"{name}.{key}": full(t).clone() for key, t in optimizer.state[param].items()}
    return out


def _train(rank: int, size: int, dtype: torch.dtype, options: dict[str, Any], skip: bool) -> dict[str, Tensor]:
    model, optimizer = make(size, dtype, **options)
    versions = [p._version for p in model.parameters()]
    for seed in range(3):
        step(model, optimizer, seed)
    if skip:
        before = everything(model, optimizer)
        set_skip_flag(optimizer, torch.ones(()))
        step(model, optimizer, 9)
        assert all(torch.equal(t, before[k]) for k, t in everything(model, optimizer).items())
    assert all(p._version > v for p, v in zip(model.parameters(), versions))
    steps = {s["step"].item() for s in optimizer.state.values()}
    assert steps == {3.0}, f"rank {rank}: step counters {steps}"
    if size == 4:
        assert (model.head.weight.to_local().numel() == 0) == (rank == 3)
    return everything(model, optimizer)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"fused": False}),
        (torch.bfloat16, {}),
        (torch.float32, {"state": "int8"}),
        (torch.bfloat16, {"state": "fp8"}),
    ],
)
def test_four_ranks_are_one(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """B59, B07: plain and sharded parameters, uneven and empty shards; the result of one rank, skips included.

    Codes and scales equal those of one rank exactly: precision and blocks come from the global shape.
    """
    (alone,) = run_ranks(_train, 1, dtype, options, True)
    for got in run_ranks(_train, 4, dtype, options, True):
        assert got.keys() == alone.keys()
        for key, tensor in got.items():
            if tensor.dtype == torch.uint8:
                assert (tensor.int() - alone[key].int()).abs().max() <= 1, key
            else:
                torch.testing.assert_close(tensor, alone[key], atol=1e-6, rtol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
    expected = torch.uint8 if "state" in options else torch.float32
    assert alone["wide.weight.exp_avg"].dtype == expected


def _save(rank: int, size: int, folder: str, dtype: torch.dtype, state: str) -> dict[str, Tensor]:
    model, optimizer = make(size, dtype, state=state)
    for seed in range(2):
        step(model, optimizer, seed)
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder)
    at_save = everything(model, optimizer)
    # Gathering to one place is what an export does; it must not change anything.
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        moment = whole["state"]["wide.weight"]["exp_avg"]
        assert torch.equal(moment, at_save["wide.weight.exp_avg"])
    return at_save


def _load(rank: int, size: int, folder: str, dtype: torch.dtype, state: str) -> dict[str, Tensor]:
    model, optimizer = make(size, dtype, state=state)
    target = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(target, checkpoint_id=folder)
    set_model_state_dict(model, target["model"])
    set_optimizer_state_dict(model, optimizer, target["optimizer"])
    loaded = everything(model, optimizer)
    step(model, optimizer, 2)
    assert {s["step"].item() for s in optimizer.state.values()} == {3.0}
    return loaded


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("dtype", "state"), [(torch.bfloat16, "fp32"), (torch.bfloat16, "int8"), (torch.float32, "fp8")]
)
def test_dcp_round_trip_at_another_world_size(dtype: torch.dtype, state: str, tmp_path: Path) -> None:
    saved = run_ranks(_save, 2, str(tmp_path), dtype, state)[0]
    for size in (1, 4):
        for got in run_ranks(_load, size, str(tmp_path), dtype, state):
            assert got.keys() == saved.keys()
            assert all(torch.equal(got[key], saved[key]) for key in saved)


def _weights_only(rank: int, size: int, folder: str, in_place: bool) -> list[tuple[Tensor, Tensor]]:
    model, optimizer = make(size, torch.bfloat16)
    step(model, optimizer, 0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)

    other, second = make(size, torch.bfloat16)
    step(other, second, 0)
    target = {"model": other.state_dict()}
    dcp.load(target, checkpoint_id=folder)  # already writes into the weights, unseen by their write counters
    if not in_place:
        set_model_state_dict(other, target["model"])
    second.zero_grad()
    second.step()  # without gradients: only the masters are brought up to date
    loaded = dict(other.named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(full(p), full(loaded[name])), name
    return [(full(p.detach()).float(), full(m)) for p, m in second.master_parameters()]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("in_place", [True, False])
def test_masters_follow_weights_loaded_by_dcp(in_place: bool, tmp_path: Path) -> None:
    """B34 over FSDP2."""
    for pairs in run_ranks(_weights_only, 2, str(tmp_path), in_place):
        assert len(pairs) == 5
        assert all(torch.equal(weight, master) for weight, master in pairs)
