"""What a run shows and records."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launch import report, summary
from launch.report import Metrics, PlainDisplay, Reporter, RichDisplay, Status, duration, open_display, read_metrics
from launch.result import RunResult
from launch.stop import resume_command
from lumen_core.comm.meter import KINDS

STATUS = Status(
    step=30,
    max_steps=200,
    loss=2.5,
    grad_norm=1.25,
    lr=3e-4,
    tokens_per_second=12345.6,
    memory=1.5,
    seconds_left=75,
    validation_loss=2.75,
    validation_step=20,
)


def row(step: int, loss: float = 1.0) -> dict:
    return {"kind": "train", "step": step, "loss": loss, "skipped": False}


def test_metrics_are_cut_back_to_where_a_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.write([row(1), row(2), {"kind": "eval", "step": 2, "validation_loss": 2.0}, row(3)])
    metrics.write([{"kind": "eval", "step": 3, "validation_loss": 2.0}])
    with open(path, "a") as file:
        file.write('{"kind": "train", "st')  # a crash
    again = Metrics(path, step=2, evaluated=2)
    again.write([row(3, loss=7.0)])
    again.close()
    assert [(r["kind"], r["step"]) for r in read_metrics(path)] == [
        ("train", 1),
        ("train", 2),
        ("eval", 2),
        ("train", 3),
    ]
    assert read_metrics(path)[-1]["loss"] == 7.0
    Metrics(path, step=2, evaluated=0).close()
    assert [r["kind"] for r in read_metrics(path)] == ["train", "train"]


def test_every_record_is_on_disk_at_once_and_valid_json(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.write([row(1, loss=float("nan")), row(2, loss=float("inf"))])
    for line in (tmp_path / "m.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))["loss"] is None


def test_plain_lines_have_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    PlainDisplay("mxfp8").update(STATUS)
    assert capsys.readouterr().out == (
        "[mxfp8] step  30/200  loss 2.5000  validation 2.7500 (step 20)  grad norm 1.25  lr 3.00e-04  tokens/s 12,346  "
        "memory 1.50 GiB  left 1:15\n"
    )


def test_bytes_on_the_wire_are_shown_with_their_parts() -> None:
    sent = {"all_gather": 2_500_000, "reduce_scatter": 5_000_000, "all_reduce": 44, "all_to_all": 0}
    shown = dict(replace(STATUS, wire_bytes=sent).fields())["wire"]
    assert shown == "7.5 MB (gather 2.5 MB, scatter 5 MB, reduce 44 B) a step"
    assert report.traffic_text({"all_gather": 1500}) == "1.5 kB" and report.traffic_text({}) == "0 B"
    assert report.amount(12_345_000_000) == "12.35 GB"


def test_wire_numbers_are_the_last_steps() -> None:
    rows = [row(1) | {"wire_bytes": 9, **{f"{k}_bytes": 9 * (k == "all_gather") for k in KINDS}}, row(2)]
    assert summary.wire_numbers(rows) == {"wire_bytes": {"all_gather": 9}}
    assert summary.wire_numbers([row(1)]) == {"wire_bytes": None}, "a record of an earlier version"
    mine, other = RunResult("r", "mxfp8", wire_bytes={"all_gather": 1000}), RunResult("r", "bf16", wire_bytes={})
    assert summary.wire_lines(["mxfp8", "bf16"], [mine, other]) == [
        "wire per step:   mxfp8 1 kB; bf16 0 B",
        "peak memory:     mxfp8 0.00 GiB; bf16 0.00 GiB",
    ]
    other.wire_bytes = {"all_gather": 2000}
    assert summary.wire_lines(["mxfp8", "bf16"], [mine, other])[0].endswith("; bf16 2 kB, 0.5 times as much")


def test_the_rich_display_shows_figures_and_messages() -> None:
    console = pytest.importorskip("rich.console").Console(
        file=io.StringIO(), force_terminal=True, width=100, color_system=None
    )
    display = RichDisplay("mxfp8", console)
    display.update(STATUS)
    display.message("saved [here]")
    display.close()
    text = console.file.getvalue()
    for part in ("30/200", "2.5000", "2.7500", "12,346", "1.50 GiB", "1:15", "[mxfp8] saved [here]"):
        assert part in text
    assert text.endswith("\x1b[?25h") or "\x1b[?25h" in text.rpartition("1:15")[2], "the cursor is back"


def test_the_rich_display_follows_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(report, "open_display", lambda label, main: RichDisplay(label, console))
    reporter = Reporter(tmp_path, "x")
    reporter.steps([row(30)], STATUS)
    reporter.evaluation(30, 1.5)
    reporter.close()
    assert "1.5000" in console.file.getvalue().rpartition("30/200")[2]


def test_which_display(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_display("x"), PlainDisplay), "no terminal"
    monkeypatch.setattr(sys, "stdout", Terminal())
    rich = open_display("x")
    assert isinstance(rich, RichDisplay)
    rich.close()
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_display("x"), PlainDisplay)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert isinstance(open_display("x"), PlainDisplay), "no rich"
    assert not isinstance(open_display("x", main=False), PlainDisplay), "another rank"


def test_without_tensorboard_and_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    reporter = Reporter(tmp_path, "x")
    reporter.steps([row(1) | {"grad_norm": 1.0, "lr": 0.1}], STATUS)
    reporter.close()
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert summary.plot_losses(tmp_path / "loss.png", {"x": [row(1)]}) is None


def test_tensorboard_gets_the_curves_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = Reporter(tmp_path, "x")
    for step in (1, 2, 3):
        first.steps([row(step, loss=float(step))], STATUS)
    first.evaluation(2, 5.0)
    first.close()
    second = Reporter(tmp_path, "x", step=2, evaluated=2)
    second.steps([row(3, loss=30.0), row(4, loss=40.0)], STATUS)
    second.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/train")] == [(1, 1), (2, 2), (3, 30), (4, 40)]
    assert [(e.step, e.value) for e in events.Scalars("loss/validation")] == [(2, 5)]


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, "x", main=False)
    reporter.steps([row(1)], STATUS)
    reporter.evaluation(1, 2.0)
    reporter.message("hello")
    reporter.close()
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.7, 3599, 3723)] == ["0:00", "1:00", "59:59", "1:02:03"]


def test_final_numbers_are_of_the_tail() -> None:
    rows = [row(step, loss=float(step)) for step in range(1, 101)]
    rows[95] |= {"loss": None, "skipped": True}
    rows += [{"kind": "eval", "step": s, "validation_loss": v} for s, v in ((0, 8.0), (50, 5.0), (100, 4.0))]
    numbers = summary.final_numbers(rows)
    assert numbers == {
        "train_loss": pytest.approx((91 + 92 + 93 + 94 + 95 + 97 + 98 + 99 + 100) / 9),
        "first_validation_loss": 8.0,
        "validation_loss": 4.0,
    }
    assert summary.fall_percent(RunResult("r", "x", first_validation_loss=8.0, validation_loss=4.0)) == 50
    assert summary.gap_percent(2.02, 2.0) == pytest.approx(1.0)
    assert summary.gap_percent(None, 2.0) is None and summary.final_numbers([])["train_loss"] is None


def test_the_plot_of_two_has_units_a_legend_and_the_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    seen: list = []
    original = figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure, "savefig", lambda self, *a, **k: (seen.append(self), original(self, *a, **k))[1]
    )
    runs = {
        name: [row(1), row(2), *({"kind": "eval", "step": s, "validation_loss": v} for s, v in values)]
        for name, values in {"mxfp8": ((0, 5.0), (2, 4.04)), "bf16": ((0, 5.0), (2, 4.0))}.items()
    }
    path = summary.plot_losses(tmp_path / "loss.png", runs)
    assert path == str(tmp_path / "loss.png") and Path(path).stat().st_size > 5000
    top, bottom = seen[0].axes
    assert top.get_ylabel() == "loss (nats per token)" and bottom.get_xlabel() == "step"
    assert bottom.get_ylabel() == "validation gap (%)"
    labels = [t.get_text() for t in top.get_legend().get_texts()]
    assert labels == ["mxfp8, training", "mxfp8, validation", "bf16, training", "bf16, validation"]
    assert list(bottom.lines[0].get_ydata()) == [0, pytest.approx(1.0)]


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["/venv/bin/lumen-train", "experiment=demo"], "lumen-train experiment=demo run_dir=runs/x"),
        (["/src/launch/train.py", "run_dir=a b"], "python -m launch.train 'run_dir=a b'"),
        (["lumen-train", "checkpoint.resume=never", "run_dir=r"], "lumen-train run_dir=r"),
    ],
)
def test_the_command_that_goes_on(argv: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert resume_command("runs/x", argv) == expected


def test_the_command_that_goes_on_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    command = resume_command("runs/x", ["/src/launch/train.py", "run_dir=r"])
    assert command == "torchrun --nnodes 2 --nproc-per-node 8 -m launch.train run_dir=r"


def test_peak_memory_is_gib(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        block = torch.empty(2**28, device=device)
        assert report.peak_memory(device) >= 1.0
        del block
    else:
        assert 0.05 < report.peak_memory(device) < 64
