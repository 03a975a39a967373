"""Megatron's distributed checkpoints of Lumen models: read under another layout, by other layers, after a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from gpt import Layout, bare, some
from training import Trainer

ONE, TP2, PP2 = Layout(), Layout(tp=2, sp=True), Layout(pp=2)


def _train_and_save(rank: int, size: int, layout: Layout, recipe: str, folder: str, options: dict):
    """Two steps, a checkpoint, two steps more: losses of the last two, and state that the checkpoint has."""
    trainer = Trainer(layout, recipe, **options)
    trainer.steps(0, 2)
    trainer.save(folder)
    return trainer.steps(2, 4), _state(trainer)


def _load_and_train(rank: int, size: int, layout: Layout, recipe: str, folder: str, options: dict):
    trainer = Trainer(layout, recipe, **options)
    trainer.load(folder)
    return trainer.steps(2, 4), _state(trainer)


def _state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Amax histories by layer name."""
    states = {}
    for layer in bare(trainer.model).decoder.layers:
        for name, state in getattr(layer, "scaling_states", dict)():
            states[name] = state.history.clone()
    return states


def _losses(answers: list) -> list[float]:
    return next(losses for losses, _ in answers if losses[0] is not None)


def _continues(
    ranks, folder: Path, recipe: str, sizes: tuple[int, int], layouts: tuple[Layout, Layout], rel: float, options: dict
) -> None:
    saved = ranks(sizes[0]).run(_train_and_save, layouts[0], recipe, str(folder), options, seconds=120.0)
    loaded = ranks(sizes[1]).run(_load_and_train, layouts[1], recipe, str(folder), options, seconds=120.0)
    want, got = _losses(saved), _losses(loaded)
    assert got == pytest.approx(want, rel=rel, abs=0), f"{got} after loading, {want} without"
    assert want[0] != want[1]
    histories, expected = ({k: v for _, state in each for k, v in state.items()} for each in (loaded, saved))
    assert histories.keys() == expected.keys()
    for name, history in expected.items():
        torch.testing.assert_close(histories[name], history, rtol=rel and 0.05, atol=0)
    if recipe == "delayed":
        assert all((history[-3:] > 0).all() for history in histories.values())  # three steps were closed


RESUMED = [("delayed", True), ("delayed", False), ("mxfp8", True), ("mxfp4", False), ("rowwise", True)]


@pytest.mark.parametrize(
    ("recipe", "gather"), [RESUMED[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in RESUMED[1:])]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(ranks, tmp_path: Path, recipe: str, gather: bool) -> None:
    _continues(ranks, tmp_path, recipe, (2, 2), (ONE, ONE), 0.0, {"param_gather": gather})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "layouts"),
    [((2, 1), (TP2, ONE)), ((1, 2), (ONE, TP2)), ((2, 1), (PP2, ONE)), ((1, 2), (ONE, PP2)), ((2, 1), (ONE, ONE))],
    ids=["tp2-tp1", "tp1-tp2", "pp2-pp1", "pp1-pp2", "dp2-dp1"],
)
@pytest.mark.parametrize("gather", [False, True])
def test_another_layout_continues_the_curve(ranks, tmp_path: Path, sizes: tuple, layouts: tuple, gather: bool) -> None:
    _continues(ranks, tmp_path, "delayed", sizes, layouts, 2e-3, {"param_gather": gather})


def _save(rank: int, size: int, recipe: str, folder: str, options: dict) -> None:
    trainer = Trainer(ONE, recipe, **options)
    trainer.steps(0, 2)
    trainer.save(folder)


def _copy(rank: int, size: int, recipe: str, folder: str, again: str, options: dict, optimizer: bool) -> None:
    trainer = Trainer(ONE, recipe, **options)
    trainer.load(folder, optimizer=optimizer)
    trainer.save(again)


def _tensors(rank: int, size: int, folder: str) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load_plain_tensors(folder)
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}


@pytest.mark.parametrize("optimizer", some([True], [False]))
def test_checkpoints_go_from_megatrons_layers_to_lumens_and_back(ranks, tmp_path: Path, optimizer: bool) -> None:
    low, one = {"param_gather": True}, ranks(1)
    folders = [str(tmp_path / name) for name in ("local", "lumen", "local again")]
    one.run(_save, "local", folders[0], {}, seconds=60.0)
    one.run(_copy, "mxfp8", folders[0], folders[1], low, optimizer, seconds=60.0)
    one.run(_copy, "local", folders[1], folders[2], {}, optimizer, seconds=60.0)
    start, middle, end = (one.run(_tensors, folder, seconds=60.0)[0] for folder in folders)
    assert start.keys() == middle.keys() == end.keys()
    if not optimizer:
        start, middle, end = map(_weights, (start, middle, end))
    for name, tensor in start.items():
        assert tensor.dtype == middle[name].dtype
        assert torch.equal(tensor, middle[name]) and torch.equal(tensor, end[name]), name


def test_a_checkpoint_of_quantized_parameters_holds_the_masters(ranks, tmp_path: Path) -> None:
    ranks(2).run(_save, "mxfp8-32x32", str(tmp_path), {"param_gather": True}, seconds=90.0)
    tensors = ranks(1).run(_tensors, str(tmp_path), seconds=60.0)[0]
    weights = {name: tensor for name, tensor in _weights(tensors).items() if "linear" in name and "norm" not in name}
    assert len(weights) == 4  # of both layers together
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, tensors[f"optimizer.state.param.{name}"].bfloat16())


def _killed(rank: int, size: int, folder: str, after: str) -> None:
    """Save at step 2, and be killed while saving at step 4."""
    from megatron.core.dist_checkpointing import serialization

    trainer = Trainer(ONE, "delayed", param_gather=True)
    trainer.steps(0, 2)
    trainer.save(f"{folder}/2")
    trainer.steps(2, 4)
    theirs = getattr(serialization, after)

    def kill(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert callable(theirs)
    setattr(serialization, after, kill)
    trainer.save(f"{folder}/4")


# Before anything is written, and when all tensors are but not the file that makes them a checkpoint.
@pytest.mark.parametrize("moment", some(["save_config"], ["save_preprocess"]))
def test_killed_while_saving_the_checkpoint_before_is_there(ranks, tmp_path: Path, moment: str) -> None:
    from megatron.core import dist_checkpointing

    with pytest.raises(AssertionError, match="-9"):
        ranks(2).run(_killed, str(tmp_path), moment, seconds=90.0)
    assert not dist_checkpointing.check_is_distributed_checkpoint(str(tmp_path / "4"))
    assert dist_checkpointing.check_is_distributed_checkpoint(str(tmp_path / "2"))
    options = {"param_gather": True}
    loaded = ranks(2).run(_load_and_train, ONE, "delayed", str(tmp_path / "2"), options, seconds=90.0)
    want = ranks(2).run(_uninterrupted, "delayed", options, seconds=90.0)
    assert _losses(loaded) == want[0]


def _uninterrupted(rank: int, size: int, recipe: str, options: dict) -> list[float | None]:
    return Trainer(ONE, recipe, **options).steps(0, 4)[2:]
