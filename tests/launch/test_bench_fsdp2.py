"""`lumen-bench fsdp2` on two gloo ranks: what it counts is the plan's, and a row that fails ends nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.bench import cli


def test_rows_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    size = ["--layers", "1", "--tokens", "16", "--hidden", "128", "--ffn", "128", "--iters", "1", "--warmup", "1"]
    rows = ["bf16", "mxfp8-32x32", "tensorwise@mxfp8-32x32"]
    assert cli.main(["fsdp2", "--gpus", "2", *size, "--rows", *rows, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in rows) and "vs torchao" in text
    plain, ours, other = json.loads(out.read_text())["rows"]
    values = 128 * (128 + 2 * 8 * 4) + 128 * 128 + 2 * 128 * 128 + 128 * 128
    assert plain["wire_mb"]["all_gather"] * 1e6 == pytest.approx(4 * (values + 2 * 128))
    low = values * (2 + 2 / 1024) + 4 * 2 * 128
    assert ours["wire_mb"]["all_gather"] * 1e6 == other["wire_mb"]["all_gather"] * 1e6 == pytest.approx(low)
    assert plain["kernel"] == "-" and ours["ms"] > 0


def test_a_row_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--layers", "1", "--tokens", "16", "--hidden", "100", "--ffn", "128", "--iters", "1", "--warmup", "1"]
    assert cli.main(["fsdp2", "--gpus", "1", *size, "--rows", "bf16"]) == 0
    assert "Error" in capsys.readouterr().out
