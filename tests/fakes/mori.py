"""A strict stand-in for `mori.shmem` and `mori.ccl` 1.2.4 over gloo; it refuses what the real one gets silently wrong.

Signatures are those of the wheel (tests/contract/test_mori.py compares them); the rules were read in MORI's C++ and HIP
sources. `install()` puts it into `sys.modules`; nothing here is named `mori` on its own.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

UNIQUE_ID_BYTES = 128
MAX_RANKS = 8
DEFAULT_TRANSIT = 512 << 20
POISON = 0xA5
calls: list[str] = []  # every function of shmem and every operation of ccl, in order
_state: dict[str, Any] = {"group": None, "pe": None, "barriers": 0}


def install(group: dist.ProcessGroup | None = None) -> None:
    """Make `import mori.ccl` and `import mori.shmem` find this fake, whose processing elements will be `group`."""
    calls.clear()
    _state.update(group=group, pe=None, barriers=0)
    package, shmem, ccl = (types.ModuleType(name) for name in ("mori", "mori.shmem", "mori.ccl"))
    package.__path__ = []
    for function in SHMEM:
        setattr(shmem, function.__name__, function)
    shmem.MORI_SHMEM_INIT_WITH_UNIQUEID = 1
    for cls in (All2allSdma, AllgatherSdma, AllreduceSdma):
        setattr(ccl, cls.__name__, cls)
    for module in (package, shmem, ccl):
        module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    package.shmem, package.ccl = shmem, ccl


# --- mori.shmem -------------------------------------------------------------------------------------------------------


def shmem_get_unique_id() -> bytes:
    calls.append("shmem_get_unique_id")
    return os.urandom(UNIQUE_ID_BYTES)


def shmem_init_attr(flags: int, rank: int, nranks: int, unique_id: bytes):
    calls.append("shmem_init_attr")
    if _state["pe"] is not None:
        return 0  # the real one says nothing either
    assert flags == 1 and isinstance(unique_id, bytes) and len(unique_id) == UNIQUE_ID_BYTES
    ids: list[Any] = [None] * nranks
    dist.all_gather_object(ids, (rank, unique_id), group=_state["group"])
    assert ids == [(r, unique_id) for r in range(nranks)], "ranks bring different ids, or are out of order"
    _state["pe"] = (rank, nranks)
    return 0


def shmem_mype() -> int:
    return _pe()[0]


def shmem_npes() -> int:
    return _pe()[1]


def shmem_barrier_on_stream(stream=None):
    calls.append("shmem_barrier_on_stream")
    _pe()
    _state["barriers"] += 1
    dist.barrier(group=_state["group"])


SHMEM = (shmem_get_unique_id, shmem_init_attr, shmem_mype, shmem_npes, shmem_barrier_on_stream)


def _pe() -> tuple[int, int]:
    if _state["pe"] is None:
        raise SystemExit("shmem used before it was initialised: the real one ends the process")
    return _state["pe"]


# --- mori.ccl ---------------------------------------------------------------------------------------------------------


class _Handle:
    """Buffers, rules and the two ways to run an operation."""

    def __init__(self, my_pe, npes, input_size, output_size, transit, element_size=4) -> None:
        if os.environ.get("MORI_ENABLE_SDMA", "").strip().lower() in ("", "0", "false", "no", "off"):
            raise RuntimeError(f"{type(self).__name__} requires MORI_ENABLE_SDMA=1")
        assert (my_pe, npes) == _pe(), "a handle addresses the processing elements of shmem"
        assert npes <= MAX_RANKS, "one wavefront for each peer, and eight of them"
        if input_size is None or output_size is None:
            transit = DEFAULT_TRANSIT if transit is None else transit
            input_size = output_size = transit // 2
        self.my_pe, self.npes = my_pe, npes
        self._input_size = input_size
        self._transit = torch.full((output_size,), POISON, dtype=torch.uint8)
        self._started: tuple[torch.Tensor, int] | None = None
        self._barrier = -1

    def _operate(self, input: torch.Tensor, output: torch.Tensor, sent: int, received: int) -> torch.Tensor:
        """Check, then move bytes into the transit buffer; returns the part that was written."""
        calls.append(type(self).__name__)
        if self._started is not None:
            raise RuntimeError("Another async operation is already in progress")
        assert self._barrier < _state["barriers"], "no barrier: a peer may still read what this overwrites"
        self._barrier = _state["barriers"]
        for tensor, need in ((input, sent), (output, received)):
            assert tensor.is_contiguous() and tensor.data_ptr() % 4 == 0
            assert tensor.nbytes >= need, f"reads or writes {need} bytes of a tensor of {tensor.nbytes}"
        assert sent > 0 and received <= self._transit.numel(), "larger than the transit buffer, which nobody checks"
        self._transit.fill_(POISON)  # whoever kept a view of an earlier result sees it
        moved = self._transit[:received]
        self._move(input.view(-1).view(torch.uint8)[:sent], moved)
        return moved

    def _move(self, sent: torch.Tensor, moved: torch.Tensor) -> None:
        raise NotImplementedError

    def _finish(self, output: torch.Tensor, moved: torch.Tensor) -> None:
        output.view(-1).view(torch.uint8)[: moved.numel()].copy_(moved)

    def _start(self, output: torch.Tensor, moved: torch.Tensor) -> bool:
        self._started = (output, moved)
        return True

    def _wait(self) -> float:
        if self._started is None:
            raise RuntimeError("No async operation in progress")
        (output, moved), self._started = self._started, None
        self._finish(output, moved)
        return 0.0


class All2allSdma(_Handle):
    def __init__(
        self,
        my_pe: int,
        npes: int,
        input_buffer_size: int | None = None,
        output_buffer_size: int | None = None,
        transit_buffer_size: int | None = None,
        copy_output_to_user: bool = True,
    ):
        super().__init__(my_pe, npes, input_buffer_size, output_buffer_size, transit_buffer_size)

    def _bytes(self, input: torch.Tensor, count: int) -> tuple[int, int]:
        assert input.itemsize == 4, "counts words of four bytes, whatever the dtype"
        return count * 4 * self.npes, count * 4 * self.npes

    def _move(self, sent: torch.Tensor, moved: torch.Tensor) -> None:
        dist.all_to_all_single(moved, sent, group=_state["group"])

    def __call__(self, input_data, output_data, count: int, stream=None) -> float:
        self._finish(output_data, self._operate(input_data, output_data, *self._bytes(input_data, count)))
        return 0.0

    def start_async(self, input_data, output_data, count: int, stream=None) -> bool:
        moved = self._operate(input_data, output_data, *self._bytes(input_data, count))
        return self._start(output_data, moved)

    def wait_async(self, stream=None) -> float:
        return self._wait()


class AllgatherSdma(_Handle):
    def __init__(
        self,
        my_pe: int,
        npes: int,
        input_buffer_size: int | None = None,
        output_buffer_size: int | None = None,
        transit_buffer_size: int | None = None,
        copy_output_to_user: bool = True,
    ):
        super().__init__(my_pe, npes, input_buffer_size, output_buffer_size, transit_buffer_size)

    def _bytes(self, input: torch.Tensor, count: int) -> tuple[int, int]:
        nbytes = count * input.element_size()
        assert nbytes % 4 == 0, "the shards of odd sizes land at shifted places, and overrun the output"
        return nbytes, nbytes * self.npes

    def _move(self, sent: torch.Tensor, moved: torch.Tensor) -> None:
        dist.all_gather(list(moved.view(self.npes, -1).unbind()), sent, group=_state["group"])

    def __call__(self, input_data, output_data, count: int, stream=None, capturing: bool = False) -> bool:
        self._finish(output_data, self._operate(input_data, output_data, *self._bytes(input_data, count)))
        return True

    def start_async(self, input_data, output_data, count: int, stream=None) -> bool:
        moved = self._operate(input_data, output_data, *self._bytes(input_data, count))
        return self._start(output_data, moved)

    def wait_async(self, stream=None, capturing: bool = False) -> float:
        return self._wait()

    def get_output_transit_buffer(self, dtype=None, device=None):
        return self._transit if dtype is None else self._transit.view(dtype)


class AllreduceSdma(_Handle):
    def __init__(
        self,
        my_pe: int,
        npes: int,
        input_buffer_size: int | None = None,
        output_buffer_size: int | None = None,
        transit_buffer_size: int | None = None,
        copy_output_to_user: bool = True,
        dtype: torch.dtype = torch.uint32,
        mode: str = "eager",
    ):
        if dtype not in (torch.uint32, torch.int32, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"Unsupported dtype {dtype}.")
        super().__init__(my_pe, npes, input_buffer_size, output_buffer_size, transit_buffer_size)
        self.dtype = dtype

    def _move(self, sent: torch.Tensor, moved: torch.Tensor) -> None:
        parts = [torch.empty_like(sent) for _ in range(self.npes)]
        dist.all_gather(parts, sent, group=_state["group"])
        wide = torch.int32 if self.dtype == torch.int32 else torch.float32
        total = sum(part.view(self.dtype).to(wide) for part in parts)
        moved.copy_(total.to(self.dtype).view(torch.uint8))

    def __call__(self, input_data, output_data, count: int, stream=None) -> bool:
        assert input_data.dtype == output_data.dtype == self.dtype
        if count == 0 or count % (self.npes * (16 // input_data.itemsize)):
            raise ValueError("AllReduce count must be divisible by npes * pack_size")
        nbytes = count * input_data.itemsize
        if nbytes > self._input_size:
            raise RuntimeError("AllReduce input exceeds fixed reduce scratch capacity")
        self._finish(output_data, self._operate(input_data, output_data, nbytes, nbytes))
        return True
