"""A run that torchrun starts, on gloo and, where there are two GPUs, on NCCL or RCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_job import losses, validation_losses, write_text

TESTS = Path(__file__).parents[1]
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and torch.cuda.device_count() > 1 else [])


def torchrun(folder: Path, device: str, *more: str) -> subprocess.CompletedProcess[str]:
    write_text(folder)
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *launcher, str(TESTS / "dist" / "torchrun_job.py"), str(folder), device, *more],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=80,
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("device", DEVICES)
def test_stopped_and_continued_it_gives_the_same_curve(tmp_path: Path, device: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = torchrun(whole, device)
    assert done.returncode == 0, done.stdout
    stopped = torchrun(parts, device, "7")
    # On a GPU the answer of the other ranks is read one step later, so that the device never idles.
    steps = 7 if device == "cpu" else 8
    assert stopped.returncode != 0 and f"interrupted after step {steps}; to continue:" in stopped.stdout, stopped.stdout
    assert "torchrun --nproc-per-node 2 -m launch.train" in stopped.stdout and "exitcode  : 130" in stopped.stdout
    done = torchrun(parts, device)
    assert done.returncode == 0 and f"step {steps}\n" in done.stdout, done.stdout
    assert losses(parts / "run") == losses(whole / "run")
    assert validation_losses(parts / "run") == validation_losses(whole / "run")
