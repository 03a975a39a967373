"""The training loop in one process: what it records, how it goes on, and what must not change it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_job import losses, tiny_job, train_rows, validation_losses

from launch import loop
from launch.checkpoint import FOLDER, complete_checkpoints, load_model_weights
from launch.config import ConfigError, TrainConfig
from launch.data import ByteTokenizer
from launch.models import build_model
from launch.result import RunResult
from launch.step import TrainStep


@pytest.fixture
def interrupt_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sends this process SIGTERM while it computes the steps of the list."""
    steps: list[int] = []
    original = loop.Trainer._one_step

    def one_step(self: loop.Trainer) -> torch.Tensor:
        answer = original(self)
        if self.position.step in steps:
            steps.remove(self.position.step)
            os.kill(os.getpid(), signal.SIGTERM)
        return answer

    monkeypatch.setattr(loop.Trainer, "_one_step", one_step)
    yield steps


def weights(cfg: TrainConfig) -> dict[str, torch.Tensor]:
    """The final weights of a run, read into an ordinary unquantized model."""
    model = build_model(cfg.model, ByteTokenizer().vocab_size)
    load_model_weights(cfg.run_dir, model)
    return model.state_dict()


def test_a_run_learns_and_leaves_its_records(
    tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = tiny_job(tmp_path, train__max_steps=20, train__eval_interval=8, backend__device=device.type)
    result = loop.run(cfg)
    assert result.exit_code == 0 and result.steps == 20 and result.nonfinite_steps == 0
    assert result.validation_loss < 0.85 * result.first_validation_loss
    assert list(validation_losses(cfg.run_dir)) == [0, 8, 16, 20]
    rows = train_rows(cfg.run_dir)
    assert len(losses(cfg.run_dir)) == 20
    assert all(0 < r["tokens"] <= 4 * 32 and not r["skipped"] and r["grad_norm"] > 0 for r in rows)
    assert {3, 6, 9, 12, 15, 18, 20} <= {r["step"] for r in rows if r.get("tokens_per_second", 0) > 0}
    text = Path(result.summary).read_text()
    version = f"torch: {torch.__version__}"
    for part in ("| mxfp8 | 20 |", "layers.1.mlp.down_proj", "max_steps: 20", version, "![loss curves](loss.png)"):
        assert part in text
    assert Path(result.plot).read_bytes().startswith(b"\x89PNG")
    assert any((Path(cfg.run_dir) / "tensorboard").iterdir())
    out = capsys.readouterr().out
    assert "[mxfp8] step  9/20  loss " in out and result.plot in out and result.summary in out
    assert f"validation loss: {result.validation_loss:.4f}, " in out


@pytest.mark.parametrize(
    "changes",
    [
        {"quant__recipe": "delayed"},
        {"quant__recipe": "mxfp4", "optim__state": "int8", "model__hidden_size": 64},
        {"quant__recipe": "bf16", "train__dtype": "bf16", "train__global_batch_size": 8, "train__micro_batch_size": 2},
    ],
    ids=["delayed", "mxfp4 and 8-bit moments", "bf16 accumulated"],
)
def test_interrupted_twice_it_gives_the_curve_of_an_uninterrupted_run(
    tmp_path: Path,
    interrupt_after: list[int],
    changes: dict,
    device: torch.device,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = changes | {"backend__device": device.type}
    whole = tiny_job(tmp_path, run_dir=str(tmp_path / "whole"), train__max_steps=11, **changes)
    loop.run(whole)
    parts = tiny_job(tmp_path, run_dir=str(tmp_path / "parts"), train__max_steps=11, **changes)
    interrupt_after[:] = [4, 9]  # at an evaluation and a checkpoint, and away from both
    for steps in (4, 9):
        result = loop.run(parts)
        assert result.exit_code == 130 and result.steps == steps
        assert f"run_dir={parts.run_dir}" in capsys.readouterr().out
    assert loop.run(parts).exit_code == 0
    assert losses(parts.run_dir) == losses(whole.run_dir)
    assert validation_losses(parts.run_dir) == validation_losses(whole.run_dir)
    ours, theirs = weights(parts), weights(whole)
    assert ours.keys() == theirs.keys() == build_model(whole.model, ByteTokenizer().vocab_size).state_dict().keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_crash_between_checkpoints_repeats_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_job(tmp_path, run_dir=str(tmp_path / "whole"), quant__recipe="delayed")
    loop.run(whole)
    cfg = tiny_job(tmp_path, quant__recipe="delayed")
    original = TrainStep.__call__

    def crash(self: TrainStep, batches: list, **options: bool) -> torch.Tensor:
        crash.calls += 1
        if crash.calls == 7:
            raise OSError("the machine went away")
        return original(self, batches, **options)

    crash.calls = 0
    monkeypatch.setattr(TrainStep, "__call__", crash)
    with pytest.raises(OSError, match="went away"):
        loop.run(cfg)
    assert len(losses(cfg.run_dir)) == 6
    loop.run(cfg)
    assert losses(cfg.run_dir) == losses(whole.run_dir)
    assert validation_losses(cfg.run_dir) == validation_losses(whole.run_dir)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp4"])
def test_evaluation_and_logging_change_nothing(tmp_path: Path, recipe: str, device: torch.device) -> None:
    same = {"quant__recipe": recipe, "backend__device": device.type}
    often = tiny_job(tmp_path, run_dir=str(tmp_path / "often"), train__eval_interval=1, train__log_interval=1, **same)
    never = tiny_job(tmp_path, run_dir=str(tmp_path / "never"), train__eval_batches=0, **same)
    assert len(validation_losses(loop.run(often).run_dir)) == 9
    result = loop.run(never)
    assert result.validation_loss is None and validation_losses(never.run_dir) == {}
    assert losses(often.run_dir) == losses(never.run_dir)


def test_recomputing_activations_changes_nothing(tmp_path: Path, device: torch.device) -> None:
    runs = []
    for on in (False, True):
        cfg = tiny_job(
            tmp_path,
            run_dir=str(tmp_path / str(on)),
            quant__recipe="delayed",
            train__activation_checkpointing=on,
            backend__device=device.type,
            train__eval_batches=0,
        )
        loop.run(cfg)
        runs.append(losses(cfg.run_dir))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"model__tie_word_embeddings": True},
        {
            "model__architecture": "qwen3_moe",
            "model__num_experts": 4,
            "model__num_experts_per_tok": 2,
            "model__moe_intermediate_size": 32,
            "model__head_dim": 16,
        },
        {"quant__enabled": False},
        {"train__dtype": "bf16"},
        {"model__init_on_meta": True},
        {"data__pack": False, "data__validation_fraction": 0.0},
    ],
    ids=["tied", "experts", "unquantized", "bf16", "meta", "unpacked without validation"],
)
def test_variants_train(tmp_path: Path, changes: dict, device: torch.device) -> None:
    cfg = tiny_job(tmp_path, train__max_steps=12, train__eval_interval=0, backend__device=device.type, **changes)
    result = loop.run(cfg)
    curve = losses(cfg.run_dir)
    assert sum(curve[-3:]) < 0.95 * sum(curve[:3])
    assert (result.quantized_share > 0.5) == cfg.quant.enabled


