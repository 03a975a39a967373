"""The sweep over recipes and seeds, with its runs replaced by their results except in one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tiny_job import write_text

from launch import sweep
from launch.config import ConfigError
from launch.result import RunResult


def result(recipe: str, loss: float) -> RunResult:
    return RunResult("r", recipe, steps=9, first_validation_loss=6.0, validation_loss=loss, quantized_share=0.975)


def test_the_table_compares_within_a_seed() -> None:
    plan = sweep.Sweep(recipes=("mxfp8", "mxfp4"), seeds=(0, 1))
    losses = {"bf16": (2.0, 3.0), "mxfp8": (2.02, 3.0), "mxfp4": (2.1, 2.97)}
    text = sweep.table(plan, {(r, s): result(r, losses[r][s]) for r in losses for s in (0, 1)})
    assert "| mxfp8 | +0.50 % | +1.00 +0.00 | 2.5100 | 97.5% |" in text
    assert "| mxfp4 | +2.00 % | +5.00 -1.00 | 2.5350 | 97.5% |" in text
    assert "| bf16 | - | - | 2.5000 | - |" in text and "mean of 2 seeds" in text
    assert "falls by 58.3 % (least: 50.0 %)" in text and "9 steps of `experiment=demo`" in text


def test_the_command_line() -> None:
    plan = sweep.parse(["recipes=mxfp8,bf16,delayed", "seeds=3,4", "jobs=2", "out=o", "train.max_steps=5"])
    assert (plan.recipes, plan.seeds, plan.jobs, plan.out) == (("mxfp8", "delayed"), (3, 4), 2, Path("o"))
    assert plan.job("delayed", 4) == [
        "experiment=demo",
        "train.max_steps=5",
        "quant=delayed",
        "train.seed=4",
        "compare=null",
        "run_dir=o/delayed-seed4",
    ]
    assert sweep.parse(["experiment=mine"]).words == ("experiment=mine",)
    for wrong in ("seeds=a", "jobs=0", "jobs=1,2", "seeds=-1", "recipes=bf16", "mxfp8"):
        with pytest.raises(ConfigError, match=wrong.split("=")[0]):
            sweep.parse([wrong])


def test_a_mistake_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep.subprocess, "run", lambda *a, **k: pytest.fail("a run was started"))
    assert sweep.main(["recipes=mxfp9", f"out={tmp_path}"]) == 2
    assert sweep.main(["recipes=mxfp8", "train.max_stepz=5", f"out={tmp_path}"]) == 2
    err = capsys.readouterr().err
    assert "mxfp9" in err and "train.max_stepz" in err


@pytest.mark.timeout(120)
def test_it_runs_and_does_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []
    original = subprocess.run

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        started.append(command)
        return original(command, **options)

    monkeypatch.setattr(sweep.subprocess, "run", run)
    small = ["model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "train.max_steps=2"]
    small += ["model.num_attention_heads=2", "model.num_key_value_heads=1"]
    small += [f"data.train={write_text(tmp_path)}", "train.seq_length=32", "train.eval_batches=1", f"out={tmp_path}/o"]
    words = ["recipes=tensorwise", "seeds=0", "jobs=2", *small]
    assert sweep.main(words) == 0
    assert len(started) == 2
    text = (tmp_path / "o" / "table.md").read_text()
    assert "| tensorwise | " in text and text in capsys.readouterr().out
    assert sweep.main(words) == 0
    assert len(started) == 2 and (tmp_path / "o" / "table.md").read_text() == text
    monkeypatch.setattr(
        sweep.subprocess, "run", lambda command, stdout, **k: (stdout.write("no luck"), original(["false"]))[1]
    )
    assert sweep.main([*words, "train.max_steps=3"]) == 1
    assert "no luck" in capsys.readouterr().err
