"""Fixtures of the Megatron-Core tests: gloo ranks that run Megatron on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "dist")]

from gpt import start  # noqa: E402
from pool import RankPool  # noqa: E402


class MegatronRanks:
    """`ranks(size).run(function, *args)`: long-lived groups, each started by the first test that asks for it."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, size: int) -> RankPool:
        if size not in self._pools:
            self._pools[size] = RankPool(size)
        pool = self._pools[size]
        if not pool.started:
            pool.run(start, seconds=90.0)  # importing Megatron takes as long as the machine is busy
        return pool

    def stop(self) -> None:
        """End all groups."""
        for pool in self._pools.values():
            pool.stop()


@pytest.fixture(scope="module")
def ranks() -> Iterator[MegatronRanks]:
    """Groups of gloo ranks by world size."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    groups = MegatronRanks()
    yield groups
    groups.stop()