@pytest.mark.slow
def test_compiled_layers_train_alike(tmp_path: Path, device: torch.device) -> None:
    runs = []
    for on in (False, True):
        cfg = tiny_job(
            tmp_path,
            run_dir=str(tmp_path / str(on)),
            quant__recipe="mxfp8",
            model__num_hidden_layers=1,
            train__compile=on,
            train__eval_batches=0,
            train__activation_checkpointing=True,
            backend__device=device.type,
        )
        loop.run(cfg)
        runs.append(losses(cfg.run_dir))
    assert runs[0] == pytest.approx(runs[1], rel=2e-3)


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "mxfp8", "mxfp4"])
def test_a_step_never_waits_for_the_device(tmp_path: Path, recipe: str, device: torch.device) -> None:
    """The host looks at the device at the logging interval only: on CUDA any other look is an error."""
    looks: list[int] = []
    original_step, original_flush = loop.Trainer._one_step, loop.Trainer._flush

    def one_step(self: loop.Trainer) -> torch.Tensor:
        strict = device.type == "cuda" and self.position.step > 2  # the first steps compile and allocate
        if strict:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return original_step(self)
        finally:
            if strict:
                torch.cuda.set_sync_debug_mode("default")

    def flush(self: loop.Trainer) -> None:
        if self.pending:
            looks.append(self.position.step)
        original_flush(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "_one_step", one_step)
        patch.setattr(loop.Trainer, "_flush", flush)
        dtype = "bf16" if device.type == "cuda" else "fp32"
        cfg = tiny_job(
            tmp_path,
            quant__recipe=recipe,
            train__dtype=dtype,
            train__micro_batch_size=2,
            train__global_batch_size=4,
            train__max_steps=10,
            train__eval_batches=0,
            checkpoint__interval=0,
            backend__device=device.type,
        )
        loop.run(cfg)
    assert looks == [3, 6, 9, 10]


