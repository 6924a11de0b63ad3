# SPDX-License-Identifier: Apache-2.0
"""Points on this machine's GPU, with the operators of vLLM's extension."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from routeblock.alignment_cost import arms, routings
from routeblock.alignment_cost.bench import Bench
from routeblock.alignment_cost.measure import Checked, Sample
from routeblock.alignment_cost.protocol import Arm, Campaign, Mode, Point, Protocol, Series, points
from routeblock.cuda import telemetry
from routeblock.cuda.operators import VllmOperators, to_host
from routeblock.evidence.digest import sha256_array
from routeblock.moe.routing import AlignedPlan

SPIN_FACTOR = 2.0  # of the time that the host took for a batch before


def legal(plan: AlignedPlan, want: AlignedPlan, ids: NDArray[np.int32]) -> bool:
    """Whether a plan is the reference's but for the order of routes inside an expert."""
    if plan.num_tokens_post_padded != want.num_tokens_post_padded:
        return False
    taken = plan.sorted_token_ids < plan.num_routes
    routes = plan.sorted_token_ids[taken]
    owners = np.repeat(plan.expert_ids, plan.block_size)[taken]
    return (
        np.array_equal(plan.expert_ids, want.expert_ids)
        and np.array_equal(taken, want.sorted_token_ids < want.num_routes)
        and np.array_equal(np.sort(routes), np.arange(plan.num_routes))
        and np.array_equal(ids.reshape(-1)[routes], owners)
    )


class GpuSession:
    """One point, its routings and buffers on the device."""

    def __init__(self, point: Point, bench: Bench, layer: arms.Layer | None, seed: int) -> None:
        self.point, self._bench = point, bench
        self.variant = arms.variant(point)
        self._ids = routings.draw(point, seed)
        self._out = arms.buffers(point)
        self._align = arms.alignments(point, self._ids, self._out)
        self._rest: Callable[[], None] | None = None
        self._final: Any = None
        if layer:
            self._rest, self._final = layer.after(point, self._out)
        self._graphs: dict[str, Any] = {}
        self._spin: dict[str, float] = {}

    def _call(self, arm: Arm) -> arms.Call:
        align, rest = self._align[arm], self._rest
        if rest is None:
            return align

        def both(i: int) -> None:
            align(i)
            rest()

        return both

    def check(self) -> Checked:
        """Plans of every routing against the CPU reference; in a layer also the final output's bits."""
        wrong: set[Arm] = set()
        told: list[str] = []
        for i, ids in enumerate(self._ids):
            want = routings.canonical(self.point, ids)
            told.append(routings.plan_digest(want))
            for arm, align in self._align.items():
                self._out.sorted_token_ids.fill_(-77)
                align(i)
                got = self._out.host(self.point.block_size, ids.size)
                same = legal(got, want, ids) and (arm is Arm.NATIVE or routings.plan_digest(got) == told[-1])
                if not same:
                    wrong.add(arm)
        facts: dict[str, Any] = {"canonical_sha256": told}
        if self._rest is not None:
            facts |= self._check_layer(wrong)
        return Checked(frozenset(wrong), facts)

    def _check_layer(self, wrong: set[Arm]) -> dict[str, Any]:
        outputs = {arm: self._output(arm) for arm in self._align}
        again = self._output(Arm.CANONICAL)
        if not np.array_equal(again.view(np.uint16), outputs[Arm.CANONICAL].view(np.uint16)):
            wrong.add(Arm.CANONICAL)
        wrong |= {arm for arm, x in outputs.items() if not np.isfinite(x).all()}
        digests = {arm: sha256_array(x) for arm, x in outputs.items()}
        if digests[Arm.SORT] != digests[Arm.CANONICAL]:
            wrong |= {Arm.SORT, Arm.CANONICAL}
        return {"final_sha256": {str(arm): digest for arm, digest in digests.items()}}

    def _output(self, arm: Arm) -> NDArray[Any]:
        self._final.fill_(float("nan"))
        self._call(arm)(0)
        return to_host(self._final)

    def warm_up(self, series: Series, mode: Mode, times: int) -> None:
        """Capture the graph, or learn how long the host takes."""
        call, routed = self._call(series.arm), self.point.routings
        if mode is Mode.GRAPH:
            self._graphs[series.name] = self._bench.capture(call, self.point.graph_calls, routed)
        for _ in range(times):
            if mode is Mode.GRAPH:
                self._bench.replay(self._graphs[series.name])
            else:
                host_us = self._bench.stream(call, self.point.stream_calls, routed, 0.0).host_us
                self._spin[series.name] = SPIN_FACTOR * host_us / 1e6

    def measure(self, series: Series, mode: Mode) -> Sample:
        """Time one batch. A late one spins longer the next time."""
        if mode is Mode.GRAPH:
            return Sample({mode: self._bench.replay(self._graphs[series.name])}, self.point.graph_calls)
        call, calls = self._call(series.arm), self.point.stream_calls
        got = self._bench.stream(call, calls, self.point.routings, self._spin[series.name])
        if got.late:
            self._spin[series.name] *= SPIN_FACTOR
        return Sample({Mode.STREAM: got.device_us, Mode.HOST: got.host_us}, calls, got.late)


class GpuRig:
    """CUDA device 0 with an extension. Raises InputError as `VllmOperators` and `cuda.align.prepare` do."""

    def __init__(self, extension: Path, protocol: Protocol) -> None:
        from cuda import core

        self.operators = VllmOperators(extension)
        self._protocol, self._bench = protocol, Bench()
        self.nvml = telemetry.Gpu(core.Device(0).pci_bus_id)
        experts = {p.experts for p in points(protocol, Campaign.LAYER)}
        self._layers = {e: arms.Layer(self.operators, protocol.layer, e, protocol.seed) for e in experts}

    def warm_up(self, idle: Callable[[], bool]) -> None:
        """One layer, then one for each further block size as long as `idle` says that time is free.

        The first launch of a kernel may compile it for this GPU, which takes a minute for the packed GEMM.
        """
        first: dict[int, Point] = {}
        for point in points(self._protocol, Campaign.LAYER):
            if point.block_size not in first and (not first or idle()):
                first[point.block_size] = point
                self.open(point).check()

    def open(self, point: Point) -> GpuSession:
        """Make a point the one that runs."""
        torch.cuda.synchronize()
        layer = self._layers[point.experts] if point.campaign is Campaign.LAYER else None
        return GpuSession(point, self._bench, layer, self._protocol.seed)

    def state(self) -> telemetry.State:
        """What NVML says."""
        return self.nvml.state()

    def pause(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)
