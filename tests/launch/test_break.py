"""What breaks a run: no traceback for it, no silent success, and nothing of an earlier run harmed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny_job import tiny_job

from launch import loop, train
from launch.checkpoint import FOLDER, CheckpointError
from launch.config import ConfigError, ModelConfig
from launch.hf_export import main_export
from launch.models import build_model
from launch.nonfinite import NonFiniteError
from launch.overrides import load
from launch.preflight import import_problem, own_run_dir
from launch.report import Reporter, Status
from launch.result import RESULT
from launch.validate import export_problem


def test_a_last_validation_loss_that_is_not_finite_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(self: loop.Trainer, *args: object) -> torch.Tensor:
        vector = one_step(self)
        if self.position.step == 4:  # the last update overflows: no step after it is there to notice
            with torch.no_grad():
                self.model.lm_head.weight.mul_(float("inf"))
        return vector

    one_step = loop.Trainer._one_step
    monkeypatch.setattr(loop.Trainer, "_one_step", spoilt)
    out = tmp_path / "out"
    cfg = tiny_job(tmp_path, train__max_steps=4, export=str(out), quant__recipe="bf16")
    for _ in range(2):  # also when the same command finds everything done
        with pytest.raises(NonFiniteError, match="validation loss after the last step, 4, is not finite"):
            loop.run(cfg)
        assert not out.exists() and not (Path(cfg.run_dir) / RESULT).exists()


def test_two_jobs_do_not_share_a_run_dir(tmp_path: Path) -> None:
    cfg = tiny_job(tmp_path, train__max_steps=1, train__eval_batches=0)
    with own_run_dir(cfg.run_dir), pytest.raises(ConfigError, match="another job is running in it"):
        loop.run(cfg)
    assert loop.run(cfg).steps == 1  # the lock went with its holder


@pytest.mark.parametrize("changes", [{"quant__enabled": False}, {"quant__recipe": "mxfp4"}])
@pytest.mark.parametrize("resume", ["auto", "run"])
def test_another_recipe_does_not_go_on_in_a_run_dir(tmp_path: Path, changes: dict, resume: str) -> None:
    cfg = tiny_job(tmp_path, train__max_steps=1, train__eval_batches=0)
    loop.run(cfg)
    changes["checkpoint__resume"] = "auto" if resume == "auto" else cfg.run_dir
    with pytest.raises(ConfigError, match="of another job") as caught:
        loop.run(tiny_job(tmp_path, train__max_steps=1, train__eval_batches=0, **changes))
    assert "quant." in str(caught.value)


@pytest.mark.parametrize(
    ("word", "package"),
    [("model=tiny", "transformers"), ("optim.state=int8", "torchao"), ("data.format=parquet", "pyarrow")],
)
def test_a_missing_package_is_named_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(loop, "run", lambda cfg: pytest.fail("the run was started"))
    assert train.main([word]) == 2
    assert capsys.readouterr().err == f"lumen-train: needs {package}: pip install 'lumen-train[train]'\n"


def test_a_package_missed_later_is_named_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main_export(["/no/such", "/no/out"]) == 2 and "needs safetensors: pip" in capsys.readouterr().err
    late = ModuleNotFoundError("No module named 'pyarrow.parquet'", name="pyarrow.parquet")
    assert import_problem(late) == "needs pyarrow: pip install 'lumen-train[train]'"
    assert import_problem(ModuleNotFoundError("No module named 'launch.x'", name="launch.x")) is None


def test_an_unknown_kernel_is_told_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LUMEN_KERNELS", "bogus=triton")
    monkeypatch.setattr(loop, "run", lambda cfg: pytest.fail("the run was started"))
    assert train.main(["model=tiny"]) == 2
    err = capsys.readouterr().err
    assert "unknown operation 'bogus'" in err and err.count("\n") == 1


def test_waiting_threads_leave_the_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert train.main(["--help"]) == 0 and train.os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert train.main(["--help"]) == 0 and train.os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize("damage", ["metadata cut", "metadata empty", "data empty"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    cfg = tiny_job(tmp_path, train__max_steps=1, train__eval_batches=0)
    loop.run(cfg)
    checkpoint = Path(cfg.run_dir) / FOLDER / "step_00000001"
    file = checkpoint / ".metadata" if damage.startswith("metadata") else next(checkpoint.glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2 if damage.endswith("cut") else 0])
    with pytest.raises(CheckpointError, match="step_00000001 cannot be read.*checkpoint.resume=<an older one>"):
        loop.run(cfg)
    assert main_export([cfg.run_dir, str(tmp_path / "out")]) == 1
    assert "step_00000001 cannot be read" in capsys.readouterr().err


def test_places_that_cannot_be_written_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="run_dir=.*cannot be written to: Not a directory"):
        loop.run(tiny_job(tmp_path, run_dir=str(file / "run")))
    assert export_problem(file / "a" / "out") == f"expected a place in a directory, {file} is a file"
    assert export_problem(tmp_path / "a" / "out") is None
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert export_problem(tmp_path / "a" / "out") == f"nothing can be written in {tmp_path}"


def test_a_disk_that_fills_up_costs_the_curves_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def full(rows: object) -> None:
        raise OSError(28, "No space left on device")

    reporter = Reporter(tmp_path, "test")
    reporter.metrics.write = full
    for step in (1, 2):
        reporter.steps([{"step": step, "loss": 1.0}], Status(step, 2, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0))
    reporter.close()
    assert capsys.readouterr().out.count("WARNING: metrics cannot be written") == 1


def test_sides_of_different_length_are_not_compared(tmp_path: Path) -> None:
    loop.run(tiny_job(tmp_path, train__max_steps=2, compare="bf16"))
    with pytest.raises(ConfigError, match="mxfp8 has 2 steps done, train.max_steps=1"):
        loop.run(tiny_job(tmp_path, train__max_steps=1, compare="bf16"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not what it should be"])
def test_a_broken_model_directory_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    build_model(ModelConfig(**small, num_key_value_heads=1), 32).save_pretrained(tmp_path)
    build_model(ModelConfig(path=str(tmp_path)), 32)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}: {name} cannot be read") as caught:
        build_model(ModelConfig(path=str(tmp_path)), 32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "word",
    [
        "model.initializer_range=2",
        "model.vocab_size=1e12",
        "model.hidden_size=1e9",
        "train.micro_batch_size=1e9",
        "train.global_batch_size=1e9",
        "train.seq_length=1e9",
    ],
)
def test_absurd_sizes_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=f"^{word}: expected .*<="):
        load([word])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("~train.max_steps", "~train.max_steps: keys cannot be deleted; leave the key out"),
        ("~compare=bf16", "~compare=bf16: keys cannot be deleted; leave the key out, or write compare=null"),
        ("train.max_steps=6 train={max_steps:abc}", "train.max_steps='abc': expected an integer >= 1"),
        ("quant.apply_modules=[", "quant.apply_modules=[: expected a list of strings, or null, such as [a,b]"),
        ("quant.apply_modules=a]", "quant.apply_modules=a]: expected a list of strings, or null, such as [a,b]"),
    ],
)
def test_what_is_told_about_a_word_is_true(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(words.split())
    assert str(caught.value) == told


def test_brackets_of_a_glob_are_no_list() -> None:
    assert load(["quant.apply_modules=layers.[01]"])[0].quant.options["apply_modules"] == ("layers.[01]",)
