"""`lumen-bench`: what it measures is what training runs, bytes and rates add up, mistakes are told at once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.bench import cli, gemm, quantize, rivals, timing
from lumen_core import operands
from lumen_core.config import RECIPES, QuantConfig
from lumen_core.kernels.table import table

SMALL = ["--m", "64", "--k", "96", "--iters", "2"]


def report(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    target = tmp_path / "folder" / "out.json"
    assert cli.main([*arguments, "--json", str(target)]) == 0
    return json.loads(target.read_text())


def test_gemm_report(device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(tmp_path, "gemm", "--n", "128", *SMALL, "--device", str(device), "--recipes", "rowwise", "mxfp8")
    assert [(r["recipe"], r["gemm"]) for r in found["rows"]] == [
        (r, g) for r in ("rowwise", "mxfp8") for g in gemm.GEMMS
    ]
    assert (found["m"], found["n"], found["k"], found["dtype"], found["iterations"]) == (64, 128, 96, "bf16", 2)
    assert found["command"].startswith("lumen-bench gemm --n 128") and found["versions"]["torch"] == torch.__version__
    ceiling = found["bf16_tflops"]["ceiling"]
    assert ceiling == max(found["bf16_tflops"][g] for g in gemm.GEMMS)
    for row in found["rows"]:
        assert row["tflops"] == pytest.approx(2 * 64 * 128 * 96 / row["ms"] / 1e9)
        assert row["of_ceiling"] == pytest.approx(row["tflops"] / ceiling)
        assert row["vs_bf16"] == pytest.approx(row["tflops"] / found["bf16_tflops"][row["gemm"]])
        assert (row["torchao_tflops"] is None) is (row["torchao_reason"] is not None)
        assert row["kernel"] in ("scaled_mm", "dequantize_bf16", "reference")
    text = capsys.readouterr().out
    assert "M=64 N=128 K=96" in text and text.count("mxfp8") == 3


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "bf16"])
def test_recorded_products_are_those_of_training(recipe: str, device: torch.device) -> None:
    m, n, k = 64, 96, 128
    x, w, g = (torch.randn(s, device=device) for s in ((m, k), (n, k), (m, n)))
    before = operands.gemm
    recorded = gemm.record(QuantConfig.from_recipe(recipe), x, w, g)
    assert operands.gemm is before
    assert list(recorded) == list(gemm.GEMMS)
    exact = {"fprop": x @ w.t(), "dgrad": g @ w, "wgrad": g.t() @ x}
    for name, (kernel, run) in recorded.items():
        assert kernel in [c for c, _ in table(device)[0][2]]
        error = (run() - exact[name]).norm() / exact[name].norm()
        assert 0.005 < error < (0.25 if recipe == "mxfp4" else 0.1), f"{name}: {error}"


@pytest.mark.parametrize(
    ("recipe", "low"),
    [("mxfp8,wgrad=bf16", ["fprop", "dgrad"]), ("rowwise,fprop=bf16", ["dgrad", "wgrad"]), ("bf16", [])]
    + [("mxfp8,quantize_activation=false", [])],
)
def test_products_left_in_bf16_are_shown_as_such(recipe: str, low: list[str], tmp_path: Path) -> None:
    found = report(tmp_path, "gemm", "--n", "64", *SMALL, "--device", "cpu", "--recipes", recipe)
    assert [r["gemm"] for r in found["rows"] if r["kernel"] != "torch bf16"] == low
    for row in found["rows"]:
        if row["gemm"] not in low:
            assert row["vs_bf16"] == pytest.approx(1.0) and row["torchao_reason"] == "bf16"


def test_quantize_report(device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantize", "--m", "256", "--k", "512", "--iters", "2", "--device", str(device), "--no-compile"]
    found = report(tmp_path, *arguments)
    assert [r["cast"] for r in found["rows"]] == list(quantize.CASTS)
    values = 256 * 512
    least = {
        "tensor": 2 * 2 * values + values + 4,
        "tensor, amax known": 2 * values + values + 4,
        "row": 3 * values + 4 * 256,
        "1x128": 3 * values + 4 * values // 128,
        "128x128": 3 * values + 4 * 2 * 4,
        "mxfp8 1x32": 3 * values + values // 32,
        "mxfp8 32x32": 3 * values + values // 1024,
        "mxfp4 1x32": 2 * values + values // 2 + values // 32,
        "mxfp4 1x32 stochastic": 2 * values + values // 2 + values // 32,
        "tensor both": 2 * 2 * values + 2 * (values + 4),
        "tensor both, amax known": 2 * values + 2 * (values + 4),
        "row both": 2 * 2 * values + 2 * values + 4 * (256 + 512),
        "1x128 both": 2 * values + 2 * (values + 4 * values // 128),
        "mxfp8 1x32 both": 2 * values + 2 * (values + values // 32),
    }
    assert {r["cast"]: r["bytes"] for r in found["rows"]} == least
    for row in found["rows"]:
        assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["ms"] * 1e3)
        assert row["of_copy"] == pytest.approx(row["bytes_per_second"] / found["copy_bytes_per_second"])
    for name in ("tensor", "row", "mxfp8 1x32"):
        row = next(r for r in found["rows"] if r["cast"] == name)
        assert row["torchao_ms"] > 0 and row["vs_torchao"] == pytest.approx(row["torchao_ms"] / row["ms"])
    assert ("GB/s" if device.type == "cpu" else "TB/s") in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_the_rival_computes_the_same_product(recipe: str) -> None:
    a, b = torch.randn(64, 128, dtype=torch.bfloat16), torch.randn(96, 128, dtype=torch.bfloat16)
    work, reason = rivals.attempt(lambda: rivals.gemm(QuantConfig.from_recipe(recipe), a, b))
    assert reason is None
    exact = a.float() @ b.float().t()
    assert 0.005 < (work().float() - exact).norm() / exact.norm() < 0.1


def test_a_rival_that_fails_gives_a_reason() -> None:
    def broken() -> None:
        raise ModuleNotFoundError("No module named 'triton'")

    assert rivals.attempt(lambda: broken) == (None, "ModuleNotFoundError: No module named 'triton'")
    assert rivals.attempt(broken)[1] == "ModuleNotFoundError: No module named 'triton'"
    a = torch.ones(64, 64)
    for recipe in ("mxfp4", "hybrid", "blockwise"):
        assert rivals.attempt(lambda r=recipe: rivals.gemm(QuantConfig.from_recipe(r), a, a))[1] == "no counterpart"


def test_stopwatch_takes_the_median_of_the_timed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 1, 0, 9, 0, 2])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []
    assert timing.Stopwatch(torch.device("cpu"), 3).seconds(lambda: calls.append(1)) == 2
    assert len(calls) == timing.WARM_UP + 3


def test_times_are_those_of_the_work(device: torch.device) -> None:
    """A lower bound only: a busy machine is slower, never faster."""
    watch = timing.Stopwatch(device, 3)
    if device.type == "cuda":  # the host does not wait for it: only events see it
        assert watch.seconds(lambda: torch.cuda._sleep(20_000_000)) > 2e-3
    else:
        assert watch.seconds(lambda: time.sleep(0.004)) >= 0.004


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["gemm", "--m", "0"], "argument --m: 0 is not positive"),
        (["gemm", "--n", "x"], "argument --n: invalid"),
        (["gemm", "--recipes", "mxfp9"], "recipe 'mxfp9' is unknown (nearest: 'mxfp8')"),
        (["gemm", "--recipes", "mxfp8,first_layers_bf16=1", *SMALL], "first_layers_bf16=1"),
        (["gemm", "--device", "gpu"], "argument --device: gpu:"),
        (["quantize", "--dtype", "fp8"], "argument --dtype: invalid choice: 'fp8'"),
        (["quantize", "--casts", "rows"], "argument --casts: invalid choice: 'rows'"),
        (["quantize", "--json", "/proc/none/out.json"], "--json /proc/none/out.json: No such file"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
