"""Seeded order that is the same on every machine, numpy version and number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(values: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood, 2014) on uint64 [n]: a bijection that looks
    random.

    Used instead of ``numpy.random``, whose generators may give another stream after an upgrade: a resumed run
    must not see another order.
    """
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def derive_seed(*parts: int) -> int:
    """One 64-bit seed from several integers; depends on their order."""
    state = 0
    for part in parts:
        state = int(mix64(np.array([(state + _GOLDEN + part) & _MASK], dtype=np.uint64))[0])
    return state


def permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [length]: the order of epoch ``epoch``, a permutation of ``range(length)``."""
    counter = np.arange(length, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(derive_seed(seed, epoch))
    return np.argsort(mix64(counter), kind="stable")


class SampleOrder:
    """The endless sequence of sample indices: epoch after epoch, each a permutation of its own.

    Its whole state is the epoch and the samples of it already taken, so that it does not depend on batch
    size, number of ranks or accumulation.
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError(f"an order needs at least one sample, got {length}")
        self.length = length
        self.seed = seed
        self.epoch = 0
        self.samples = 0
        self._cached: tuple[int, np.ndarray] | None = None

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, permutation(self.length, self.seed, epoch))
        return self._cached[1]

    def take(self, count: int) -> np.ndarray:
        """int64 [count]: the next ``count`` sample indices, going on into the next epochs when one ends."""
        parts = []
        while count:
            part = self._epoch_order(self.epoch)[self.samples : self.samples + count]
            parts.append(part)
            count -= len(part)
            self.samples += len(part)
            if self.samples == self.length:
                self.epoch, self.samples = self.epoch + 1, 0
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def state_dict(self) -> dict[str, int]:
        """``{"epoch": ..., "samples": ...}``: complete epochs, and samples taken of the current one."""
        return {"epoch": self.epoch, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the sample after those of ``state``."""
        try:
            epoch, samples = int(state["epoch"]), int(state["samples"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"data state needs integers 'epoch' and 'samples', got {state!r}") from error
        if epoch < 0 or not 0 <= samples < self.length:
            raise ValueError(
                f"data state epoch={epoch}, samples={samples} does not fit {self.length} samples an epoch: "
                "the data, seq_length, pack or the split changed since the checkpoint"
            )
        self.epoch, self.samples = epoch, samples
