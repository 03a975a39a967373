"""Batches: what one rank feeds its model, for training and for validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from launch.data.order import SampleOrder
from launch.data.samples import IGNORE, Sample, Samples, filler


@dataclass
class Batch:
    """One micro-batch; B rows of S tokens.

    Attributes:
        input_ids: int64 [B, S].
        labels: int64 [B, S], shifted already: ``labels[b, t]`` is the target of ``input_ids[b, t]``; -100 is
            ignored.
        position_ids: int64 [B, S], restarting at each document; only with ``isolate_documents``.
        document_ids: int64 [B, S], -1 on padding; only with ``isolate_documents``. See `block_diagonal_mask`.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[Sample]) -> Batch:
        def stack(name: str) -> torch.Tensor | None:
            values = [getattr(row, name) for row in rows]
            return None if values[0] is None else torch.from_numpy(np.stack(values))

        return cls(*(stack(name) for name in ("input_ids", "labels", "position_ids", "document_ids")))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """A copy on ``device``."""
        tensors = (self.input_ids, self.labels, self.position_ids, self.document_ids)
        return Batch(*(None if t is None else t.to(device, non_blocking=non_blocking) for t in tensors))

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which a copy to the device can overlap with work."""
        tensors = (self.input_ids, self.labels, self.position_ids, self.document_ids)
        return Batch(*(None if t is None else t.pin_memory() for t in tensors))


def supervised_tokens(batches: Batch | Iterable[Batch]) -> int:
    """Number of labels that count: what a sum of token losses is divided by. May be 0."""
    batches = [batches] if isinstance(batches, Batch) else batches
    return sum(int((batch.labels != IGNORE).sum()) for batch in batches)


class TrainStream:
    """This rank's part of an endless sequence of global batches.

    Global batch ``i`` is samples ``[i * G, (i + 1) * G)`` of the order, whatever the number of ranks and the
    micro-batch size: those only say who computes which of them. A global batch may span two epochs.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        seed: int,
        rank: int,
        world_size: int,
        micro_batch_size: int,
        global_batch_size: int,
    ) -> None:
        self.samples = samples
        self.order = SampleOrder(len(samples), seed)
        self.rank, self.world_size = rank, world_size
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.accumulation = global_batch_size // (micro_batch_size * world_size)

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self.samples)

    def next_global_batch(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch: always ``accumulation`` of them."""
        indices = self.order.take(self.global_batch_size)
        indices = indices.reshape(self.accumulation, self.world_size, self.micro_batch_size)
        return [Batch.of([self.samples[int(i)] for i in micro]) for micro in indices[:, self.rank]]

    def __iter__(self) -> Iterator[list[Batch]]:
        while True:
            yield self.next_global_batch()

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.order.epoch

    @property
    def samples_consumed(self) -> int:
        """Samples taken since the very beginning, over all ranks and epochs."""
        return self.order.epoch * len(self.samples) + self.order.samples

    def state_dict(self) -> dict[str, int]:
        """``{"epoch", "samples"}``, the same on every rank; see `SampleOrder`."""
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the very next sample, also with other ranks, micro-batch or global batch size."""
        self.order.load_state_dict(state)


class ValidationSet:
    """The held-out samples, always the same and in the same order.

    Ranks take disjoint samples, and all of them get the same number of batches of the same shape: where
    samples run out, rows are filler with every label ignored. Weight losses by `supervised_tokens`, summed
    over ranks.
    """

    def __init__(self, samples: Samples | None, *, rank: int, world_size: int, micro_batch_size: int) -> None:
        self.samples = samples
        self.rank, self.world_size, self.micro_batch_size = rank, world_size, micro_batch_size

    def __len__(self) -> int:
        """Batches that every rank gets without a limit; 0 when there is no validation data."""
        count = 0 if self.samples is None else len(self.samples)
        return -(-count // (self.micro_batch_size * self.world_size))

    def batches(self, max_batches: int | None = None) -> Iterator[Batch]:
        """This rank's batches, at most ``max_batches``.

        A limit takes samples spread evenly over the whole set rather than its beginning. How many samples
        that is depends on the number of ranks and the micro-batch size.
        """
        if max_batches is not None and max_batches < 0:
            raise ValueError(f"max_batches must be at least 0 or None, got {max_batches}")
        if self.samples is None:
            return
        steps = len(self) if max_batches is None else min(max_batches, len(self))
        slots = steps * self.micro_batch_size * self.world_size
        count = min(slots, len(self.samples))
        chosen = np.arange(count) * len(self.samples) // max(count, 1)
        empty = filler(self.samples.seq_length, self.samples.pad_id, self.samples.isolate)
        for step in range(steps):
            first = (step * self.world_size + self.rank) * self.micro_batch_size
            places = range(first, first + self.micro_batch_size)
            yield Batch.of([self.samples[int(chosen[p])] if p < count else empty for p in places])
