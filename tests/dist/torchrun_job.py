"""What the ranks of `test_train_torchrun` run: FOLDER DEVICE [STEP], where rank 1 sends itself SIGTERM in STEP."""

from __future__ import annotations

import os
import signal
import sys

import torch
from tiny_job import tiny_job

from launch import loop


def main(folder: str, device: str, step: int) -> int:
    torch.set_num_threads(1)
    original = loop.Trainer._one_step

    def one_step(self: loop.Trainer) -> torch.Tensor:
        if self.position.step + 1 == step and self.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        strict = device == "cuda" and self.position.step > 5
        if strict:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return original(self)
        finally:
            if strict:
                torch.cuda.set_sync_debug_mode("default")

    loop.Trainer._one_step = one_step
    cfg = tiny_job(
        folder,
        backend__device=device,
        quant__recipe="delayed",
        train__dtype="bf16" if device == "cuda" else "fp32",
        train__max_steps=12,
        train__global_batch_size=8,
        train__micro_batch_size=2,
    )
    return loop.run(cfg).exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else -1))
