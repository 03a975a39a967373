"""`lumen-bench layer` on a small block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.bench import cli

SIZES = ["--batch", "1", "--tokens", "16", "--hidden", "128", "--ffn", "128", "--iters", "1", "--device", "cpu"]


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    rows = ["bf16", "torchao-tensorwise", "tensorwise", "mxfp8"]
    assert cli.main(["layer", *SIZES, "--rows", *rows, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [row["row"] for row in report["rows"]] == rows and report["hidden"] == 128
    for row in report["rows"]:
        assert (row["eager_ms"] and row["compiled_ms"]) or row["reason"], row
    text = capsys.readouterr().out
    assert all(row in text for row in rows) and "vs torchao" in text


def test_a_width_that_heads_do_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["layer", "--hidden", "100", "--device", "cpu"])
    assert "--hidden 100: must be a multiple of 64" in capsys.readouterr().err
