# SPDX-License-Identifier: Apache-2.0
"""Shapes on CUDA device 0: every side as a call, its output, its graph and its time."""

from __future__ import annotations

import ctypes
import time
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from routeblock.cuda import telemetry
from routeblock.cuda.q6k_dispatch import Kernels
from routeblock.cuda.q6k_plan import Products, plan, quantized_bytes, tuned
from routeblock.evidence.digest import sha256_array
from routeblock.grouped_schedule.schedules import BY_NAME, Grouping, geometry
from routeblock.moe import q6k
from routeblock.moe.q6k_segments import bound, dot
from routeblock.q6k_dispatch import fixture
from routeblock.q6k_dispatch.fixture import Jobs
from routeblock.q6k_dispatch.peers import Batched, LlamaCpp, LlamaShape, Plugin
from routeblock.q6k_dispatch.protocol import LIMITS, OURS, Protocol, Shape, Side
from routeblock.q6k_dispatch.study import KEY, PEERS, key_of, planned
from routeblock.timing.gpu import Call, Graph
from routeblock.timing.loop import Sample, Verdict
from routeblock.timing.plan import Series, Stage

POISON = 0x7F
SCHEDULES = ("job_major", "grouped", "rank_sort")
WARPS, RANK_LANES, RANK_JOBS = 4, 8, 32  # of study B's kernels
LLAMA_WARM_UPS = 4
READ_BLOCKS, READ_THREADS = (2, 4, 8, 16), 256  # blocks of threads a multiprocessor


