"""Quantized linears under torch's tensor parallelism, alone and below FSDP2 (a 2x2 mesh)."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import nn


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, bias=bias)
        self.down = nn.Linear(256, 64, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def _model(bias: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(bias), Block(bias))


def _job(rank: int, size: int, recipe: str, bias: bool, fsdp: bool) -> tuple[float, list, list, list]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import lumen_core.quantize as quant
    from lumen_core.gathered import GatheredWeight
    from lumen_fsdp2 import LumenPolicy, fully_shard, plan

    dp = size // 2 if fsdp else 1
    mesh = init_device_mesh("cpu", (dp, size // dp), mesh_dim_names=("dp", "tp"))
    model = quant.enable(_model(bias), recipe=recipe)
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wires: list[str] = []
    if fsdp:
        policy = LumenPolicy(print_plan=False)
        for block in model:
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        wires = [row.wire for row in plan(model).rows if row.name.endswith("weight")]
        seen: list[bool] = []
        model[0].up.register_forward_hook(
            lambda m, a, o: seen.append(isinstance(m.weight._local_tensor, GatheredWeight))
        )
    batch = torch.randn(32 * dp, 64, generator=torch.Generator().manual_seed(1))
    own = batch.chunk(dp)[mesh.get_local_rank("dp")]
    out = model(own)
    (out**2).sum().div(32).backward()
    if fsdp:
        assert seen == [True]

    plain, whole = _model(bias), quant.enable(_model(bias), recipe=recipe)
    for reference in (plain, whole):
        (reference(batch) ** 2).sum().div(32 * dp).backward()
    errors, expected = [], []
    for mine, one, exact in zip(model.parameters(), whole.parameters(), plain.parameters()):
        expected.append(((one.grad - exact.grad).norm() / exact.grad.norm()).item())
        errors.append(((mine.grad.full_tensor() - exact.grad).norm() / exact.grad.norm()).item())
    with torch.no_grad():
        error = ((out - plain(own)).norm() / plain(own).norm()).item()
    return error, errors, expected, wires


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "mxfp8", "mxfp8-32x32"])
@pytest.mark.parametrize("size, fsdp", [(2, False), (4, True)])
def test_output_and_gradients(recipe: str, size: int, fsdp: bool) -> None:
    for error, errors, expected, wires in run_ranks(_job, size, recipe, size == 4, fsdp, timeout=60):
        assert 1e-4 < error < 0.05  # quantized, and right
        # As far from exact as on one rank: parts have scales of their own, which are never coarser.
        assert all(one / 2 < mine < 1.3 * one + 0.005 for mine, one in zip(errors, expected)), (errors, expected)
        assert wires == ([recipe] * 4 if fsdp else [])
