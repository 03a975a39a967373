"""Runs a function on several gloo ranks of this machine, with a limit on how long they may take."""

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

# The server imports these once; every rank is then a fork of it, which saves each of them seconds of imports.
PRELOAD = ("torch", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "launch.loop")


def _rank(
    function: Callable[..., Any], rank: int, size: int, store: str, seconds: float, pipe: Any, args: tuple
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Seen by code that asks whether a launcher started it; the group itself is joined below.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=START_SECONDS + seconds),
        )
        pipe.send_bytes(pickle.dumps(("ready", None)))
        answer = ("value", function(rank, size, *args))
    except BaseException:
        answer = ("error", traceback.format_exc())
    # Pickled here: torch would send tensors as file descriptors that die with this process.
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    os._exit(0)  # a peer that failed must not keep this one in a destructor


START_SECONDS = 90.0


def _wait_until_ready(pipes: list[Any]) -> None:
    deadline = time.monotonic() + START_SECONDS
    for rank, pipe in enumerate(pipes):
        assert pipe.poll(max(deadline - time.monotonic(), 0)), f"rank {rank} did not start in {START_SECONDS} s"
        kind, text = pickle.loads(pipe.recv_bytes())
        assert kind == "ready", f"rank {rank}:\n{text}"


def run_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 30.0) -> list[Any]:
    """``[function(rank, size, *args) for every rank]``, each in a process of its own with gloo set up.

    Raises:
        AssertionError: a rank raised (with its traceback), or not all were done after ``timeout`` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            call = (function, rank, size, os.path.join(folder, "store"), timeout, theirs, args)
            process = context.Process(target=_rank, args=call, daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, mine))
        answers: list[Any] = []
        try:
            # The limit is for the function: starting ranks takes as long as the machine is busy.
            _wait_until_ready([pipe for _, pipe in ranks])
            deadline = time.monotonic() + timeout
            for rank, (_, pipe) in enumerate(ranks):
                if not pipe.poll(max(deadline - time.monotonic(), 0)):
                    raise AssertionError(f"rank {rank} of {size} was not done after {timeout} s")
                try:
                    answers.append(pickle.loads(pipe.recv_bytes()))
                except EOFError:
                    answers.append(("error", "the process died"))
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()
    errors = [f"rank {i}:\n{text}" for i, (kind, text) in enumerate(answers) if kind == "error"]
    assert not errors, "\n".join(errors)
    return [value for _, value in answers]
