"""Collectives over the copy engines (SDMA) of AMD GPUs, through MORI-CCL.

What MORI's `mori.ccl` (1.2.4) leaves to its caller, and is done here:

* missing hardware ends the process, so it is looked for before MORI is imported;
* all data moves in words of four bytes: other sizes and alignments go through padded scratch;
* nothing checks a transfer against the size of the buffers in between: longer ones go in pieces;
* a rank that is ahead overwrites buffers that a slower one still reads, and an all-to-all stops waiting for a rank that
  is late: every operation starts with a barrier on the stream;
* results are always copied out of those buffers, which the next operation overwrites;
* one operation is in flight at a time: the next one finishes it first;
* there is one set of ranks in a process, that of the first group: other groups are told so.

A call blocks the host until the data has landed; only `async_op` overlaps with computing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from lumen_core.comm.collectives import C10dCollectives, GroupCollectives, Label, LaterWork, ReduceOp, check_reducible
from lumen_core.comm.meter import METER, ByteMeter

MAX_RANKS = 8  # the all-gather kernel has one wavefront for each peer, and eight of them
WORD = 4  # bytes
_PACK = 16  # bytes that the all-reduce handles at once, on each rank
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ALL_REDUCE_DTYPES = (*_FLOATS, torch.int32)
_TRANSIT_BYTES = 256 << 20
_KFD = Path("/dev/kfd")
_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")

# Global ranks of the one set of processing elements that MORI has in a process.
_pes: tuple[int, ...] | None = None


# --- can it be used? --------------------------------------------------------------------------------------------------


def unusable(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why `MoriCollectives` cannot serve this group, or None if it can; the answer is the same on every rank.

    On a ROCm build all ranks of the group must call. Nothing of MORI runs before the hardware has been found.
    """
    reason, nodes = survey(group, device)
    if reason is None and len(set(nodes)) > 1:
        return f"the group spans {len(set(nodes))} nodes"
    return reason


def survey(group: dist.ProcessGroup, device: torch.device) -> tuple[str | None, list[str]]:
    """Why MORI cannot be used inside each node of the group, or None, and the node of each rank; see `unusable`."""
    # These are alike on all ranks of a job, so nobody needs to be asked.
    if torch.version.hip is None:
        return "this torch is not a ROCm build", []
    if device.type != "cuda":
        return f"tensors on {device.type}, not on a GPU", []
    answers: list[Any] = [None] * group.size()
    dist.all_gather_object(answers, (local_reason(), _node(), _pes), group=group)
    nodes = [node for _, node, _ in answers]
    for rank, (reason, _, _) in enumerate(answers):
        if reason is not None:
            return f"{reason} (rank {rank} of the group)", nodes
    members: dict[str, list[int]] = {}
    for rank, node in zip(dist.get_process_group_ranks(group), nodes, strict=True):
        members.setdefault(node, []).append(rank)
    sizes = {len(ranks) for ranks in members.values()}
    if max(sizes) > MAX_RANKS:
        return f"{max(sizes)} ranks on one node, and it serves {MAX_RANKS}", nodes
    if len(sizes) > 1 or nodes != [node for node in members for _ in members[node]]:
        return "the group's ranks are not in order of nodes, equally many on each", nodes
    for _, node, pes in answers:
        if pes is not None and pes != tuple(members[node]):
            return f"it already serves the ranks {list(pes)}, and a process has one such set", nodes
    return None, nodes


def local_reason() -> str | None:
    """Why this process cannot use MORI-CCL, or None. The package is imported last, once the hardware is known."""
    if os.environ.get("MORI_ENABLE_SDMA", "").strip().lower() not in ("1", "true", "yes", "on"):
        return "MORI_ENABLE_SDMA=1 is not set"
    return _hardware_reason() or _package_reason()


def _hardware_reason() -> str | None:
    if not os.access(_KFD, os.R_OK | os.W_OK):
        return f"{_KFD} is absent or not accessible"
    gpus = 0
    for file in sorted(_TOPOLOGY.glob("*/properties")):
        try:
            node = {key: int(value) for key, value in (line.split() for line in file.read_text().splitlines())}
        except (OSError, ValueError):  # a GPU that this container may not see
            continue
        if not node.get("simd_count"):  # a CPU
            continue
        gpus += 1
        if not node.get("num_sdma_engines", 0) + node.get("num_sdma_xgmi_engines", 0):
            return f"GPU node {file.parent.name} has no SDMA engines"
    return None if gpus else f"no GPU in {_TOPOLOGY}"


def _package_reason() -> str | None:
    try:
        spec = importlib.util.find_spec("mori")
        if spec is None:
            return "the package amd-mori is not installed"
        if importlib.util.find_spec("mori.ccl") is None:
            return "amd-mori is too old: it has no mori.ccl (1.2.4 has)"
        ccl, shmem = importlib.import_module("mori.ccl"), importlib.import_module("mori.shmem")
        for module, names in ((ccl, _CCL_NAMES), (shmem, _SHMEM_NAMES)):
            for name in names:
                getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:  # OSError: a library that its .so needs is absent
        return f"amd-mori cannot be imported: {error}"
    return None


