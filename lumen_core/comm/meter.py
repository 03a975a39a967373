"""How many bytes collectives moved, by kind and by the name the caller gave them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Traffic:
    """A reading of a meter.

    Attributes:
        bytes: of each (kind, name).
        counts: number of calls of each (kind, name).
    """

    bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def total(self, kind: str | None = None, name: str | None = None) -> int:
        """Bytes of one kind, of one name, or (None) of all."""
        return _total(self.bytes, kind, name)

    def calls(self, kind: str | None = None, name: str | None = None) -> int:
        """Number of calls of one kind, of one name, or (None) of all."""
        return _total(self.counts, kind, name)

    def by_kind(self) -> dict[str, int]:
        """Bytes of every kind that occurred."""
        return _grouped(self.bytes, 0)

    def by_name(self) -> dict[str, int]:
        """Bytes of every name that occurred; calls without a label are under ``""``."""
        return _grouped(self.bytes, 1)


class ByteMeter:
    """Counts the bytes of collectives.

    A gather counts its output over all ranks, a reduce-scatter and an all-to-all their whole input, an all-reduce its
    tensor; at world size 1 a call counts zero bytes. The rule is one for all transports, so that numbers compare.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # autograd runs backward hooks in threads of its own
        self._bytes: dict[tuple[str, str], int] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def record(self, kind: str, name: str, bytes: int) -> None:
        """Add one call.

        Raises:
            ValueError: unknown kind.
        """
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: must be one of {', '.join(KINDS)}")
        with self._lock:
            self._bytes[kind, name] = self._bytes.get((kind, name), 0) + bytes
            self._counts[kind, name] = self._counts.get((kind, name), 0) + 1

    def snapshot(self) -> Traffic:
        """The reading so far; later calls do not change it."""
        with self._lock:
            return Traffic(dict(self._bytes), dict(self._counts))

    def since(self, snapshot: Traffic) -> Traffic:
        """What was added after `snapshot`, which must not be older than the last `reset`."""
        now = self.snapshot()
        return Traffic(_difference(now.bytes, snapshot.bytes), _difference(now.counts, snapshot.counts))

    def reset(self) -> None:
        """Start from zero."""
        with self._lock:
            self._bytes.clear()
            self._counts.clear()

    def total(self, kind: str | None = None, name: str | None = None) -> int:
        """Bytes so far; see `Traffic.total`."""
        return self.snapshot().total(kind, name)

    def calls(self, kind: str | None = None, name: str | None = None) -> int:
        """Number of calls so far; see `Traffic.calls`."""
        return self.snapshot().calls(kind, name)


def _total(values: Mapping[tuple[str, str], int], kind: str | None, name: str | None) -> int:
    return sum(v for (k, n), v in values.items() if kind in (None, k) and name in (None, n))


def _grouped(values: Mapping[tuple[str, str], int], part: int) -> dict[str, int]:
    out: dict[str, int] = {}
    for key, value in values.items():
        out[key[part]] = out.get(key[part], 0) + value
    return out


def _difference(now: Mapping[tuple[str, str], int], then: Mapping[tuple[str, str], int]) -> dict:
    # A call of zero bytes still shows among the counts, so nothing is lost by leaving unchanged keys out.
    return {key: value - then.get(key, 0) for key, value in now.items() if value != then.get(key, 0)}


# Where everything is counted unless a caller brings its own.
METER = ByteMeter()
