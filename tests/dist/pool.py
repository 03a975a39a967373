"""Long-lived gloo ranks: starting four of them takes longer than the cells that they run."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from ranks import PRELOAD

CELL_SECONDS = 15.0


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=CELL_SECONDS),
    )
    dist.barrier()
    pipe.send_bytes(pickle.dumps(("value", None)))
    while True:
        function, args = pickle.loads(pipe.recv_bytes())
        try:
            answer = ("value", function(rank, size, *args))
        except BaseException:
            answer = ("error", traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


class RankPool:
    """``size`` ranks in one process group that run one function after another; started when first asked."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Any]] = []
        self._folder: Any = None

    @property
    def started(self) -> bool:
        """Whether the ranks are there."""
        return bool(self._ranks)

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            call = (rank, self.size, os.path.join(self._folder.name, "store"), theirs)
            process = context.Process(target=_serve, args=call, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, mine))
        self._answers(60.0)

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = CELL_SECONDS) -> list[Any]:
        """``[function(rank, size, *args) for every rank]``; a rank that hangs or fails fails the caller."""
        if not self._ranks:
            self._start()
        try:
            for _, pipe in self._ranks:
                pipe.send_bytes(pickle.dumps((function, args)))
            return self._answers(seconds)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            for process, _ in self._ranks:
                process.join(1.0)
            codes = [process.exitcode for process, _ in self._ranks]
            self.stop()
            raise AssertionError(f"a rank of {self.size} died: exit codes {codes}") from error

    def _answers(self, seconds: float) -> list[Any]:
        deadline, answers = time.monotonic() + seconds, []
        for rank, (_, pipe) in enumerate(self._ranks):
            if not pipe.poll(max(deadline - time.monotonic(), 0)):
                self.stop()
                raise AssertionError(f"rank {rank} of {self.size} hung: no answer after {seconds} s")
            answers.append(pickle.loads(pipe.recv_bytes()))
        errors = [f"rank {i}:\n{text}" for i, (kind, text) in enumerate(answers) if kind == "error"]
        if errors:
            self.stop()  # the group may be out of step
        assert not errors, "\n".join(errors)
        return [value for _, value in answers]

    def stop(self) -> None:
        """End the ranks; the next run starts new ones."""
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks = []
