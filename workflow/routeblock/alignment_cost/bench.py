# SPDX-License-Identifier: Apache-2.0
"""Timing of one batch on the GPU: a graph replay, or calls launched one by one into a full queue."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from routeblock.alignment_cost.arms import Call

SPIN_CYCLES_PER_SECOND = 2e9  # above any GPU's clock: the spin lasts at least as long as asked for
SHORTEST_SPIN_S = 200e-6


@dataclass(frozen=True)
class Streamed:
    """One streamed batch, microseconds: on the device, and on the host to enqueue it. late: the queue ran dry."""

    device_us: float
    host_us: float
    late: bool


class Bench:
    """Events and graphs of one process."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def capture(self, call: Call, calls: int, routings: int) -> Any:
        """A graph of `calls` calls, over the routings in turn; run once uncaptured and once as a graph."""
        for i in range(routings):
            call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(i % routings)
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def replay(self, graph: Any) -> float:
        """Microseconds of one replay."""
        self._start.record()
        graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1000

    def stream(self, call: Call, calls: int, routings: int, spin_s: float) -> Streamed:
        """One batch behind a kernel that spins for `spin_s` seconds or a little longer."""
        torch.cuda._sleep(int(max(spin_s, SHORTEST_SPIN_S) * SPIN_CYCLES_PER_SECOND))
        self._start.record()
        begin = time.perf_counter()
        for i in range(calls):
            call(i % routings)
        host = time.perf_counter() - begin
        late = self._start.query()
        self._end.record()
        self._end.synchronize()
        return Streamed(float(self._start.elapsed_time(self._end)) * 1000, host * 1e6, bool(late))
