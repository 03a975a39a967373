"""Collectives of one process group, behind one interface whatever carries the bytes.

One-byte formats (every float8, E8M0, packed FP4, uint8) travel as `uint8`: gloo refuses all float8 types and NCCL some
of them. They are never reduced: a sum of codes means nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from lumen_core.comm.meter import METER, ByteMeter

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType
Label = str | Mapping[str, int] | None
Finish = Callable[[], None]

CHOICES = ("auto", "c10d", "mori")


class Collectives(Protocol):
    """The collectives of one group.

    Tensors are contiguous and of equal size on every rank; their shape is ignored. With `async_op` a call returns a
    `dist.Work`, after whose `wait()` the current stream sees the result; otherwise None, and the current stream sees
    it. `label` names the call in the meter, or says what bytes of it belong to whom.
    """

    name: str
    group: dist.ProcessGroup
    meter: ByteMeter

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, label: Label = None
    ) -> dist.Work | None:
        """`output` `[world * n]` becomes the `input` `[n]` of every rank, in rank order."""
        ...

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        *,
        async_op: bool = False,
        label: Label = None,
    ) -> dist.Work | None:
        """`output` `[n]` becomes this rank's n values of the reduction of every `input` `[world * n]`."""
        ...

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, *, async_op: bool = False, label: Label = None
    ) -> dist.Work | None:
        """`tensor` becomes its reduction over all ranks. MAX and MIN of floats are NaN wherever one rank has NaN."""
        ...

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, label: Label = None
    ) -> dist.Work | None:
        """Part r of `output` becomes the part of rank r's `input` that is for this rank; all parts are equal."""
        ...


