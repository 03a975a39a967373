"""Bytes of collectives, by kind and by name."""

from __future__ import annotations

import pytest

from lumen_core.comm.meter import METER, ByteMeter


def test_totals_calls_and_differences() -> None:
    meter = ByteMeter()
    meter.record("all_gather", "w", 10)
    meter.record("all_reduce", "amax", 4)
    before = meter.snapshot()
    meter.record("all_gather", "w", 10)
    meter.record("all_gather", "v", 1)
    meter.record("all_to_all", "", 0)
    assert (meter.total(), meter.total("all_gather"), meter.total(name="w")) == (25, 21, 20)
    assert (meter.calls(), meter.calls("all_gather"), meter.calls("all_gather", "w")) == (5, 3, 2)
    assert (before.total(), before.calls()) == (14, 2)  # a snapshot stays as it was
    added = meter.since(before)
    assert added.by_kind() == {"all_gather": 11} and added.by_name() == {"w": 10, "v": 1}
    assert (added.calls(), added.calls("all_to_all"), added.total("all_reduce")) == (3, 1, 0)
    meter.reset()
    assert (meter.total(), meter.calls()) == (0, 0)


def test_kinds_are_checked() -> None:
    with pytest.raises(ValueError, match=r"kind='broadcast': must be one of all_gather, reduce_scatter"):
        METER.record("broadcast", "w", 1)
