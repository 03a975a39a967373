"""Ctrl-C at a real `lumen-train`: once it saves and says how to go on, twice it leaves at once."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_job import losses, write_text

from launch.checkpoint import find_checkpoint

ROOT = Path(__file__).parents[2]


def command(folder: Path, steps: int) -> list[str]:
    keys = {
        "model.hidden_size": 32,
        "model.intermediate_size": 64,
        "model.num_hidden_layers": 2,
        "model.num_attention_heads": 2,
        "model.num_key_value_heads": 1,
        "data.train": write_text(folder),
        "train.max_steps": steps,
        "train.seq_length": 32,
        "train.dtype": "fp32",
        "train.log_interval": 1,
        "train.eval_batches": 1,
        "train.eval_interval": 0,
        "run_dir": folder / "run",
    }
    return ["-m", "launch.train", *(f"{k}={v}" for k, v in keys.items())]


def start(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(what: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.timeout(120)
def test_once_saves_and_the_printed_command_goes_on(tmp_path: Path, metrics: Path) -> None:
    process = start(command(tmp_path, steps=100_000))
    wait_until(lambda: lines(metrics) > 5, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    done = len(losses(tmp_path / "run"))
    assert f"interrupted after step {done}; to continue:\n  python -m launch.train " in out and "Traceback" not in out
    assert find_checkpoint(tmp_path / "run").name == f"step_{done:08d}"
    again = shlex.split(out.rpartition("to continue:\n")[2])
    assert again[1:] == command(tmp_path, steps=100_000)
    process = start([*again[1:], f"train.max_steps={done + 3}"])
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and len(losses(tmp_path / "run")) == done + 3, out


@pytest.mark.timeout(120)
def test_twice_leaves_at_once(tmp_path: Path, metrics: Path) -> None:
    # A step that never ends: the first signal cannot be obeyed.
    script = tmp_path / "stuck.py"
    script.write_text(
        "import time\n"
        "from launch import loop, train\n"
        "loop.Trainer._one_step = lambda self: (print('stuck', flush=True), time.sleep(600))\n"
        f"train.main({command(tmp_path, 3)[2:]!r})\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        if "stuck" in line:
            break
    process.send_signal(signal.SIGINT)
    for line in process.stdout:
        if "saving after this step" in line:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=20)
    assert process.returncode == 130 and "stopped at once, nothing was saved" in rest
    assert not (tmp_path / "run" / "checkpoints").exists()
