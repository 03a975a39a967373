"""Checkpoints: whole or absent, refused where they do not fit, and pruned."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_job import losses, tiny_job
from torch.distributed.checkpoint import FileSystemWriter

from launch import loop, schema
from launch.checkpoint import (
    FOLDER,
    Checkpointer,
    CheckpointError,
    Position,
    complete_checkpoints,
    config_differences,
    find_checkpoint,
    load_config,
    load_model_weights,
)
from launch.config import ConfigError, TrainConfig
from launch.data import ByteTokenizer
from launch.distributed import World, join_world, shard_model
from launch.models import build_model
from lumen_core import quantize as quant
from lumen_core.optim import build_optimizer


@pytest.fixture
def world() -> Iterator[World]:
    with join_world("cpu") as joined:
        yield joined


def names(run_dir: Path | str) -> list[str]:
    return [p.name for p in complete_checkpoints(Path(run_dir) / FOLDER)]


def built(cfg: TrainConfig, world: World | None = None) -> torch.nn.Module:
    model = build_model(cfg.model, ByteTokenizer().vocab_size)
    return model if world is None else shard_model(model, world, dtype="fp32")


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class FullDisk(FileSystemWriter):
    """Writes the files and then finds no room for the last of them."""

    def finish(self, metadata: object, results: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    cfg = tiny_job(tmp_path, train__max_steps=7, checkpoint__interval=2, checkpoint__keep=2)
    loop.run(cfg)
    assert names(cfg.run_dir) == ["step_00000006", "step_00000007"]
    assert sorted(p.name for p in (Path(cfg.run_dir) / FOLDER).iterdir()) == names(cfg.run_dir)


def test_keep_zero_keeps_all_and_none_is_written_unasked(tmp_path: Path) -> None:
    every = tiny_job(tmp_path, checkpoint__interval=2, checkpoint__keep=0, checkpoint__save_at_end=False)
    loop.run(every)
    assert len(names(every.run_dir)) == 4
    none = tiny_job(tmp_path, run_dir=str(tmp_path / "n"), checkpoint__interval=0, checkpoint__save_at_end=False)
    loop.run(none)
    assert names(none.run_dir) == []


def test_a_full_disk_on_the_way_leaves_the_one_before_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = tiny_job(tmp_path, checkpoint__interval=2)
    original = Checkpointer.save

    def save(self: Checkpointer, model: object, optimizer: object, position: Position) -> Path:
        writer = FullDisk if position.step == 4 else FileSystemWriter
        monkeypatch.setattr("launch.checkpoint.FileSystemWriter", writer)
        return original(self, model, optimizer, position)

    monkeypatch.setattr(Checkpointer, "save", save)
    assert loop.run(cfg).steps == 8
    assert names(cfg.run_dir) == ["step_00000002", "step_00000006", "step_00000008"]
    out = capsys.readouterr().out
    assert "WARNING: checkpoint" in out and "No space left on device" in out and "step_00000004 was not written" in out
    assert not list((Path(cfg.run_dir) / FOLDER).glob(".*"))


def test_a_full_disk_at_the_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = tiny_job(tmp_path, checkpoint__interval=0)
    with monkeypatch.context() as patch:
        patch.setattr("launch.checkpoint.FileSystemWriter", FullDisk)
        with pytest.raises(CheckpointError, match="No space left on device"):
            loop.run(cfg)
    assert names(cfg.run_dir) == []


@pytest.mark.parametrize("damage", ["writing", "removing", "no state", "half a state", "no metadata"])
def test_what_is_not_whole_is_passed_over(tmp_path: Path, damage: str) -> None:
    whole = tiny_job(tmp_path, run_dir=str(tmp_path / "whole"))
    loop.run(whole)
    cfg = tiny_job(tmp_path)
    shutil.copytree(whole.run_dir, cfg.run_dir)
    last = Path(cfg.run_dir) / FOLDER / "step_00000008"
    if damage in ("writing", "removing"):
        last.rename(last.with_name(f".{damage}-{last.name}"))
    elif damage == "no state":
        (last / "state.json").unlink()
    elif damage == "half a state":
        text = (last / "state.json").read_text()
        (last / "state.json").write_text(text[: len(text) // 2])
    else:
        (last / ".metadata").unlink()
    assert find_checkpoint(cfg.run_dir).name == "step_00000004"
    assert loop.run(cfg).steps == 8
    assert losses(cfg.run_dir) == losses(whole.run_dir)
    assert names(cfg.run_dir) == ["step_00000004", "step_00000008"]
    assert not list((Path(cfg.run_dir) / FOLDER).glob(".*"))


def test_a_process_killed_while_publishing_loses_nothing(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_job(tmp_path)
    model = built(cfg, world)
    optimizer = build_optimizer(model, lr=1e-3)
    saver = Checkpointer(cfg.run_dir, world, config=cfg, keep=1)
    saver.save(model, optimizer, Position(step=1))

    def kill(*args: object, **options: object) -> None:
        raise Killed

    for moment, left in (("_sync_directory", 1), ("_rename_for_removal", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(f"launch.checkpoint.{moment}", kill)
            with pytest.raises(Killed):
                saver.save(model, optimizer, Position(step=2))
        assert saver.latest().name == f"step_0000000{left}"
    saver.save(model, optimizer, Position(step=3))
    assert [p.name for p in saver.folder.iterdir()] == ["step_00000003"]


def test_weights_go_into_a_plain_model_bitwise(tmp_path: Path) -> None:
    cfg = tiny_job(tmp_path, quant__recipe="mxfp4")
    trained: dict[str, torch.Tensor] = {}
    original = loop.Trainer.finish

    def finish(self: loop.Trainer) -> object:
        trained.update({n: p.full_tensor().clone() for n, p in self.model.state_dict().items()})
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "finish", finish)
        loop.run(cfg)
    model = built(load_config(cfg.run_dir))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    load_model_weights(cfg.run_dir, model)
    after = model.state_dict()
    assert after.keys() == trained.keys()
    assert all(torch.equal(after[n], trained[n]) and not torch.equal(after[n], before[n]) for n in after)


def test_a_used_model_forgets_what_it_had(tmp_path: Path) -> None:
    """B34: nothing computed from the old weights is left, in a model that has run already."""
    cfg = tiny_job(tmp_path, quant__recipe="delayed", optim__lr=1e-2)
    loop.run(cfg)
    ids = torch.randint(0, 256, (2, 16))
    answers = []
    for used in (True, False):
        model = quant.enable(built(cfg), recipe="delayed")
        if used:
            optimizer = build_optimizer(model, lr=0.1)
            for _ in range(3):
                model(ids).logits.square().mean().backward()
                optimizer.step()
        load_model_weights(cfg.run_dir, model)
        with torch.no_grad():
            answers.append(model(ids).logits)
    assert torch.equal(*answers)


def test_a_fresh_optimizer_takes_up_where_the_other_was(tmp_path: Path, world: World) -> None:
    """B80: no step is taken to make state, so the first update after loading has the right size."""
    cfg = tiny_job(tmp_path)
    results = []
    for through_file in (False, True):
        model = built(cfg, world)
        optimizer = build_optimizer(model, lr=1e-2, weight_decay=0.0)
        saver = Checkpointer(tmp_path / "run", world, config=cfg)
        first = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
        for number in range(2):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            if number == 0:
                moved = {n: first[n] - p.full_tensor() for n, p in model.named_parameters()}
                assert all(torch.allclose(d, torch.full_like(d, 1e-2), rtol=1e-4) for d in moved.values())
                path = saver.save(model, optimizer, Position(step=1))
                if through_file:
                    model = built(cfg, world)
                    optimizer = build_optimizer(model, lr=1e-2, weight_decay=0.0)
                    assert saver.load(path, model, optimizer).step == 1
        results.append({n: p.full_tensor() for n, p in model.named_parameters()})
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def test_a_model_of_other_shape_is_refused_by_name(tmp_path: Path) -> None:
    loop.run(tiny_job(tmp_path, train__max_steps=1, train__eval_batches=0))
    other = tiny_job(tmp_path, model__intermediate_size=96, model__num_hidden_layers=3)
    with pytest.raises(ConfigError) as caught:
        load_model_weights(tmp_path / "run", built(other))
    text = str(caught.value)
    assert "model.layers.2.mlp.down_proj.weight: not in the checkpoint" in text
    assert "model.layers.0.mlp.up_proj.weight: [64, 32] float32 in the checkpoint, [96, 32] float32 here" in text


def test_the_configuration_comes_back(tmp_path: Path) -> None:
    cfg = tiny_job(tmp_path, quant__options={"scale_rounding": "even"}, train__max_steps=1, train__eval_batches=0)
    loop.run(cfg)
    saved = load_config(Path(cfg.run_dir) / FOLDER)
    assert saved.quant == cfg.quant and saved.model.hidden_size == 32 and saved.optim.betas == cfg.optim.betas
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        load_config(tmp_path)


def test_only_what_makes_another_run_differs(tmp_path: Path) -> None:
    plain = json.loads(json.dumps(schema.to_plain(tiny_job(tmp_path))))
    changed = schema.to_plain(
        tiny_job(tmp_path, train__max_steps=99, optim__lr=1.0, train__micro_batch_size=2, run_dir="elsewhere")
    )
    assert config_differences(plain, changed) == []
    changed["quant"]["scale_rounding"] = "floor"
    assert config_differences(plain, changed) == ["quant.scale_rounding: None in the checkpoint, floor here"]
