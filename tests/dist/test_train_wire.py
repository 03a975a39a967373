"""What a run of `lumen-train` sends: bytes in the log, the records and the report, and options that change them."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from ranks import run_ranks
from tiny_job import losses, tiny_job, train_rows, write_text

from launch import loop
from launch.config import ConfigError
from lumen_core.comm.meter import KINDS
from lumen_fsdp2 import plan

JOB = {
    "train__max_steps": 3,
    "train__log_interval": 2,
    "train__eval_interval": 2,
    "train__micro_batch_size": 2,
    "train__global_batch_size": 4,
    "checkpoint__interval": 0,
    "checkpoint__save_at_end": False,
}


def trained(rank: int, size: int, folder: str, changes: dict) -> dict:
    """A run's screen, its result, and what the plan says of its model."""
    plans = []
    original = loop.Trainer.finish

    def finish(self: loop.Trainer) -> object:
        plans.append(plan(self.model))
        return original(self)

    loop.Trainer.finish = finish
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        result = loop.run(tiny_job(folder, **(JOB | changes)))
    return {
        "screen": screen.getvalue(),
        "result": result.wire_bytes,
        "memory": result.peak_memory_gib,
        "gathered": plans[0].bytes_per_step,
        "values": sum(row.numel for row in plans[0].rows),
    }


def run(folder: Path, size: int, **changes: object) -> list[dict]:
    write_text(folder)
    return run_ranks(trained, size, str(folder), changes, timeout=45)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("recipe", ["mxfp8", "tensorwise", "bf16", None])
def test_bytes_of_each_step_are_those_of_the_plan(tmp_path: Path, recipe: str | None) -> None:
    quantized = {"quant__enabled": False} if recipe is None else {"quant__recipe": recipe}
    first, other = run(tmp_path, 2, **quantized)
    for row in train_rows(tmp_path / "run"):
        assert row["all_gather_bytes"] == first["gathered"] > 0
        assert row["reduce_scatter_bytes"] >= 4 * first["values"]  # padded where rows do not divide
        assert row["all_to_all_bytes"] == 0
        # One amax a weight and forward pass, where one scale serves a weight: 7 linear layers a block.
        assert row["all_reduce_bytes"] == (2 * 7 * 4 if recipe == "tensorwise" else 0)
        assert row["wire_bytes"] == sum(row[f"{kind}_bytes"] for kind in KINDS)
    assert first["result"] == other["result"] == {k: row[f"{k}_bytes"] for k in KINDS if row[f"{k}_bytes"]}
    lines = first["screen"].splitlines()
    steps = [line for line in lines if "/3  loss" in line]
    assert len(steps) == 2 and all("kB (gather " in s and " a step" in s for s in steps)
    text = (tmp_path / "run" / "summary.md").read_text()
    low = recipe in ("mxfp8", "tensorwise")
    assert sum("low-precision all-gather" in line for line in lines) == low, "the plan is printed once"
    assert ("## What travels" in text) == low and "wire/step" in text
    assert json.loads((tmp_path / "run" / "result.json").read_text())["result"]["wire_bytes"] == first["result"]
    assert other["screen"] == ""


@pytest.mark.timeout(60)
def test_one_rank_sends_nothing_and_says_so(tmp_path: Path) -> None:
    (only,) = run(tmp_path, 1, quant__recipe="mxfp8", train__micro_batch_size=4)
    assert {row["wire_bytes"] for row in train_rows(tmp_path / "run")} == {0} and only["result"] == {}
    assert "wire 0 B a step" in only["screen"] and "low-precision all-gather" not in only["screen"]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [1, 2])
def test_sending_in_high_precision_changes_bytes_and_nothing_else(tmp_path: Path, size: int) -> None:
    changes = {"quant__recipe": "rowwise", "train__micro_batch_size": 4 // size}
    low = run(tmp_path / "low", size, **changes)
    high = run(tmp_path / "high", size, **changes, backend__low_precision_all_gather=False)
    assert losses(tmp_path / "low" / "run") == losses(tmp_path / "high" / "run")
    assert size == 1 or low[0]["gathered"] < 0.6 * high[0]["gathered"]


@pytest.mark.timeout(60)
def test_wire_and_reduce_scatter_options_reach_the_wire(tmp_path: Path) -> None:
    changes = {"quant__recipe": "tensorwise", "backend__wire": "mxfp8", "backend__low_precision_reduce_scatter": True}
    first, _ = run(tmp_path, 2, **changes)
    row = train_rows(tmp_path / "run")[-1]
    assert row["all_reduce_bytes"] == 0, "blocks need no amax beforehand"
    assert row["reduce_scatter_bytes"] == 0 and 0 < row["all_to_all_bytes"] < 2 * first["values"]
    assert " mxfp8 " in first["screen"] and "to-all" in first["screen"]


@pytest.mark.timeout(90)
def test_a_comparison_tells_bytes_and_memory_of_both(tmp_path: Path) -> None:
    changes = {"quant__recipe": "tensorwise", "compare": "bf16", "backend__wire": "mxfp8-32x32"}
    first, _ = run(tmp_path, 2, **changes)
    *_, wire, memory = first["screen"].splitlines()
    assert wire.startswith("wire per step:   tensorwise ") and "; bf16 " in wire and "times as much" in wire
    assert memory.startswith("peak memory:     tensorwise ") and memory.count("GiB") == 2
    ours, plain = (train_rows(tmp_path / "run" / name)[-1] for name in ("tensorwise", "bf16"))
    assert ours["all_gather_bytes"] < plain["all_gather_bytes"], "the reference sends what its recipe has"
    assert ours["reduce_scatter_bytes"] == plain["reduce_scatter_bytes"]
    table = [line for line in (tmp_path / "run" / "summary.md").read_text().splitlines() if line.startswith("| ")]
    assert "wire/step" in table[0] and len(table) == 3 and all("kB (gather" in line for line in table[1:])


def refused(rank: int, size: int, folder: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loop.run(tiny_job(folder, **(JOB | {"backend__collectives": "mori"})))
    return str(caught.value)


@pytest.mark.timeout(60)
def test_collectives_that_are_not_there_are_refused_on_all_ranks(tmp_path: Path) -> None:
    write_text(tmp_path)
    for text in run_ranks(refused, 2, str(tmp_path)):
        assert text.startswith("backend.collectives=mori: ") and "use backend.collectives=auto" in text