def test_the_split_into_micro_batches_does_not_matter(tmp_path: Path) -> None:
    runs = []
    for micro in (8, 2):
        cfg = tiny_job(
            tmp_path,
            run_dir=str(tmp_path / str(micro)),
            train__micro_batch_size=micro,
            train__global_batch_size=8,
            quant__enabled=False,
            data__pack=False,  # rows of different length
        )
        loop.run(cfg)
        runs.append((losses(cfg.run_dir), list(validation_losses(cfg.run_dir).values())))
    assert runs[0][0] == pytest.approx(runs[1][0], abs=2e-5)
    assert runs[0][1] == pytest.approx(runs[1][1], abs=2e-5)


# --- where a run starts from ------------------------------------------------------------------------------------------


def test_finished_it_says_so_and_longer_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = tiny_job(tmp_path)
    first = loop.run(cfg)
    again = loop.run(cfg)
    assert "all 8 steps are done already" in capsys.readouterr().out
    assert (again.validation_loss, again.train_loss) == (first.validation_loss, first.train_loss)
    longer = loop.run(tiny_job(tmp_path, train__max_steps=10))
    assert longer.steps == 10 and len(losses(cfg.run_dir)) == 10


def test_never_starts_over_and_keeps_what_was_there(tmp_path: Path) -> None:
    cfg = tiny_job(tmp_path)
    loop.run(cfg)
    before = losses(cfg.run_dir)
    result = loop.run(tiny_job(tmp_path, checkpoint__resume="never", train__max_steps=4, optim__lr=1e-3))
    assert result.steps == 4 and len(losses(cfg.run_dir)) == 4
    assert losses(cfg.run_dir)[0] == before[0] and losses(cfg.run_dir)[3] != before[3]
    assert [p.name for p in complete_checkpoints(Path(cfg.run_dir) / FOLDER)] == ["step_00000004"]
    assert len(complete_checkpoints(Path(cfg.run_dir) / f"{FOLDER}-old-1")) == 2


def test_a_path_is_a_start_for_another_recipe(tmp_path: Path, interrupt_after: list[int]) -> None:
    first = tiny_job(tmp_path, quant__recipe="mxfp4")
    loop.run(first)
    start = f"{first.run_dir}/checkpoints/step_00000004"
    second = tiny_job(tmp_path, run_dir=str(tmp_path / "second"), quant__recipe="delayed", checkpoint__resume=start)
    interrupt_after[:] = [6]
    assert loop.run(second).steps == 6
    assert train_rows(second.run_dir)[0]["step"] == 5
    # The same command again: on from its own checkpoint, not from the start.
    assert loop.run(second).steps == 8
    assert [r["step"] for r in train_rows(second.run_dir)] == [5, 6, 7, 8]


