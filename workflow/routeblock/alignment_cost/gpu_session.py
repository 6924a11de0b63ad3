# SPDX-License-Identifier: Apache-2.0
"""Points on this machine's GPU, with the operators of vLLM's extension."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from routeblock.alignment_cost import alignments, routings
from routeblock.alignment_cost.protocol import Arm, Campaign, Mode, Point, Protocol, points
from routeblock.alignment_cost.study import check_of, of_side, stage
from routeblock.cuda import telemetry
from routeblock.cuda.operators import VllmOperators, to_host
from routeblock.evidence.digest import sha256_array
from routeblock.moe.routing import AlignedPlan
from routeblock.timing.gpu import Call, Events, Graph, queued
from routeblock.timing.loop import Sample, Verdict
from routeblock.timing.plan import Series, Stage

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

    def __init__(self, timed: Stage, events: Events, layer: alignments.Layer | None, protocol: Protocol) -> None:
        self.point: Point = timed.shape
        self._events, self._warmups = events, protocol.warmups
        self.variant = alignments.variant(self.point)
        self.stage = replace(timed, of_side=of_side(self.variant))
        self._ids = routings.draw(self.point, protocol.seed)
        self._out = alignments.buffers(self.point)
        self._align = alignments.alignments(self.point, self._ids, self._out)
        self._rest: Callable[[], None] | None = None
        self._final: Any = None
        if layer:
            self._rest, self._final = layer.after(self.point, self._out)
        self._graphs: dict[str, Graph] = {}
        self._spin: dict[str, float] = {}

    def _call(self, arm: Arm) -> alignments.Call:
        align, rest = self._align[arm], self._rest
        if rest is None:
            return align

        def both(i: int) -> None:
            align(i)
            rest()

        return both

    def _calls(self, side: str, count: int) -> list[Call]:
        """`count` calls, over the routings in turn."""
        call = self._call(Arm(side))
        return [partial(call, i % self.point.routings) for i in range(count)]

    def check(self) -> Verdict:
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
        sides = frozenset(map(str, wrong))
        return Verdict(sides, check_of(self.point, self.variant, sides) | facts)

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

    def warm_up(self, series: Series, clocks: tuple[str, ...]) -> None:
        """Capture the graph, or learn how long the host takes."""
        if Mode.GRAPH in clocks:
            calls = self._calls(series.side, self.point.graph_calls)
            first = self._calls(series.side, self.point.routings)
            self._graphs[series.name] = Graph(torch.cuda.Stream(), first, calls, inside=False)
            self._graphs[series.name].replay()
        for _ in range(self._warmups):
            if Mode.GRAPH in clocks:
                self._graphs[series.name].replay()
            else:
                calls = self._calls(series.side, self.point.stream_calls)
                self._spin[series.name] = SPIN_FACTOR * queued(self._events, calls, 0.0).host_us / 1e6

    def measure(self, series: Series, clocks: tuple[str, ...]) -> list[Sample]:
        """Time one batch. A late one spins longer the next time."""
        if Mode.GRAPH in clocks:
            return [Sample(self._graphs[series.name].replay(), self.point.graph_calls)]
        count = self.point.stream_calls
        got = queued(self._events, self._calls(series.side, count), self._spin[series.name])
        if got.late:
            self._spin[series.name] *= SPIN_FACTOR
        times = {Mode.STREAM: got.device_us, Mode.HOST: got.host_us}
        return [Sample(times[Mode(clock)], count, got.late) for clock in clocks]

    def close(self) -> None:
        """Nothing that torch does not free."""


class GpuSessions:
    """CUDA device 0 with an extension. Raises InputError as `VllmOperators` and `cuda.align.prepare` do."""

    def __init__(self, extension: Path, protocol: Protocol) -> None:
        from cuda import core

        self.operators = VllmOperators(extension)
        self._protocol, self._events = protocol, Events()
        self.nvml = telemetry.Gpu(core.Device(0).pci_bus_id)
        experts = {p.experts for p in points(protocol, Campaign.LAYER)}
        self._layers = {e: alignments.Layer(self.operators, protocol.layer, e, protocol.seed) for e in experts}

    def warm_up(self, idle: Callable[[], bool]) -> None:
        """One layer, then one for each further block size as long as `idle` says that time is free.

        The first launch of a kernel may compile it for this GPU, which takes a minute for the packed GEMM.
        """
        first: dict[int, Point] = {}
        for point in points(self._protocol, Campaign.LAYER):
            if point.block_size not in first and (not first or idle()):
                first[point.block_size] = point
                self.open(stage(point, self._protocol, None)).check()

    def open(self, timed: Stage) -> GpuSession:
        """Make a stage the one that runs."""
        torch.cuda.synchronize()
        point: Point = timed.shape
        layer = self._layers[point.experts] if point.campaign is Campaign.LAYER else None
        return GpuSession(timed, self._events, layer, self._protocol)

    def state(self) -> telemetry.State:
        """What NVML says."""
        return self.nvml.state()

    def pause(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)
