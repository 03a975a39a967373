"""Whole runs on several gloo ranks: they stop, fail and go on together, and the number of ranks does not matter."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_job import losses, tiny_job, train_rows, validation_losses, write_text
from torch import nn

from launch import loop
from launch.checkpoint import CheckpointError, find_checkpoint
from launch.config import ConfigError, TrainConfig
from launch.nonfinite import NonFiniteError
from launch.report import read_metrics

# Short steps, a global batch that 1, 2 and 4 ranks can share, and rows of very different length (B32).
JOB = {"train__global_batch_size": 8, "train__micro_batch_size": 2, "data__pack": False}


def job(folder: str, **changes: object) -> TrainConfig:
    return tiny_job(folder, **(JOB | changes))


def run_jobs(function: Callable[..., Any], size: int, folder: str, *args: object) -> list[Any]:
    write_text(Path(folder))  # before the ranks read it
    return run_ranks(function, size, folder, *args, timeout=45)


def train(rank: int, size: int, folder: str, changes: dict) -> dict:
    result = loop.run(job(folder, **changes))
    return {"steps": result.steps, "exit": result.exit_code, "validation": result.validation_loss}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("recipe", ["unquantized", "delayed"])
def test_from_one_rank_to_two_to_four_and_back(tmp_path: Path, recipe: str) -> None:
    quantized = {"quant__enabled": False} if recipe == "unquantized" else {"quant__recipe": recipe}
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    # The schedule looks at the last step, so it has to be constant here.
    quantized |= {"optim__schedule": "constant", "train__eval_interval": 2}
    run_jobs(train, 1, whole, quantized)
    for steps, size in ((2, 1), (4, 2), (6, 4), (8, 1)):
        answers = run_jobs(train, size, parts, quantized | {"train__max_steps": steps})
        assert all(a == answers[0] for a in answers) and answers[0]["steps"] == steps
    tolerance = {"abs": 3e-5} if recipe == "unquantized" else {"rel": 2e-3}  # amaxes differ with who sees which rows
    assert losses(f"{parts}/run") == pytest.approx(losses(f"{whole}/run"), **tolerance)
    assert validation_losses(f"{parts}/run") == pytest.approx(validation_losses(f"{whole}/run"), **tolerance)
    assert [r["tokens"] for r in train_rows(f"{parts}/run")] == [r["tokens"] for r in train_rows(f"{whole}/run")]


def signalled(rank: int, size: int, folder: str, changes: dict) -> dict:
    """Only rank 1 gets the signal, during step 3."""
    original = loop.Trainer._one_step

    def one_step(self: loop.Trainer) -> torch.Tensor:
        if self.position.step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    loop.Trainer._one_step = one_step
    return train(rank, size, folder, changes)


@pytest.mark.timeout(90)
def test_a_signal_to_one_rank_stops_all_and_the_rest_is_bitwise_the_same(tmp_path: Path) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    changes = {"quant__recipe": "delayed", "optim__state": "int8", "model__hidden_size": 64}
    run_jobs(train, 2, whole, changes)
    stopped = run_jobs(signalled, 2, parts, changes)
    assert [(a["steps"], a["exit"]) for a in stopped] == [(3, 130)] * 2
    assert find_checkpoint(f"{parts}/run").name == "step_00000003"
    assert [a["steps"] for a in run_jobs(train, 2, parts, changes)] == [8, 8]
    assert losses(f"{parts}/run") == losses(f"{whole}/run")
    assert validation_losses(f"{parts}/run") == validation_losses(f"{whole}/run")


def bad_rank(rank: int, size: int, folder: str, which: int) -> tuple:
    original = loop.prepare_model

    def prepare(*args: object) -> nn.Module:
        model = original(*args)
        if rank == which:
            layer = model.get_submodule("model.layers.1.mlp.gate_proj")
            layer.register_forward_hook(lambda module, args, out: out * float("nan") if module.training else out)
        return model

    loop.prepare_model = prepare
    with pytest.raises(NonFiniteError) as caught:
        loop.run(job(folder, train__max_nonfinite_steps=2))
    return str(caught.value), caught.value.step, caught.value.module


@pytest.mark.timeout(60)
@pytest.mark.parametrize("which", [0, 1])
def test_a_nan_on_one_rank_stops_all_with_one_message(tmp_path: Path, which: int) -> None:
    first, second = run_jobs(bad_rank, 2, str(tmp_path), which)
    assert first == second
    assert first[1:] == (1, "model.layers.1.mlp.gate_proj") and f"(rank {which})" in first[0]
    assert [r["skipped"] for r in train_rows(tmp_path / "run")] == [True] * 3


def full_disk(rank: int, size: int, folder: str) -> tuple:
    """The file system of rank 1 is full at step 4, and at the end."""
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):
        def write_data(self, plan: object, planner: object) -> object:
            if rank == 1 and "step_00000002" not in str(self.path):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write_data(plan, planner)

    import launch.checkpoint

    launch.checkpoint.FileSystemWriter = Writer
    with pytest.raises(CheckpointError, match="No space left on device"):
        loop.run(job(folder, checkpoint__interval=2))
    return (find_checkpoint(f"{folder}/run").name,)


@pytest.mark.timeout(60)
def test_a_full_disk_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    assert run_jobs(full_disk, 2, str(tmp_path)) == [("step_00000002",)] * 2
    assert len(losses(tmp_path / "run")) == 8, "training went on until the last checkpoint had to be written"


def refused(rank: int, size: int, folder: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loop.run(job(folder, model__hidden_size=64))
    return str(caught.value)


@pytest.mark.timeout(60)
def test_another_model_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_jobs(train, 1, str(tmp_path), {"train__max_steps": 1, "train__eval_batches": 0})
    assert all(
        "model.hidden_size: 32 in the checkpoint, 64 here" in text for text in run_jobs(refused, 2, str(tmp_path))
    )


def rotary(rank: int, size: int, folder: str, positions: int) -> list:
    """Cosines inside a block, and the logits, of a model trained in bf16."""
    cfg = tiny_job(folder, train__dtype="bf16", model__max_position_embeddings=positions, quant__enabled=False)
    from launch.distributed import join_world

    with join_world("cpu") as world:
        model = loop.prepare_model(cfg, world, 320)
        seen: dict[str, torch.Tensor] = {}

        def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
            seen["cos"], seen["sin"] = kwargs["position_embeddings"]
            seen["ids"] = kwargs["position_ids"]
            seen["hidden"] = args[0]

        model.get_submodule("model.layers.1").register_forward_pre_hook(look, with_kwargs=True)
        ids = torch.arange(positions)[None] % 256
        logits = model(input_ids=ids).logits
        return [seen["cos"], seen["sin"], seen["ids"], seen["hidden"].dtype, logits.float()]


@pytest.mark.timeout(60)
def test_rotary_tables_stay_fp32_in_bf16_training(tmp_path: Path) -> None:
    """B44: far positions are not blurred."""
    positions = 4096
    alone = run_jobs(rotary, 1, str(tmp_path), positions)[0]
    for cos, sin, ids, hidden, logits in run_jobs(rotary, 2, str(tmp_path), positions):
        assert cos.dtype == sin.dtype == torch.float32 and hidden == torch.bfloat16 and not ids.is_floating_point()
        angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(8).double() / 8)
        assert (cos[0].double() - torch.cat([angles, angles], -1).cos()).abs().max() < 1e-3
        assert (sin[0].double() - torch.cat([angles, angles], -1).sin()).abs().max() < 1e-3
        torch.testing.assert_close(logits, alone[4], rtol=2e-2, atol=2e-2)


@pytest.mark.timeout(60)
def test_every_rank_gets_the_same_result_and_one_writes(tmp_path: Path) -> None:
    """B53: what could end a run is reduced over ranks before anybody decides."""
    answers = run_jobs(train, 2, str(tmp_path), {"train__max_steps": 2})
    assert answers[0] == answers[1] and answers[0]["validation"] > 0
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 4
