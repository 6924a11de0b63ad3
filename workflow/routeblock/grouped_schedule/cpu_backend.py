# SPDX-License-Identifier: Apache-2.0
"""The CPU as a device: one launch a batch, one warm-up a shape, both scopes clocked in the same launch."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from routeblock.cuda.telemetry import UNKNOWN, State
from routeblock.grouped_schedule import cpu
from routeblock.grouped_schedule.campaigns import Place, Setup
from routeblock.grouped_schedule.fixture import Fixture
from routeblock.grouped_schedule.measure import POISON
from routeblock.grouped_schedule.schedules import BY_NAME, Arm, Scope
from routeblock.timing.loop import Sample
from routeblock.timing.plan import Series

LANE = "cpu"


class CpuBackend:
    """The schedules on `threads` threads of this CPU, fewer where it has fewer: the record says how many."""

    def __init__(self, device: str, threads: int) -> None:
        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        self.place, self.threads = Place(LANE, device, None), min(threads, most)

    def load(self, fixture: Fixture, setup: Setup) -> None:
        self._fixture = fixture
        self._out = np.empty((fixture.cell.slots, fixture.cell.rows), np.float32)
        self._warm: set[str] = set()

    def output(self, arm: Arm) -> NDArray[np.float32]:
        out = np.full(self._out.shape, POISON, np.uint32).view(np.float32)
        cpu.launch(arm, self._fixture, out, self.threads)
        self._warm.add(arm.name)
        return out

    def warm_up(self, series: Series, clocks: tuple[str, ...]) -> None:
        """The comparison of the arm's output ran it once at this shape: that is the warm-up."""
        assert series.side in self._warm, series.side

    def measure(self, series: Series, clocks: tuple[str, ...]) -> list[Sample]:
        """One launch, all scopes."""
        clocked = cpu.launch(BY_NAME[series.side], self._fixture, self._out, self.threads)
        times = {Scope.INCLUSIVE: clocked.inclusive_us, Scope.COMPUTE: clocked.compute_us}
        return [Sample(times[Scope(clock)], calls=1) for clock in clocks]

    def state(self) -> State:
        """Nothing is known of a CPU's clock and other processes."""
        return State(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)

    def pause(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def memory_in_use(self) -> None:
        """A CPU has no memory but the host's."""

    def identity(self) -> dict[str, Any]:
        """What the times belong to."""
        return {
            "lane": LANE,
            "device": self.place.device,
            "name": _cpu_name(),
            "cores_visible": os.cpu_count(),
            "threads": self.threads,
            "numba": numba.__version__,
            "times": "real times of this CPU; they say nothing of a GPU",
        }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:  # noqa: PTH123
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