_CCL_NAMES = ("AllgatherSdma", "All2allSdma", "AllreduceSdma")
_SHMEM_NAMES = (
    "MORI_SHMEM_INIT_WITH_UNIQUEID",
    "shmem_get_unique_id",
    "shmem_init_attr",
    "shmem_mype",
    "shmem_npes",
    "shmem_barrier_on_stream",
)


def _node() -> str:
    """A name of this machine: hosts of one image can share a host name, containers of one host a boot id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


# --- symmetric memory -------------------------------------------------------------------------------------------------


def ensure_shmem(group: dist.ProcessGroup, device: torch.device) -> ModuleType:
    """MORI's symmetric memory, initialised for the ranks of `group`; all of them must call. Returns `mori.shmem`.

    Raises:
        RuntimeError: it serves another set of ranks already (a second initialisation is silently ignored by MORI), or
            the initialisation failed.
    """
    global _pes
    ranks = tuple(dist.get_process_group_ranks(group))
    shmem = importlib.import_module("mori.shmem")
    if _pes is None:
        message: list[Any] = [None]
        if group.rank() == 0:
            try:
                message = [shmem.shmem_get_unique_id()]
            except Exception as error:  # the others wait for an answer
                message = [f"rank 0 got no unique id: {error}"]
        dist.broadcast_object_list(message, group=group, group_src=0)
        if isinstance(message[0], str):
            raise RuntimeError(f"MORI shmem: {message[0]}")
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            flag = shmem.MORI_SHMEM_INIT_WITH_UNIQUEID
            status = shmem.shmem_init_attr(flag, group.rank(), group.size(), message[0])
        if status:
            raise RuntimeError(f"MORI shmem: initialisation returned {status}")
        _pes = ranks
    found = (shmem.shmem_npes(), shmem.shmem_mype())
    if _pes != ranks or found != (group.size(), group.rank()):
        raise RuntimeError(
            f"MORI shmem serves {found[0]} ranks (here {found[1]}), not this group of {group.size()} "
            f"(here {group.rank()}): a process has one such set, of whoever initialised it first"
        )
    return shmem


# --- collectives ------------------------------------------------------------------------------------------------------


class MoriCollectives(GroupCollectives):
    """`Collectives` of one node's ranks over `mori.ccl`. Ask `unusable` first: missing hardware ends the process.

    Gathers and all-to-alls take any dtype. Reduce-scatters of floats (SUM, AVG) are an all-to-all and a sum in fp32,
    in rank order. An all-reduce is MORI's for SUM, a gather for MAX. The rest goes to `fallback`.
    """

    name = "mori"

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        meter: ByteMeter = METER,
        fallback: C10dCollectives | None = None,
        *,
        transit_bytes: int = _TRANSIT_BYTES,
    ) -> None:
        """All ranks of the group must call.

        Args:
            fallback: for what MORI does not do; by default c10d over the same group and meter.
            transit_bytes: size of each buffer of MORI's, of which there are two for each kind of operation in use,
                out of its heap (MORI_SHMEM_HEAP_SIZE). Larger transfers take several rounds.

        Raises:
            RuntimeError: more than 8 ranks, or MORI serves another group already.
            ValueError: `transit_bytes` is too small.
        """
        super().__init__(group, meter)
        if self.size > MAX_RANKS:
            raise RuntimeError(f"MORI-CCL serves {MAX_RANKS} ranks, this group has {self.size}")
        # What a round moves at most, for each rank.
        self._piece = transit_bytes // self.size // _PACK * _PACK
        if not self._piece:
            raise ValueError(f"transit_bytes={transit_bytes}: {self.size} ranks need at least {self.size * _PACK}")
        self.device = device
        self.fallback = fallback or C10dCollectives(group, meter)
        self._shmem = ensure_shmem(group, device)
        self._ccl = importlib.import_module("mori.ccl")
        self._handles: dict[Any, Any] = {}
        self._in_flight: LaterWork | None = None
        self._buffers: tuple[torch.Tensor, ...] | None = None

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, label: Label = None
    ) -> dist.Work | None:
        """See `Collectives`."""
        out, part = self._many_to_one(output, input)
        self._record("all_gather", label, out.nbytes)
        return self._exchange("AllgatherSdma", out, part, async_op)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, label: Label = None
    ) -> dist.Work | None:
        """See `Collectives`."""
        out, sent = self._equal_parts(output, input)
        self._record("all_to_all", label, sent.nbytes)
        return self._exchange("All2allSdma", out, sent, async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        *,
        async_op: bool = False,
        label: Label = None,
    ) -> dist.Work | None:
        """See `Collectives`.

        Raises:
            TypeError: the tensor holds codes.
        """
        check_reducible(input)
        average = op == dist.ReduceOp.AVG
        if input.dtype not in _FLOATS or not (average or op == dist.ReduceOp.SUM):
            return self.fallback.reduce_scatter(output, input, op, async_op=async_op, label=label)
        whole, out = self._many_to_one(input, output)
        self._record("reduce_scatter", label, whole.nbytes)
        parts = torch.empty_like(whole)

        def finish() -> None:
            total = torch.zeros_like(out, dtype=torch.float32)
            for part in parts.view(self.size, out.numel()):
                total += part
            out.copy_(total.div_(self.size) if average else total)

        return self._exchange("All2allSdma", parts, whole, async_op, finish)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, *, async_op: bool = False, label: Label = None
    ) -> dist.Work | None:
        """See `Collectives`.

        Raises:
            TypeError: the tensor holds codes.
        """
        check_reducible(tensor)
        is_sum, is_max = op == dist.ReduceOp.SUM, op == dist.ReduceOp.MAX
        supported = tensor.dtype in _ALL_REDUCE_DTYPES and tensor.is_contiguous()
        if not supported or not (is_sum or is_max):
            return self.fallback.all_reduce(tensor, op, async_op=async_op, label=label)
        self._record("all_reduce", label, tensor.nbytes)
        flat = tensor.view(-1)
        if is_max:
            rows = flat.new_empty(self.size, flat.numel())
            return self._exchange("AllgatherSdma", rows.view(-1), flat, async_op, lambda: flat.copy_(rows.amax(dim=0)))
        if flat.numel():
            self._sum(flat)
        return self._done(lambda: None, async_op)

    def _sum(self, flat: torch.Tensor) -> None:
        # In shares of whole packs, one of each rank, or MORI refuses.
        share = self.size * _PACK // flat.itemsize
        for part in flat.split(self._piece * self.size // flat.itemsize):
            count = -(-part.numel() // share) * share
            sent = flat.new_zeros(count)
            sent[: part.numel()] = part
            got = torch.empty_like(sent)
            handle = self._handle("AllreduceSdma", dtype=flat.dtype)
            self._run(handle, sent, got, count)
            part.copy_(got[: part.numel()])

    def _exchange(
        self,
        kind: str,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool,
        then: Callable[[], Any] = lambda: None,
    ) -> dist.Work | None:
        """Move bytes with the class called `kind`, then run `then`.

        Args:
            output: of one row for each rank.
            input: the row that all ranks get, or one for each of them.
        """
        row = output.nbytes // self.size
        if not row:
            return self._done(then, async_op)
        handle = self._handle(kind)
        out = output.view(torch.uint8).view(self.size, row)
        sent = input.view(torch.uint8).view(-1, row)
        aligned = row % WORD == 0 and out.data_ptr() % WORD == 0 and sent.data_ptr() % WORD == 0
        if aligned and row <= self._piece:
            # As words: the two classes count differently, one elements of the tensor, the other words.
            words = (sent.view(-1).view(torch.int32), out.view(-1).view(torch.int32), row // WORD)
            if not async_op:
                self._run(handle, *words)
                return self._done(then, async_op)
            return self._start(handle, *words, then)
        for piece in range(0, row, self._piece):
            length = min(self._piece, row - piece)
            count = -(-length // WORD)
            padded = sent.new_zeros(sent.shape[0], count * WORD)
            padded[:, :length] = sent[:, piece : piece + length]
            got = out.new_empty(self.size, count * WORD)
            self._run(handle, padded.view(-1).view(torch.int32), got.view(-1).view(torch.int32), count)
            out[:, piece : piece + length] = got[:, :length]
        return self._done(then, async_op)

    def _run(self, handle: Any, input: torch.Tensor, output: torch.Tensor, count: int) -> None:
        stream = self._begin()
        _check(handle(input, output, count, stream))

    def _start(
        self, handle: Any, input: torch.Tensor, output: torch.Tensor, count: int, then: Callable[[], Any]
    ) -> LaterWork:
        stream = self._begin()
        _check(handle.start_async(input, output, count, stream))

        def finish() -> None:
            self._in_flight = self._buffers = None
            _check(handle.wait_async(stream))
            then()

        self._buffers = (input, output)  # read and written until then
        self._in_flight = LaterWork(finish, self.device)
        return self._in_flight

    def _begin(self) -> Any:
        """Finish what is in flight, and wait until every rank is here; returns the current stream."""
        if self._in_flight is not None:
            self._in_flight.finish()
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self._shmem.shmem_barrier_on_stream(stream)
        return stream

    def _done(self, then: Callable[[], Any], async_op: bool) -> LaterWork | None:
        work = LaterWork(then, self.device)
        work.finish()
        return work if async_op else None

    def _handle(self, kind: str, **options: Any) -> Any:
        key = (kind, *options.values())
        if key not in self._handles:
            size = self._piece * self.size
            make = getattr(self._ccl, kind)
            self._handles[key] = make(self.rank, self.size, input_buffer_size=size, output_buffer_size=size, **options)
        return self._handles[key]


def _check(answer: object) -> None:
    # True, or seconds; False or -1 for a failure.
    if answer is False or (isinstance(answer, float) and answer < 0):
        raise RuntimeError("a MORI-CCL operation failed; its message is on stderr")
