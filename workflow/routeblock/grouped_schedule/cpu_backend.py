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

from routeblock.grouped_schedule import cpu
from routeblock.grouped_schedule.arms import Arm, Scope
from routeblock.grouped_schedule.campaigns import Stage
from routeblock.grouped_schedule.fixture import Fixture
from routeblock.grouped_schedule.measure import POISON, Sample

LANE = "cpu"


class CpuBackend:
    """The schedules on `threads` threads of this CPU, fewer where it has fewer: the record says how many."""

    lane = LANE

    def __init__(self, device: str, threads: int) -> None:
        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        self.device, self.threads = device, min(threads, most)

    def load(self, fixture: Fixture, stage: Stage) -> None:
        self._fixture = fixture
        self._out = np.empty((fixture.cell.slots, fixture.cell.rows), np.float32)
        self._warm: set[str] = set()

    def output(self, arm: Arm) -> NDArray[np.float32]:
        out = np.full(self._out.shape, POISON, np.uint32).view(np.float32)
        cpu.launch(arm, self._fixture, out, self.threads)
        self._warm.add(arm.name)
        return out

    def measure(self, arm: Arm, scopes: tuple[Scope, ...]) -> list[Sample]:
        # The comparison of the arm's output ran it once at this shape: that is the warm-up.
        assert arm.name in self._warm, arm.name
        clocked = cpu.launch(arm, self._fixture, self._out, self.threads)
        times = {Scope.INCLUSIVE: clocked.inclusive_us, Scope.COMPUTE: clocked.compute_us}
        return [Sample(scope, times[scope], launches=1, warmups=1) for scope in scopes]

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def memory_in_use(self) -> None:
        """A CPU has no memory but the host's."""

    def identity(self) -> dict[str, Any]:
        """What the times belong to."""
        return {
            "lane": LANE,
            "device": self.device,
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
