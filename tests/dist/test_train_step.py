"""The training step over several ranks: one answer, however the tokens are split (B28, B32, B63, B69, B25)."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from launch.data import IGNORE, Batch
from launch.distributed import fsdp_modules, join_world, shard_model, sum_gradients
from launch.step import TrainStep, evaluate, gradients, split_sum_of_squares

VOCAB, WIDTH, LENGTH, ROWS = 13, 10, 6, 12


class TinyModel(nn.Module):
    """Two blocks of odd widths, so that no shard is even."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)) for _ in range(2)]
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def make_model() -> TinyModel:
    torch.manual_seed(7)
    return TinyModel()


def make_rows(kind: str) -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    if kind == "uneven":  # rows with anything from no token to all of them
        for row in range(ROWS):
            labels[row, : row % (LENGTH + 1)] = IGNORE
    elif kind == "masked half":
        labels[: ROWS // 2] = IGNORE
    elif kind == "masked":
        labels[:] = IGNORE
    return Batch(ids, labels)


def part(rows: Batch, rank: int, size: int, micro: int) -> list[Batch]:
    """This rank's micro-batches: contiguous rows, so that "masked half" masks whole ranks."""
    share = ROWS // size
    return [
        Batch(rows.input_ids[i : i + micro], rows.labels[i : i + micro])
        for i in range(rank * share, (rank + 1) * share, micro)
    ]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reference(kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    """One batch, plain PyTorch."""
    model, rows = make_model(), make_rows(kind)
    logits = model(rows.input_ids)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), ignore_index=IGNORE)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def split_gradient(rank: int, size: int, kind: str, micro: int) -> tuple:
    with join_world("cpu") as world:
        model = shard_model(make_model(), world, dtype="fp32")
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
        loss, tokens = step.backward(part(make_rows(kind), rank, size, micro))
        grads = {n: whole(p.grad) for n, p in model.named_parameters()}
        flags = [m._get_fsdp_state()._fsdp_param_group.reduce_grads for m in fsdp_modules(model)]
        return world.sum_(loss).item(), tokens.item(), grads, flags


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size, micro", [(1, 12), (1, 1), (2, 2), (3, 4), (3, 1), (4, 3)])
@pytest.mark.parametrize("kind", ["uneven", "masked half"])
def test_any_split_gives_the_gradient_of_one_batch(size: int, micro: int, kind: str) -> None:
    loss, grads = reference(kind)
    for got_loss, tokens, got, flags in run_ranks(split_gradient, size, kind, micro):
        assert tokens == (make_rows(kind).labels != IGNORE).sum()
        assert got_loss == pytest.approx(loss, abs=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(got[name], grad, rtol=0, atol=1e-6, msg=name)
        assert all(flags) and len(flags) == 3


def mixed_norm(rank: int, size: int) -> tuple:
    """A replicated parameter and a frozen one beside the sharded ones."""
    with join_world("cpu") as world:
        model = make_model()
        model.head.requires_grad_(False)
        model.scale = nn.Parameter(torch.ones(WIDTH))
        outside = model.scale
        for module in (*model.layers, model.embed):
            fully_shard(module, mesh=world.mesh)
        sum_gradients(model)
        assert not isinstance(outside, DTensor) and not hasattr(model, "set_requires_gradient_sync")
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), world, grad_clip=1.0)
        step.forward = ScaledForward(model)
        before = {n: whole(p.detach()).clone() for n, p in model.named_parameters()}
        record = step(part(make_rows("uneven"), rank, size, 2))
        moved = {n: before[n] - whole(p.detach()) for n, p in model.named_parameters()}
        return record.tolist(), moved


class ScaledForward:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, None]:
        model = self.model
        x = model.embed(batch.input_ids) * model.scale * 50
        for layer in model.layers:
            x = x + layer(x)
        logits = model.head(x)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        return loss, None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [2, 3])
