"""Medians of single runs, with a cold cache on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

WARM_UP = 3


class Stopwatch:
    """Times functions on one device.

    On a GPU each run is bracketed by events and preceded by a write of twice the L2 cache, which evicts
    operands that the run before left there (a training step finds them cold too) and keeps the queue full
    while the host launches.

    Args:
        device: where the work runs.
        iterations: timed runs; the median is taken.
    """

    def __init__(self, device: torch.device, iterations: int) -> None:
        self.device = device
        self.iterations = iterations
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
            self._flush = torch.empty(2 * cache, dtype=torch.int8, device=device)

    def seconds(self, function: Callable[[], object]) -> float:
        """Median time of one call."""
        for _ in range(WARM_UP):
            function()
        if self._flush is None:
            return statistics.median(self._host(function) for _ in range(self.iterations))
        pairs = [self._events(function) for _ in range(self.iterations)]
        torch.cuda.synchronize(self.device)
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3

    @staticmethod
    def _host(function: Callable[[], object]) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def _events(self, function: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        self._flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream(self.device))
        function()
        end.record(torch.cuda.current_stream(self.device))
        return start, end
