"""Fixtures of the distributed tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import RankPool


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """One group of ranks for each world size, started by the first test that asks for it."""
    pools = {size: RankPool(size) for size in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()