def test_norm_of_sharded_replicated_and_frozen_parameters(size: int) -> None:
    model = make_model()
    model.head.requires_grad_(False)
    model.scale = nn.Parameter(torch.ones(WIDTH))
    rows = make_rows("uneven")
    loss, _ = ScaledForward(model)(rows)
    (loss / (rows.labels != IGNORE).sum()).backward()
    trainable = [p for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    assert norm > 2, "clipping has to do something here"
    for record, moved in run_ranks(mixed_norm, size):
        assert record[1] == pytest.approx(norm.item(), rel=1e-5)
        for name, p in model.named_parameters():
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(moved[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def mesh_norm(rank: int, size: int) -> tuple[float, float]:
    """Gradients on the mesh of all ranks, on an expert mesh, on both dimensions, and plain ones."""
    with join_world("cpu") as world:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        generator = torch.Generator().manual_seed(1)
        full = [torch.randn(7, 3, generator=generator) for _ in range(4)]
        grads = [
            distribute_tensor(full[0], world.mesh, [Shard(0)]),
            distribute_tensor(full[1], grid["ep"], [Shard(0)]),
            distribute_tensor(full[2], grid, [Shard(0), Shard(1)]),
            full[3],
            distribute_tensor(torch.zeros(1, 3), world.mesh, [Shard(0)]),  # nothing of it on three ranks
        ]
        split, whole_part = split_sum_of_squares(grads, world)
        norm = (world.sum_(split) + whole_part).sqrt().item()
        return norm, torch.cat(full).double().norm().item()


@pytest.mark.timeout(60)
def test_norm_over_several_meshes() -> None:
    for norm, expected in run_ranks(mesh_norm, 4):
        assert norm == pytest.approx(expected, rel=1e-6)


def poisoned(rank: int, size: int, bad_rank: int, value: float, where: str) -> tuple:
    with join_world("cpu") as world:
        model = shard_model(make_model(), world, dtype="fp32")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, fused=True)
        step = TrainStep(model, optimizer, world)
        batches = part(make_rows("uneven"), rank, size, 3)
        step(batches)
        state = {n: whole(p.detach()).clone() for n, p in model.named_parameters()}
        moments = [{k: whole(v).clone() for k, v in s.items()} for s in optimizer.state.values()]
        handle = None
        if rank == bad_rank:
            layer = model.layers[1][2]
            if where == "loss":
                handle = layer.register_forward_hook(lambda m, i, o: o * value)
            else:
                handle = layer.register_full_backward_hook(lambda m, gi, go: (gi[0] * value,))
        record = step(batches).tolist()
        same = all(torch.equal(state[n], whole(p.detach())) for n, p in model.named_parameters())
        after = [{k: whole(v) for k, v in s.items()} for s in optimizer.state.values()]
        same_moments = all(torch.equal(a[k], b[k]) for a, b in zip(moments, after, strict=True) for k in a)
        if handle is not None:
            handle.remove()
        clean = step(batches).tolist()
        assert record[1] != record[1], "the norm is NaN on all ranks"
        return record[3], same, same_moments, clean, {n: whole(p.detach()) for n, p in model.named_parameters()}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_value_on_any_rank_skips_the_step_on_all(bad_rank: int, value: float, where: str) -> None:
    first, second = run_ranks(poisoned, 2, bad_rank, value, where)
    for nonfinite, same, same_moments, clean, _ in (first, second):
        assert nonfinite == 1 and same and same_moments
        assert clean[3] == 0 and clean == first[3]
    assert all(torch.equal(first[4][n], second[4][n]) for n in first[4])


def masked_step(rank: int, size: int) -> tuple:
    with join_world("cpu") as world:
        model = shard_model(make_model(), world, dtype="fp32")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, fused=True)
        step = TrainStep(model, optimizer, world)
        before = {n: whole(p.detach()).clone() for n, p in model.named_parameters()}
        record = step(part(make_rows("masked"), rank, size, 3)).tolist()
        same = all(torch.equal(before[n], whole(p.detach())) for n, p in model.named_parameters())
        loss = evaluate(step.forward, part(make_rows("uneven"), rank, size, 3), world).item()
        return record, same, loss, len(gradients(model))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1, 2])
def test_a_fully_masked_step_changes_nothing(size: int) -> None:
    for record, same, loss, left in run_ranks(masked_step, size):
        assert record == [0.0, 0.0, 0.0, 0.0, 0.0]
        assert same and left == 0
        assert loss == pytest.approx(reference("uneven")[0], abs=1e-6)


def asked(rank: int, size: int) -> list[float]:
    with join_world("cpu") as world:
        model = shard_model(make_model(), world, dtype="fp32")
        step = TrainStep(model, torch.optim.AdamW(model.parameters(), fused=True), world)
        batches = part(make_rows("full"), rank, size, 6)
        return [step(batches, stop=stop)[4].item() for stop in (False, rank == 1)]


@pytest.mark.timeout(60)
def test_all_ranks_learn_that_one_was_asked_to_stop() -> None:
    assert run_ranks(asked, 2) == [[0.0, 1.0], [0.0, 1.0]]
