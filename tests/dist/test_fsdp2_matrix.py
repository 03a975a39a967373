"""Every recipe under every way of running FSDP2, gradient by gradient, against plain copies of the model.

The reference runs each rank's part of the batch through a copy of its own, so that scales are per rank there too, and
averages the gradients.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from pool import RankPool
from torch import nn
from torch.utils.checkpoint import checkpoint

RECIPES = ("tensorwise", "delayed", "hybrid", "rowwise", "blockwise", "mxfp8", "mxfp8-32x32", "mxfp4")
CHECKPOINTS = ("none", "reentrant", "non-reentrant", "inside", "inside-reentrant")
WORLDS = (1, 2, 4)
WIDTH, TOKENS, STEPS = 128, 32, 2


class Block(nn.Module):
    def __init__(self, inside: bool | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.inside = inside  # checkpointing by hand: None is none, else whether it is reentrant

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(x) if self.inside is None else checkpoint(self._forward, x, use_reentrant=self.inside)


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        inside = {"inside": False, "inside-reentrant": True}.get(how)
        self.blocks = nn.ModuleList(Block(inside) for _ in range(2))
        self.outside = {"reentrant": True, "non-reentrant": False}.get(how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.outside is None else checkpoint(block, x, use_reentrant=self.outside)
        return x


def _batch(step: int, rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()


def _take_dgrad_from(copies: list[Model], where: str) -> None:
    for linear in itertools.chain.from_iterable((b.up, b.down) for m in copies for b in m.blocks):
        linear.quant_config = linear.quant_config.replace(dgrad_weight=where)


def cell(
    rank: int, size: int, recipe: str, how: str, reshard: bool, accumulate: int, mode: str, keep: bool = False
) -> tuple[float, bool, list[str]]:
    """Largest relative error of a gradient over two steps, whether the losses are equal, the modes of the plan."""
    from torch.distributed.device_mesh import init_device_mesh

    import lumen_core.quantize as quant
    from lumen_fsdp2 import LumenPolicy, fully_shard, plan

    options = {"stochastic_rounding": False} if recipe == "mxfp4" else {}  # whose bits differ by rank
    config = quant.QuantConfig.from_recipe(recipe, **options)
    torch.manual_seed(0)
    model = Model(how)
    rows = mode in ("auto", "row") or (mode == "on-demand" and (how != "none" or not reshard or keep))
    own_blocks = recipe in ("mxfp8", "mxfp4")
    expected = config.replace(dgrad_weight="from_rows") if own_blocks and rows else config
    copies = [quant.enable(copy.deepcopy(model), expected) for _ in range(size)]

    policy = LumenPolicy(recipe=config, all_gather_mode=mode, print_plan=False)
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, *copies)]

    worst, same = 0.0, True
    for step in range(STEPS):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            model.set_requires_gradient_sync(last)
            if keep:  # the usual way: gathered weights stay until the last micro-batch is through
                model.set_reshard_after_backward(last)
                from_rows = own_blocks and (mode != "on-demand" or not last)
                _take_dgrad_from(copies, "from_rows" if from_rows else "direct")
            out = model(_batch(step, rank, micro))
            out.square().mean().backward()
            for other, replica in enumerate(copies):
                theirs = replica(_batch(step, other, micro))
                theirs.square().mean().backward()
                same &= other != rank or torch.equal(out, theirs)
        for mine, *others in zip(model.parameters(), *(m.parameters() for m in copies)):
            mean = torch.stack([p.grad for p in others]).double().mean(0)
            error = (mine.grad.full_tensor().double() - mean).norm() / mean.norm()
            worst = max(worst, error.item())
            for p in others:  # all copies take the step that the sharded model takes
                p.grad = mine.grad.full_tensor()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(model.parameters(), copies[0].parameters()):
        same &= torch.equal(mine.full_tensor(), other)
    return worst, same, [row.mode for row in plan(model).rows if row.mode != "-"]


def _check(pool: RankPool, *arguments: object) -> list[str]:
    answers = pool.run(cell, *arguments)
    for worst, same, _ in answers:
        assert worst < 1e-6, (arguments, worst)
        assert same, f"{arguments}: outputs or updated weights differ"
    return answers[0][2]


_ALL = list(itertools.product(RECIPES, CHECKPOINTS, (True, False), (1, 3)))
# Every pair of values of two dimensions occurs in some cell of the diagonals below.
_PAIRS = {_ALL[(i * 7 + world * 3) % len(_ALL)]: world for world in WORLDS for i in range(0, len(_ALL), 12)}


@pytest.mark.parametrize("recipe, how, reshard, accumulate", _PAIRS, ids=lambda v: str(v))
def test_some_cells(pools: dict[int, RankPool], recipe: str, how: str, reshard: bool, accumulate: int) -> None:
    _check(pools[_PAIRS[recipe, how, reshard, accumulate]], recipe, how, reshard, accumulate, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_cells(pools: dict[int, RankPool], recipe: str, world: int) -> None:
    for how, reshard, accumulate in itertools.product(CHECKPOINTS, (True, False), (1, 3)):
        _check(pools[world], recipe, how, reshard, accumulate, "auto")


@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("world", [1, 2])
def test_on_demand(pools: dict[int, RankPool], recipe: str, how: str, world: int) -> None:
    for reshard, accumulate in ((True, 1), (True, 3), (False, 1)):
        modes = _check(pools[world], recipe, how, reshard, accumulate, "on-demand")
        assert set(modes) == {"on-demand" if how == "none" and reshard else "row"}


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_all_directions(pools: dict[int, RankPool], recipe: str) -> None:
    for how in CHECKPOINTS:
        assert set(_check(pools[2], recipe, how, True, 1, "all")) == {"all"}


@pytest.mark.parametrize("mode", ["auto", "on-demand"])
def test_weights_kept_between_micro_batches(pools: dict[int, RankPool], mode: str) -> None:
    _check(pools[2], "mxfp8", "none", True, 3, mode, True)


def _like_ddp(rank: int, size: int, recipe: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    import lumen_core.quantize as quant
    from lumen_fsdp2 import LumenPolicy, fully_shard

    options = {"dgrad_weight": "from_rows"} if recipe == "mxfp8" else {}
    torch.manual_seed(0)
    sharded = quant.enable(Model("none"), recipe=recipe, **options)
    replicated = DistributedDataParallel(copy.deepcopy(sharded))
    policy, mesh = LumenPolicy(print_plan=False), init_device_mesh("cpu", (size,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (sharded, replicated)]
    equal = True
    for step in range(3):
        for m in (sharded, replicated):
            m(_batch(step, rank, 0)).square().mean().backward()
        pairs = list(zip(sharded.parameters(), replicated.parameters()))
        equal &= all(torch.equal(a.grad.full_tensor(), b.grad) for a, b in pairs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        equal &= all(torch.equal(a.full_tensor(), b) for a, b in pairs)
    return equal


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "mxfp8-32x32"])
def test_bit_for_bit_like_ddp_on_two_ranks(pools: dict[int, RankPool], recipe: str) -> None:
    assert all(pools[2].run(_like_ddp, recipe))