class Gpu:
    """CUDA device 0 with our cubins (q6k_dispatch, q6k_schedules) and whichever peers there are."""

    def __init__(
        self, protocol: Protocol, cubin: bytes, schedules: bytes, plugin: Plugin | None, llama: LlamaCpp | None
    ) -> None:
        torch.zeros(1, device="cuda")  # makes the primary context the current one
        properties = torch.cuda.get_device_properties(0)
        self.protocol, self.plugin, self.llama = protocol, plugin, llama
        self.kernels, self.schedules = Kernels(cubin), Kernels(schedules, SCHEDULES)
        self.architecture = f"sm_{properties.major}{properties.minor}"
        self.multiprocessors = int(properties.multi_processor_count)
        self.stream = torch.cuda.Stream()
        self.nvml = telemetry.Gpu(_bus_id(properties))
        self._unlikely = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._weights: tuple[tuple[int, int, int], NDArray[np.uint8], Any] | None = None

    def absent(self) -> set[Side]:
        """The sides of the protocol that cannot run here."""
        there = {"plugin": self.plugin, "llama_cpp": self.llama}
        return {side for name, sides in PEERS.items() if there[name] is None for side in sides}

    def sides(self) -> list[Side]:
        """The sides of the protocol that can run here."""
        absent = self.absent()
        return [s for s in dict.fromkeys(series.side for series in self.protocol.series) if s not in absent]

    def state(self) -> telemetry.State:
        """What NVML says."""
        return self.nvml.state()

    def stages(self) -> list[Stage]:
        """What the protocol asks for, without the sides that cannot run here."""
        return planned(self.protocol, self.absent())

    def weights(self, pool: int, rows: int, cols: int) -> tuple[NDArray[np.uint8], Any]:
        """The first `pool` experts, here and on the device."""
        if self._weights is None or self._weights[0][1:] != (rows, cols) or self._weights[0][0] < pool:
            self._weights = None
            host = fixture.weights(self.protocol.seed, pool, rows, cols)
            self._weights = ((pool, rows, cols), host, torch.from_numpy(host).cuda())
        _, host, device = self._weights
        return host[:pool], device[:pool]

    def open(self, stage: Stage) -> Session:
        """Make a stage the one that runs."""
        session = self.session(stage.shape)
        session.stage = stage
        return session

    def session(self, shape: Shape) -> Session:
        """A shape with its data on the device."""
        torch.cuda.synchronize()
        return Session(self, fixture.make(shape, self.protocol.seed))

    def graph(self, call: Call, warmups: int, launches: int) -> Graph:
        """Warm-ups and launches of one call in a graph, events inside: no host time lies in between."""
        return Graph(self.stream, [call], [call] * launches, warmups=[call] * warmups, inside=True)

    def read_rate(self, size: int) -> float:
        """Bytes a second of a kernel that only reads `size` bytes, median of 9 graphs of 8 launches."""
        buffer = torch.ones(size // 4, dtype=torch.int32, device="cuda")
        graph = self.graph(self.read(buffer, size, 8), 2, 8)
        return size * 8 / float(np.median([graph.replay() for _ in range(9)])) * 1e6

    def read(self, buffer: Any, size: int, blocks: int) -> Call:
        """A kernel that only reads the first `size` bytes of a tensor; `blocks` of threads a multiprocessor."""
        arguments = (
            (buffer.data_ptr(), ctypes.c_void_p),
            (size, ctypes.c_size_t),
            (self._unlikely.data_ptr(), ctypes.c_void_p),
        )
        grid, block = (blocks * self.multiprocessors, 1, 1), (READ_THREADS, 1, 1)
        return lambda: self.kernels.launch("read_all", torch.cuda.current_stream().cuda_stream, grid, block, arguments)

    def pause(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


def _bus_id(properties: Any) -> str:
    return f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


class Session:
    """One shape, its data on the device, its sides as calls on torch's current stream."""

    stage: Stage

    def __init__(self, gpu: Gpu, jobs: Jobs) -> None:
        self.gpu, self.jobs, self.shape = gpu, jobs, jobs.shape
        shape, sizes = self.shape, self.shape.sizes
        self.host_weights, self._weights = gpu.weights(shape.pool, shape.rows, shape.cols)
        self._x = torch.from_numpy(jobs.x).cuda()
        self._ids = torch.from_numpy(jobs.ids).cuda()
        self._quantized = torch.empty(quantized_bytes(sizes), dtype=torch.uint8, device="cuda")
        self._out = torch.empty((shape.slots, shape.rows), dtype=torch.float32, device="cuda")
        tuning = tuned(sizes, gpu.multiprocessors)
        self.plans = {Side(p.value): plan(sizes, tuning, p, architecture=gpu.architecture) for p in Products}
        self._keep: list[Any] = []
        self._calls: dict[Side, Call] = {side: self._ours(side) for side in OURS}
        self._products: dict[Side, Call] = {}  # of study B's schedules alone
        self._calls |= {side: self._schedule(side) for side in Side if side in _SCHEDULE_SIDES}
        self._calls[Side.EMPTY] = self._empty()
        active = jobs.active
        tokens = active // shape.top_k if shape.top_k == 1 else np.arange(sizes.tokens)
        self._active, self._active_x = active, torch.from_numpy(jobs.x[tokens]).cuda()
        self._active_ids = torch.from_numpy(jobs.ids[active].reshape(-1, shape.top_k)).cuda()
        self._llama: LlamaShape | None = None
        if gpu.plugin is not None:
            plugin, flat = gpu.plugin, self._weights.view(shape.pool, shape.rows, -1)
            batched = Batched(plugin, self._active_ids, shape.pool)
            self._calls[Side.VLLM_VEC] = lambda: plugin.vec(self._active_x, flat, self._active_ids, shape.rows)
            self._calls[Side.VLLM_BATCHED] = lambda: batched(self._active_x, flat, shape.rows)
        if gpu.llama is not None:
            ids = jobs.ids[active].reshape(-1, shape.top_k)
            nodes = gpu.protocol.llama_cpp.nodes
            self._llama = gpu.llama.open(self.host_weights, jobs.x[tokens], ids, nodes)
        self._graphs: dict[str, Graph] = {}

    def call(self, side: Side) -> Call:
        """Enqueue one call of a side."""
        return self._calls[side]

    def _ours(self, side: Side) -> Call:
        sizes, chosen = self.shape.sizes, self.plans[side]
        pointers = [t.data_ptr() for t in (self._ids, self._weights, self._x, self._quantized, self._out)]

        def call() -> Any:
            self.gpu.kernels.products(sizes, chosen, torch.cuda.current_stream().cuda_stream, *pointers)
            return self._out

        return call

    def _schedule(self, side: Side) -> Call:
        """Study B's schedule on Q8_1 blocks of every slot: quantised, ranked, multiplied."""
        shape, arm = self.shape, BY_NAME[side.value]
        walk = geometry(arm, shape.slots, shape.rows, WARPS)
        wide = self._x.repeat_interleave(shape.top_k, dim=0).contiguous()
        blocks = torch.empty(shape.slots * shape.cols // 32 * 36, dtype=torch.uint8, device="cuda")
        order = torch.empty(shape.slots, dtype=torch.int32, device="cuda")
        ranked = arm.grouping is Grouping.RANK
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        rank = tuple(
            zip(
                (self._ids.data_ptr(), order.data_ptr(), shape.slots, shape.pool),
                (pointer, pointer, integer, integer),
                strict=True,
            )
        )
        first = order if ranked else self._ids
        self._keep += [wide, blocks, order]  # launches hold addresses
        arguments = (
            *((t.data_ptr(), pointer) for t in (first, self._weights, blocks, self._out)),
            *(
                (n, integer)
                for n in (shape.slots, shape.pool, shape.rows, q6k.blocks_per_row(shape.cols), walk.band_rows)
            ),
        )

        launch = self.gpu.schedules.launch

        def product() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            name, grid = ("grouped" if ranked else "job_major"), (walk.tiles, walk.jobs, walk.bands)
            launch(name, stream, grid, (32, WARPS, 1), arguments)

        def call() -> Any:
            stream = torch.cuda.current_stream().cuda_stream
            self.gpu.kernels.quantize_q8_1(stream, wide.data_ptr(), blocks.data_ptr(), wide.numel())
            if ranked:
                launch("rank_sort", stream, (-(-shape.slots // RANK_JOBS), 1, 1), (RANK_LANES, RANK_JOBS, 1), rank)
            product()
            return self._out

        self._products[side] = product
        return call

    def _empty(self) -> Call:
        sizes, chosen = self.shape.sizes, self.plans[Side.AUTO]
        return lambda: self.gpu.kernels.nothing(sizes, chosen, torch.cuda.current_stream().cuda_stream)

    def _read(self) -> Call:
        """As many bytes as the weights of the used experts, read once, on the fastest grid."""
        size, plan = self.jobs.facts()["weight_bytes"], self.gpu.protocol

        def time_of(call: Call) -> float:
            graph = self.gpu.graph(call, plan.warmups, plan.launches)
            return float(np.median([graph.replay() for _ in range(3)]))

        return min((self.gpu.read(self._weights, size, blocks) for blocks in READ_BLOCKS), key=time_of)

    def counted(self, side: Side) -> Call:
        """What counters watch of a side: the whole call; of study B's schedules the product, after one whole call."""
        if side is Side.READ:
            self._calls[side] = self._read()
        self._calls[side]()
        torch.cuda.synchronize()
        return self._products.get(side, self._calls[side])

    def output(self, side: Side) -> NDArray[np.float32]:
        """The active jobs' rows, float32 [active, rows], after a call onto poisoned memory."""
        if side is Side.LLAMA_CPP:
            assert self._llama is not None
            return self._llama.output()
        self._out.view(torch.uint8).fill_(POISON)
        out = self._calls[side]()
        torch.cuda.synchronize()
        host: NDArray[np.float32] = out.reshape(-1, self.shape.rows).cpu().numpy()
        return host if out.data_ptr() != self._out.data_ptr() else host[self._active]

    def check(self) -> Verdict:
        """Every side against ours, ours against the model on sampled slots, sentinels untouched."""
        rules, wrong = self.gpu.protocol.correctness, set[Side]()
        ours = {side: self.output(side) for side in OURS}
        untouched = np.setdiff1d(np.arange(self.shape.slots), self._active)
        left = self._out.view(torch.uint8).cpu().numpy()[untouched]
        if not (left == POISON).all():
            wrong |= set(OURS)
        digests = {str(side): sha256_array(out) for side, out in ours.items()}
        wrong |= {side for side in OURS if digests[side] != digests[Side.AUTO]}
        reference = ours[Side.AUTO].astype(np.float64)
        errors = {}
        for side in self.gpu.sides():
            if side not in (*OURS, *LIMITS):
                difference = np.linalg.norm(self.output(side) - reference) / np.linalg.norm(reference)
                errors[str(side)] = float(difference)
                if not difference <= rules.peer_error:
                    wrong.add(side)
        samples, furthest = [], 0.0
        for slot in self.jobs.sampled(rules.samples):
            got = ours[Side.AUTO][int(np.searchsorted(self._active, slot))]
            weights = self.host_weights[self.jobs.ids[slot]]
            activations = q6k.quantize_q8_1(self.jobs.x[slot // self.shape.top_k])[None]
            if not np.array_equal(dot(weights, activations).view(np.uint32), got.view(np.uint32)):
                wrong |= set(OURS)
            sums, limits = bound(weights, activations)
            furthest = max(furthest, float((np.abs(got - sums) / limits).max()))
            samples.append({"slot": slot, "sha256": sha256_array(np.ascontiguousarray(got))})
        if not furthest <= 1:
            wrong |= set(OURS)
        facts = {
            **dict(zip(KEY, key_of(self.shape), strict=True)),
            "plan": asdict(self.plans[Side.AUTO]),
            "wrong": sorted(wrong),
            **self.jobs.facts(),
            "output_sha256": digests,
            "samples": samples,
            "furthest_of_bound": furthest,
            "peer_errors": errors,
        }
        return Verdict(frozenset(map(str, wrong)), facts)

    def warm_up(self, series: Series, clocks: tuple[str, ...]) -> None:
        """Capture the series' graph."""
        side, plan = Side(series.side), self.gpu.protocol
        if side is Side.LLAMA_CPP:
            assert self._llama is not None
            self._llama.warm_up(LLAMA_WARM_UPS)
            return
        if side is Side.READ:
            self._calls[side] = self._read()
        self._graphs[series.name] = self.gpu.graph(self._calls[side], plan.warmups, plan.launches)
        self._graphs[series.name].replay()

    def measure(self, series: Series, clocks: tuple[str, ...]) -> list[Sample]:
        """Time one batch."""
        launches = self.gpu.protocol.launches
        if series.side == Side.LLAMA_CPP:
            assert self._llama is not None
            return [Sample(self._llama.node_us() * launches, launches)]
        return [Sample(self._graphs[series.name].replay(), launches)]

    def close(self) -> None:
        """Free what torch does not."""
        self._graphs.clear()
        if self._llama is not None:
            self._llama.close()


_SCHEDULE_SIDES = frozenset(Side(name) for name in BY_NAME if name in {s.value for s in Side})