def test_a_path_in_the_run_itself_goes_back(tmp_path: Path) -> None:
    cfg = tiny_job(tmp_path)
    loop.run(cfg)
    curve = losses(cfg.run_dir)
    back = tiny_job(tmp_path, checkpoint__resume=f"{cfg.run_dir}/checkpoints/step_00000004")
    loop.run(back)
    assert losses(cfg.run_dir) == curve


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model__hidden_size": 64}, "model.hidden_size: 32 in the checkpoint, 64 here"),
        ({"quant__recipe": "mxfp4"}, "quant.recipe: mxfp8 in the checkpoint, mxfp4 here"),
        ({"train__seq_length": 16}, "train.seq_length: 32 in the checkpoint, 16 here"),
        ({"optim__state": "int8"}, "optim.state: fp32 in the checkpoint, int8 here"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path, changes: dict, named: str) -> None:
    loop.run(tiny_job(tmp_path, train__max_steps=1, train__eval_batches=0))
    with pytest.raises(ConfigError, match="of another job") as caught:
        loop.run(tiny_job(tmp_path, **changes))
    assert named in str(caught.value)


def test_changed_text_is_noticed(tmp_path: Path) -> None:
    cfg = tiny_job(tmp_path, train__max_steps=1, train__eval_batches=0)
    loop.run(cfg)
    for file in Path(cfg.data.train).iterdir():
        file.write_text(file.read_text() + " and more of it")
    with pytest.raises(ConfigError, match="data.train=.*no longer"):
        loop.run(cfg)


def test_data_and_recipe_mistakes_are_the_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="global_batch_size 6"):
        loop.run(tiny_job(tmp_path, train__global_batch_size=6))
    with pytest.raises(ConfigError, match="no_such_layer"):
        loop.run(tiny_job(tmp_path, quant__options={"apply_modules": ("no_such_layer",)}))
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        loop.run(tiny_job(tmp_path, checkpoint__resume=str(tmp_path / "nowhere")))


# --- two recipes ------------------------------------------------------------------------------------------------------


def test_compare_trains_both_alike_and_reports_the_gap(
    tmp_path: Path, interrupt_after: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = tiny_job(tmp_path, compare="bf16", quant__recipe="mxfp4")
    interrupt_after[:] = [3]
    assert loop.run(cfg).exit_code == 130
    interrupt_after[:] = [6]  # not before the second: the first goes on from 3
    halfway = loop.run(cfg)
    assert (halfway.exit_code, halfway.recipe, halfway.steps) == (130, "mxfp4", 6)
    interrupt_after[:] = []
    result: RunResult = loop.run(cfg)
    run_dir = Path(cfg.run_dir)
    low, high = (validation_losses(run_dir / name) for name in ("mxfp4", "bf16"))
    assert list(low) == list(high) == [0, 4, 8]
    assert low[0] == pytest.approx(high[0], rel=5e-3), "the same initial weights"
    assert [r["tokens"] for r in train_rows(run_dir / "mxfp4")] == [r["tokens"] for r in train_rows(run_dir / "bf16")]
    assert result.gap_percent == pytest.approx(100 * (low[8] / high[8] - 1))
    out = capsys.readouterr().out
    assert (
        f"relative gap of the validation loss: {result.gap_percent:+.2f} %" in out and str(run_dir / "loss.png") in out
    )
    assert Path(result.plot) == run_dir / "loss.png" and Path(result.plot).is_file()
    text = (run_dir / "summary.md").read_text()
    assert "| mxfp4 | 8 |" in text and "| bf16 | 8 |" in text and f"{result.gap_percent:+.2f} %" in text
    again = loop.run(cfg)
    assert "[bf16] finished already" in capsys.readouterr().out
    assert again.gap_percent == result.gap_percent
    assert (result.quantized_share > 0.5, "| 0.0% |" in text) == (True, True), "bf16 quantizes nothing"


def test_compare_with_options_on_the_same_recipe(tmp_path: Path) -> None:
    cfg = tiny_job(
        tmp_path,
        compare="mxfp8",
        quant__options={"scale_rounding": "floor"},
        train__max_steps=2,
        train__eval_interval=0,
    )
    result = loop.run(cfg)
    assert result.gap_percent is not None
    assert losses(tmp_path / "run/mxfp8") != losses(tmp_path / "run/mxfp8-reference")
