# SPDX-License-Identifier: Apache-2.0
"""Timing of one batch through torch: a CUDA graph with events, or calls queued one by one behind a spinning kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

SPIN_CYCLES_PER_SECOND = 2e9  # above any GPU's clock: the spin lasts at least as long as asked for
SHORTEST_SPIN_S = 200e-6

Call = Callable[[], Any]


class Events:
    """Two events of the CUDA driver, on torch's current stream."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._events = [self._done(driver.cuEventCreate(0)) for _ in range(2)]

    def _done(self, result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(f"CUDA driver: {result[0]}")
        return result[1] if len(result) > 1 else None

    def mark(self, which: int, *, captured: bool = False) -> None:
        """Record one now, or as a part of the graph under capture: no host time then lies beside it."""
        flags = self._driver.CUevent_record_flags
        flag = flags.CU_EVENT_RECORD_EXTERNAL if captured else flags.CU_EVENT_RECORD_DEFAULT
        stream = self._driver.CUstream(torch.cuda.current_stream().cuda_stream)
        self._done(self._driver.cuEventRecordWithFlags(self._events[which], stream, flag.value))

    def reached(self, which: int) -> bool:
        """Whether the device has passed it."""
        return int(self._driver.cuEventQuery(self._events[which])[0]) == 0

    def microseconds(self) -> float:
        """Between the two, once the device has passed both."""
        self._done(self._driver.cuEventSynchronize(self._events[1]))
        return float(self._done(self._driver.cuEventElapsedTime(*self._events))) * 1000


class Graph:
    """Calls captured on one stream, after `first` ran there uncaptured.

    inside: the events are nodes of the graph, around `calls` and behind `warmups`; else they stand around the replay.
    """

    def __init__(
        self, stream: Any, first: Sequence[Call], calls: Sequence[Call], *, warmups: Sequence[Call] = (), inside: bool
    ) -> None:
        torch.cuda.synchronize()  # what the calls read may come from another stream
        self._stream, self._inside, self._events = stream, inside, Events()
        with torch.cuda.stream(stream):
            for call in first:
                call()
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream):
                for call in warmups:
                    call()
                if inside:
                    self._events.mark(0, captured=True)
                for call in calls:
                    call()
                if inside:
                    self._events.mark(1, captured=True)

    def replay(self) -> float:
        """Microseconds of all calls of one replay."""
        with torch.cuda.stream(self._stream):
            if not self._inside:
                self._events.mark(0)
            self._graph.replay()
            if not self._inside:
                self._events.mark(1)
        self._stream.synchronize()
        return self._events.microseconds()


@dataclass(frozen=True)
class Queued:
    """One queued batch, microseconds: on the device, and on the host to enqueue it. late: the queue ran dry."""

    device_us: float
    host_us: float
    late: bool


def queued(events: Events, calls: Sequence[Call], spin_s: float) -> Queued:
    """Calls one by one behind a kernel that spins for `spin_s` seconds or a little longer, on the current stream."""
    torch.cuda._sleep(int(max(spin_s, SHORTEST_SPIN_S) * SPIN_CYCLES_PER_SECOND))
    events.mark(0)
    begin = time.perf_counter()
    for call in calls:
        call()
    host = time.perf_counter() - begin
    late = events.reached(0)
    events.mark(1)
    return Queued(events.microseconds(), host * 1e6, late)
