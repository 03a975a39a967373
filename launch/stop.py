"""Leaving in good order: the first Ctrl-C or SIGTERM ends the run after the current step, the second Ctrl-C at once."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from launch.distributed import World

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended
# torchrun hands Ctrl-C on to processes that the terminal has told already.
_SAME_PRESS = 2.0


class GracefulStop:
    """Context in which signals only ask: ``requested`` becomes true on this rank.

    Args:
        world: whose ranks have to agree.
        on_request: told once, in the main thread, when the first signal comes.
    """

    def __init__(self, world: World, on_request: Callable[[str], None] = print) -> None:
        self.world = world
        self.requested = False
        self.on_request = on_request
        self._first_interrupt: float | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            echo = torch.distributed.is_torchelastic_launched()
            if self._first_interrupt is None:
                self._first_interrupt = now
            elif not (echo and now - self._first_interrupt < _SAME_PRESS):
                os.write(sys.stderr.fileno(), b"\nstopped at once, nothing was saved\n\x1b[?25h")
                os._exit(INTERRUPTED)
        if not self.requested:
            self.requested = True
            self.on_request(f"{signal.Signals(number).name}: saving after this step (Ctrl-C again: leave at once)")

    def agreed(self) -> bool:
        """Whether any rank was asked. Collective; waits for the device."""
        asked = torch.full((), float(self.requested), device=self.world.device)
        return bool(self.world.sum_(asked).item() > 0)


class StopVote:
    """The ranks' common answer to "shall we stop?", read from the step's own reduction.

    On a GPU the host reads the answer of the step before, once the next one is queued, so the device never idles.
    """

    def __init__(self, stop: GracefulStop) -> None:
        self.stop = stop
        self._pending: tuple[torch.Tensor, Any] | None = None

    def after(self, asked: torch.Tensor) -> bool:
        """``asked``: `StepRecord.stop` of the step just queued, on the device."""
        if self.stop.world.size == 1:
            return self.stop.requested
        if asked.device.type == "cpu":
            return bool(asked > 0)
        before, answer = self._pending, False
        host = torch.empty((), dtype=asked.dtype, pin_memory=True)
        host.copy_(asked, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = (host, event)
        if before is not None:
            before[1].synchronize()
            answer = bool(before[0] > 0)
        return answer


def resume_command(run_dir: str, argv: Sequence[str] | None = None) -> str:
    """The command line that continues this run: the one that started it, never told to start afresh."""
    argv = list(sys.argv if argv is None else argv)
    program = "lumen-train" if os.path.basename(argv[0]).startswith("lumen-train") else "python -m launch.train"
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.distributed.is_torchelastic_launched():
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        nodes = f"--nnodes {size // local} " if size > local else ""
        program = f"torchrun {nodes}--nproc-per-node {local} -m launch.train"
    words = [w for w in argv[1:] if not w.lstrip("+").startswith("checkpoint.resume=")]
    if not any(w.lstrip("+").startswith("run_dir=") for w in words):
        words.append(f"run_dir={run_dir}")
    return " ".join([program, *(shlex.quote(w) for w in words)])
