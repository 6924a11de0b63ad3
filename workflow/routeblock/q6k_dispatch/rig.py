# SPDX-License-Identifier: Apache-2.0
"""Shapes on CUDA device 0: every side as a call, its output, its graph and its time."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from routeblock.cuda import telemetry
from routeblock.cuda.q6k_dispatch import Kernels
from routeblock.cuda.q6k_plan import Products, plan, quantized_bytes, tuned
from routeblock.evidence.digest import sha256_array
from routeblock.grouped_schedule.arms import BY_NAME, Grouping, geometry
from routeblock.moe import q6k
from routeblock.moe.q6k_segments import bound, dot
from routeblock.q6k_dispatch import fixture
from routeblock.q6k_dispatch.fixture import Jobs
from routeblock.q6k_dispatch.peers import Batched, LlamaCpp, LlamaShape, Plugin
from routeblock.q6k_dispatch.protocol import LIMITS, OURS, Protocol, Series, Shape, Side

Call = Callable[[], Any]
POISON = 0x7F
SCHEDULES = ("job_major", "grouped", "rank_sort")
WARPS, RANK_LANES, RANK_JOBS = 4, 8, 32  # of study B's kernels
LLAMA_WARM_UPS = 4
READ_BLOCKS, READ_THREADS = (2, 4, 8, 16), 256  # blocks of threads a multiprocessor


@dataclass(frozen=True)
class Checked:
    """The sides that are wrong at a shape, and facts for the record."""

    wrong: frozenset[Side]
    facts: dict[str, Any]


class Rig:
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

    def sides(self) -> list[Side]:
        """The sides of the protocol that can run here."""
        absent = {Side.VLLM_VEC, Side.VLLM_BATCHED} if self.plugin is None else set()
        absent |= {Side.LLAMA_CPP} if self.llama is None else set()
        return [s for s in dict.fromkeys(series.side for series in self.protocol.series) if s not in absent]

    def weights(self, pool: int, rows: int, cols: int) -> tuple[NDArray[np.uint8], Any]:
        """The first `pool` experts, here and on the device."""
        if self._weights is None or self._weights[0][1:] != (rows, cols) or self._weights[0][0] < pool:
            self._weights = None
            host = fixture.weights(self.protocol.seed, pool, rows, cols)
            self._weights = ((pool, rows, cols), host, torch.from_numpy(host).cuda())
        _, host, device = self._weights
        return host[:pool], device[:pool]

    def open(self, shape: Shape) -> Session:
        """Make a shape the one that runs."""
        torch.cuda.synchronize()
        return Session(self, fixture.make(shape, self.protocol.seed))

    def read_rate(self, size: int) -> float:
        """Bytes a second of a kernel that only reads `size` bytes, median of 9 graphs of 8 launches."""
        buffer = torch.ones(size // 4, dtype=torch.int32, device="cuda")
        graph = Graph(self.stream, self.read(buffer, size, 8), 2, 8)
        return size / float(np.median([graph.replay() for _ in range(9)])) * 1e6

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


class Graph:
    """Warm-ups, an event, launches, an event, captured on one stream: no host time lies in between."""

    def __init__(self, stream: Any, call: Call, warmups: int, launches: int) -> None:
        from cuda.bindings import driver

        self._driver, self._stream, self._launches = driver, stream, launches
        self._events = [self._done(driver.cuEventCreate(0)) for _ in range(2)]
        with torch.cuda.stream(stream):
            call()
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream):
                for _ in range(warmups):
                    call()
                self._mark(0)
                for _ in range(launches):
                    call()
                self._mark(1)

    def _done(self, result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(f"CUDA driver: {result[0]}")
        return result[1] if len(result) > 1 else None

    def _mark(self, which: int) -> None:
        external = self._driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL.value
        stream = self._driver.CUstream(torch.cuda.current_stream().cuda_stream)
        self._done(self._driver.cuEventRecordWithFlags(self._events[which], stream, external))

    def replay(self) -> float:
        """Microseconds a launch of one replay."""
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        self._stream.synchronize()
        return float(self._done(self._driver.cuEventElapsedTime(*self._events))) * 1000 / self._launches


class Session:
    """One shape, its data on the device, its sides as calls on torch's current stream."""

    def __init__(self, rig: Rig, jobs: Jobs) -> None:
        self.rig, self.jobs, self.shape = rig, jobs, jobs.shape
        shape, sizes = self.shape, self.shape.sizes
        self.host_weights, self._weights = rig.weights(shape.pool, shape.rows, shape.cols)
        self._x = torch.from_numpy(jobs.x).cuda()
        self._ids = torch.from_numpy(jobs.ids).cuda()
        self._quantized = torch.empty(quantized_bytes(sizes), dtype=torch.uint8, device="cuda")
        self._out = torch.empty((shape.slots, shape.rows), dtype=torch.float32, device="cuda")
        tuning = tuned(sizes, rig.multiprocessors)
        self.plans = {Side(p.value): plan(sizes, tuning, p, architecture=rig.architecture) for p in Products}
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
        if rig.plugin is not None:
            plugin, flat = rig.plugin, self._weights.view(shape.pool, shape.rows, -1)
            batched = Batched(plugin, self._active_ids, shape.pool)
            self._calls[Side.VLLM_VEC] = lambda: plugin.vec(self._active_x, flat, self._active_ids, shape.rows)
            self._calls[Side.VLLM_BATCHED] = lambda: batched(self._active_x, flat, shape.rows)
        if rig.llama is not None:
            ids = jobs.ids[active].reshape(-1, shape.top_k)
            nodes = rig.protocol.llama_cpp.nodes
            self._llama = rig.llama.open(self.host_weights, jobs.x[tokens], ids, nodes)
        self._graphs: dict[str, Graph] = {}

    def call(self, side: Side) -> Call:
        """Enqueue one call of a side."""
        return self._calls[side]

    def _ours(self, side: Side) -> Call:
        sizes, chosen = self.shape.sizes, self.plans[side]
        pointers = [t.data_ptr() for t in (self._ids, self._weights, self._x, self._quantized, self._out)]

        def call() -> Any:
            self.rig.kernels.products(sizes, chosen, torch.cuda.current_stream().cuda_stream, *pointers)
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

        launch = self.rig.schedules.launch

        def product() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            name, grid = ("grouped" if ranked else "job_major"), (walk.tiles, walk.jobs, walk.bands)
            launch(name, stream, grid, (32, WARPS, 1), arguments)

        def call() -> Any:
            stream = torch.cuda.current_stream().cuda_stream
            self.rig.kernels.quantize_q8_1(stream, wide.data_ptr(), blocks.data_ptr(), wide.numel())
            if ranked:
                launch("rank_sort", stream, (-(-shape.slots // RANK_JOBS), 1, 1), (RANK_LANES, RANK_JOBS, 1), rank)
            product()
            return self._out

        self._products[side] = product
        return call

    def _empty(self) -> Call:
        sizes, chosen = self.shape.sizes, self.plans[Side.AUTO]
        return lambda: self.rig.kernels.nothing(sizes, chosen, torch.cuda.current_stream().cuda_stream)

    def _read(self) -> Call:
        """As many bytes as the weights of the used experts, read once, on the fastest grid."""
        size, plan = self.jobs.facts()["weight_bytes"], self.rig.protocol

        def time_of(call: Call) -> float:
            graph = Graph(self.rig.stream, call, plan.warmups, plan.launches)
            return float(np.median([graph.replay() for _ in range(3)]))

        return min((self.rig.read(self._weights, size, blocks) for blocks in READ_BLOCKS), key=time_of)

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

    def check(self) -> Checked:
        """Every side against ours, ours against the model on sampled slots, sentinels untouched."""
        rules, wrong = self.rig.protocol.correctness, set[Side]()
        ours = {side: self.output(side) for side in OURS}
        untouched = np.setdiff1d(np.arange(self.shape.slots), self._active)
        left = self._out.view(torch.uint8).cpu().numpy()[untouched]
        if not (left == POISON).all():
            wrong |= set(OURS)
        digests = {str(side): sha256_array(out) for side, out in ours.items()}
        wrong |= {side for side in OURS if digests[side] != digests[Side.AUTO]}
        reference = ours[Side.AUTO].astype(np.float64)
        errors = {}
        for side in self.rig.sides():
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
        return Checked(
            frozenset(wrong),
            {
                "output_sha256": digests,
                "samples": samples,
                "furthest_of_bound": furthest,
                "peer_errors": errors,
            },
        )

    def warm_up(self, series: Series) -> None:
        """Capture the series' graph."""
        if series.side is Side.LLAMA_CPP:
            assert self._llama is not None
            self._llama.warm_up(LLAMA_WARM_UPS)
            return
        if series.side is Side.READ:
            self._calls[Side.READ] = self._read()
        plan = self.rig.protocol
        self._graphs[series.name] = Graph(self.rig.stream, self._calls[series.side], plan.warmups, plan.launches)
        self._graphs[series.name].replay()

    def measure(self, series: Series) -> float:
        """Microseconds a call of one batch."""
        if series.side is Side.LLAMA_CPP:
            assert self._llama is not None
            return self._llama.node_us()
        return self._graphs[series.name].replay()

    def close(self) -> None:
        """Free what torch does not."""
        self._graphs.clear()
        if self._llama is not None:
            self._llama.close()


_SCHEDULE_SIDES = frozenset(Side(name) for name in BY_NAME if name in {s.value for s in Side})