class LaterWork(dist.Work):
    """A `dist.Work` with something left to do when it is waited for.

    `finish` runs once, on the stream that was current at construction, where its scratch tensors were allocated too.
    """

    def __init__(self, finish: Finish, device: torch.device) -> None:
        super().__init__()
        self._finish: Finish | None = finish
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None

    def finish(self) -> None:
        """Do what is left, whoever asks first."""
        finish, self._finish = self._finish, None
        if finish is None:
            return
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            finish()
        if self._stream is not None:
            self._event = self._stream.record_event()

    def wait(self, timeout: object = None) -> bool:
        """Finish; what is next on the current stream sees the result. `timeout` is that of the group."""
        self.finish()
        if self._event is not None:
            torch.cuda.current_stream(self._event.device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return self._finish is None


class GroupCollectives:
    """What all implementations share: checks of arguments, and the meter."""

    name = ""

    def __init__(self, group: dist.ProcessGroup, meter: ByteMeter = METER) -> None:
        self.group = group
        self.meter = meter
        self.size = group.size()
        self.rank = group.rank()

    def _record(self, kind: str, label: Label, nbytes: int) -> None:
        shares = label if isinstance(label, Mapping) else {label or "": nbytes}
        for name, share in shares.items():
            self.meter.record(kind, name, share if self.size > 1 else 0)

    def _many_to_one(self, many: torch.Tensor, one: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both flat, bytes as uint8.

        Raises:
            ValueError: sizes or dtypes do not fit the group, or a tensor is not contiguous.
        """
        if many.numel() != self.size * one.numel() or many.dtype != one.dtype:
            raise ValueError(
                f"{self.size} ranks: {many.numel()} elements of {many.dtype} do not go with {one.numel()} of "
                f"{one.dtype} on each rank"
            )
        return flat_bytes(many), flat_bytes(one)

    def _equal_parts(self, output: torch.Tensor, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if output.numel() != input.numel() or output.dtype != input.dtype or input.numel() % self.size:
            raise ValueError(
                f"all_to_all over {self.size} ranks: input has {input.numel()} elements of {input.dtype}, output "
                f"{output.numel()} of {output.dtype}; they must be the same, in {self.size} equal parts"
            )
        return flat_bytes(output), flat_bytes(input)


class C10dCollectives(GroupCollectives):
    """torch.distributed: RCCL, NCCL or gloo."""

    name = "c10d"

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, label: Label = None
    ) -> dist.Work | None:
        """See `Collectives`."""
        out, part = self._many_to_one(output, input)
        self._record("all_gather", label, out.nbytes)
        # Newer torch renamed it and warns about the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(out, part, group=self.group, async_op=async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        *,
        async_op: bool = False,
        label: Label = None,
    ) -> dist.Work | None:
        """See `Collectives`. Every `op` goes to the backend as it is.

        Raises:
            TypeError: the tensor holds codes.
        """
        check_reducible(input)
        whole, out = self._many_to_one(input, output)
        self._record("reduce_scatter", label, whole.nbytes)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(out, whole, op=op, group=self.group, async_op=async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, *, async_op: bool = False, label: Label = None
    ) -> dist.Work | None:
        """See `Collectives`.

        Raises:
            TypeError: the tensor holds codes.
        """
        check_reducible(tensor)
        self._record("all_reduce", label, tensor.nbytes)
        is_max, is_min = op == dist.ReduceOp.MAX, op == dist.ReduceOp.MIN
        if not tensor.is_floating_point() or not (is_max or is_min):
            return dist.all_reduce(tensor, op=op, group=self.group, async_op=async_op)
        # With a NaN the maximum of floats depends on the order of ranks; that of integers is the same for all.
        keys = _to_keys(tensor, nan_is_largest=is_max)
        work = dist.all_reduce(keys, op=op, group=self.group, async_op=async_op)

        def finish() -> None:
            if work is not None:
                work.wait()
            tensor.copy_(_from_keys(keys))

        return finished_later(finish, tensor.device, async_op)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, label: Label = None
    ) -> dist.Work | None:
        """See `Collectives`."""
        out, sent = self._equal_parts(output, input)
        self._record("all_to_all", label, sent.nbytes)
        return dist.all_to_all_single(out, sent, group=self.group, async_op=async_op)


def finished_later(finish: Finish, device: torch.device, async_op: bool) -> LaterWork | None:
    """Run `finish` now, or hand it out as a work."""
    if async_op:
        return LaterWork(finish, device)
    finish()
    return None


def is_codes(dtype: torch.dtype) -> bool:
    """Whether a dtype holds codes of one byte, which travel as uint8 and are never reduced."""
    return dtype.itemsize == 1 and dtype not in (torch.int8, torch.bool)


def check_reducible(tensor: torch.Tensor) -> None:
    """Refuse to reduce codes.

    Raises:
        TypeError: the tensor's dtype is a float8, a packed FP4 or uint8.
    """
    if is_codes(tensor.dtype):
        raise TypeError(f"{tensor.dtype} holds codes: dequantize before a reduction")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A one-dimensional view; codes become uint8.

    Raises:
        ValueError: the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"collectives take contiguous tensors, not strides {tensor.stride()} of {list(tensor.shape)}")
    tensor = tensor.view(-1)
    return tensor.view(torch.uint8) if is_codes(tensor.dtype) else tensor


def _to_keys(x: torch.Tensor, nan_is_largest: bool) -> torch.Tensor:
    """Integers in the order of the floats `x`; NaN is the largest or the smallest."""
    x = x if x.dtype == torch.float64 else x.to(torch.float32)
    bits = x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    limit = torch.iinfo(bits.dtype)
    keys = torch.where(bits < 0, bits ^ limit.max, bits)  # negative floats grow with their magnitude
    return torch.where(torch.isnan(x), limit.max if nan_is_largest else limit.min, keys)


def _from_keys(keys: torch.Tensor) -> torch.Tensor:
    bits = torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys)
    return bits.view(torch.float64 if keys.dtype == torch.int64 else torch.float32)


def collectives_for(
    group: dist.ProcessGroup | None = None,
    choice: str = "auto",
    device: torch.device | str | None = None,
    meter: ByteMeter = METER,
) -> tuple[Collectives, str]:
    """The collectives to use for a group, and why these.

    On a ROCm build, `auto` and `mori` let the ranks of the group talk to each other, to come to the same choice: all
    of them must call.

    Args:
        group: None is all ranks.
        choice: `auto` is MORI where it can be used, otherwise c10d.
        device: where the tensors will be; None is the current GPU, or the CPU without one.

    Raises:
        ValueError: unknown choice.
        RuntimeError: `mori` was asked for and cannot be used; the message says why.
    """
    if choice not in CHOICES:
        raise ValueError(f"collectives={choice!r}: must be one of {', '.join(CHOICES)}")
    group = dist.group.WORLD if group is None else group
    c10d = C10dCollectives(group, meter)
    if choice == "c10d":
        return c10d, "c10d was asked for"
    if group.size() == 1:
        return c10d, "c10d: one rank, nothing is sent"
    from lumen_core.comm import hierarchical, mori

    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    reason, nodes = mori.survey(group, device)
    if reason is None:
        if len(set(nodes)) > 1:
            return hierarchical.mori_inside_nodes(group, device, meter, nodes), "mori inside nodes, c10d between them"
        return mori.MoriCollectives(group, device, meter, c10d), "mori"
    if choice == "mori":
        raise RuntimeError(f"MORI collectives cannot be used: {reason}")
    return c10d, f"c10d, because MORI cannot be used: {reason}"
