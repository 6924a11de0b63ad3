# SPDX-License-Identifier: Apache-2.0
"""One GPU as a device: grouping and dot-product kernels, timed by CUDA events."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.cuda import launch, telemetry
from routeblock.evidence.digest import sha256_file
from routeblock.grouped_schedule.campaigns import Mode, Place, Setup
from routeblock.grouped_schedule.fixture import Fixture
from routeblock.grouped_schedule.measure import POISON
from routeblock.grouped_schedule.protocol import Protocol
from routeblock.grouped_schedule.schedules import BY_NAME, Arm, Grouping, Scope, geometry, is_fused
from routeblock.installed import versions
from routeblock.moe import q6k
from routeblock.timing.loop import Sample
from routeblock.timing.plan import Series

LANE = "cuda"
RANK_LANES, RANK_JOBS = 8, 32  # block of rank_sort, as in q6k_schedules.cu
FLUSH_FACTOR = 2  # of L2, written before a cold launch
PRODUCTS = {
    (Grouping.NONE, False): "job_major",
    (Grouping.NONE, True): "paired_incumbent",
    (Grouping.RANK, False): "grouped",
    (Grouping.RANK, True): "paired_grouped",
    (Grouping.SERIAL, False): "grouped",
    (Grouping.SERIAL, True): "paired_grouped",
}
SORTS = {Grouping.RANK: "rank_sort", Grouping.SERIAL: "serial_sort"}
KERNELS = tuple(dict.fromkeys([*PRODUCTS.values(), *SORTS.values(), "flush_l2"]))


class CudaBackend:
    """The schedules on CUDA device `index` with the kernels of `cubin`. Raises InputError as `cuda.launch.Gpu` does."""

    def __init__(self, device: str, index: int, cubin: Path, protocol: Protocol) -> None:
        self.gpu = launch.Gpu(index)
        self.kernels = self.gpu.load(cubin, KERNELS)
        self.nvml = telemetry.Gpu(self.gpu.device.pci_bus_id)
        self.place = Place(LANE, device, self.gpu.l2_bytes)
        self._cubin, self._protocol = cubin, protocol
        words = FLUSH_FACTOR * self.gpu.l2_bytes // 4
        buffer = self.gpu.allocate(4 * words)
        self._flush = self.gpu.bind(
            self.kernels["flush_l2"],
            (2 * self.gpu.multiprocessors, 1, 1),
            (256, 1, 1),
            buffer,
            np.uint64(words),
            np.uint32(0),
        )
        self._weights: tuple[str, Any] | None = None
        self._keep = buffer  # launches hold pointers, not buffers

    def load(self, fixture: Fixture, setup: Setup) -> None:
        cell = fixture.cell
        digest = fixture.weights_digest
        if self._weights is None or self._weights[0] != digest:
            self._weights = None  # free the old ones first
            self._weights = (digest, self.gpu.upload(fixture.weights))
        self._fixture, self._setup = fixture, setup
        self._ids = self.gpu.upload(fixture.ids)
        self._activations = self.gpu.upload(fixture.activations)
        self._order = self.gpu.upload(np.full(cell.slots, 0xFFFFFFFF, np.uint32))
        self._out = self.gpu.allocate(4 * cell.slots * cell.rows)
        self._graphs: dict[tuple[str, Scope], Any] = {}

    def grouping(self, arm: Arm) -> list[launch.Launch]:
        """The launches that make the order of the jobs for `arm`; none where jobs stay as they come."""
        if arm.grouping is Grouping.NONE:
            return []
        cell = self._fixture.cell
        kernel = self.kernels[SORTS[arm.grouping]]
        serial = arm.grouping is Grouping.SERIAL
        grid = (1 if serial else -(-cell.slots // RANK_JOBS), 1, 1)
        block = (1, 1, 1) if serial else (RANK_LANES, RANK_JOBS, 1)
        return [self.gpu.bind(kernel, grid, block, self._ids, self._order, cell.slots, cell.pool)]

    def _products(self, arm: Arm) -> list[launch.Launch]:
        cell, warps = self._fixture.cell, self._setup.warps
        walk = geometry(arm, cell.slots, cell.rows, warps)
        assert self._weights is not None
        return [
            self.gpu.bind(
                self.kernels[PRODUCTS[arm.grouping, is_fused(arm, cell.family)]],
                (walk.tiles, walk.jobs, walk.bands),
                (32, warps, 1),
                self._ids if arm.grouping is Grouping.NONE else self._order,
                self._weights[1],
                self._activations,
                self._out,
                cell.slots,
                cell.pool,
                cell.rows,
                q6k.blocks_per_row(cell.cols),
                walk.band_rows,
            )
        ]

    def launches(self, arm: Arm, scope: Scope) -> list[launch.Launch]:
        """The launches of one call of `arm` on the loaded fixture."""
        grouping = self.grouping(arm) if scope is Scope.INCLUSIVE else []
        return grouping + self._products(arm)

    def output(self, arm: Arm) -> NDArray[np.float32]:
        self.gpu.fill(self._out, int(POISON) & 0xFF)
        self.gpu.fill(self._order, 0xFF)
        for each in self.launches(arm, Scope.INCLUSIVE):
            each(self.gpu.stream)
        return self.written()

    def written(self) -> NDArray[np.float32]:
        """What the output buffer holds now, after all work of the stream."""
        cell = self._fixture.cell
        return self.gpu.download(self._out, (cell.slots, cell.rows), np.float32)

    def warm_up(self, series: Series, clocks: tuple[str, ...]) -> None:
        """Warm-ups are a part of every batch."""

    def measure(self, series: Series, clocks: tuple[str, ...]) -> list[Sample]:
        """One batch for each scope."""
        plan, arm = self._protocol.timing.cuda, BY_NAME[series.side]
        # The compute scope reads an order that was made before: its own arm's, not another's.
        for each in self.grouping(arm):
            each(self.gpu.stream)
        self.gpu.stream.sync()
        clock = {Mode.GRAPH: self._replayed, Mode.STREAM: self._launched, Mode.COLD: self._cold}[self._setup.mode]
        scopes = [Scope(scope) for scope in clocks]
        return [Sample(clock(arm, scope, plan.warmups, plan.launches), plan.launches) for scope in scopes]

    def state(self) -> telemetry.State:
        """What NVML says."""
        return self.nvml.state()

    def pause(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def _replayed(self, arm: Arm, scope: Scope, warmups: int, launches: int) -> float:
        """Microseconds of all launches; warm-ups, event, launches, event in one graph.

        Events recorded by the host would count the time until the host hands over the launches: a short batch then
        shows the host (9 us become 13 where Python is slow).
        """
        start, end = self.gpu.events(2)
        if (arm.name, scope) not in self._graphs:
            work, mark = self.launches(arm, scope), self.gpu.mark
            self._graphs[arm.name, scope] = self.gpu.graph([*work * warmups, mark(start), *work * launches, mark(end)])
        self._graphs[arm.name, scope].launch(self.gpu.stream)
        self.gpu.stream.sync()
        return self.gpu.microseconds(start, end)

    def memory_in_use(self) -> int:
        return self.gpu.memory_in_use()

    def _launched(self, arm: Arm, scope: Scope, warmups: int, launches: int) -> float:
        """Launches one by one: where the host is slower than the device, the host's time is what is seen."""
        work, stream, (start, end) = self.launches(arm, scope), self.gpu.stream, self.gpu.events(2)
        for each in work * warmups:
            each(stream)
        stream.record(start)
        for each in work * launches:
            each(stream)
        stream.record(end)
        return self.gpu.microseconds(start, end)

    def _cold(self, arm: Arm, scope: Scope, warmups: int, launches: int) -> float:
        """L2 overwritten before every launch, outside its time."""
        work, stream = self.launches(arm, scope), self.gpu.stream
        events = self.gpu.events(2 * (warmups + launches))
        pairs = list(zip(events[::2], events[1::2], strict=True))
        for start, end in pairs:
            self._flush(stream)
            stream.record(start)
            for each in work:
                each(stream)
            stream.record(end)
        return sum(self.gpu.microseconds(start, end) for start, end in pairs[warmups:])

    def identity(self) -> dict[str, Any]:
        packages = ("cuda-core", "cuda-bindings", "numpy", "nvidia-ml-py")
        return {
            "lane": LANE,
            "device": self.place.device,
            "architecture": self.gpu.architecture,
            "l2_bytes": self.gpu.l2_bytes,
            "multiprocessors": self.gpu.multiprocessors,
            "cubin_sha256": sha256_file(self._cubin),
            "packages": versions(packages),
            **self.nvml.identity(),
        }
