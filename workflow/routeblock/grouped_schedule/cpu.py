# SPDX-License-Identifier: Apache-2.0
"""The schedules on a CPU: the same orders, fusion and roundings as the CUDA kernels, walked by numba threads.

Outputs carry the bits of `moe.q6k_dot.dot` and so of the GPU. Times are this CPU's own and say nothing of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numba
import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from routeblock.grouped_schedule.fixture import Fixture
from routeblock.grouped_schedule.schedules import Arm, Geometry, Grouping, geometry, is_fused

TILE_ROWS = 32  # rows that a thread takes at a time; a band shorter than that is one tile
IDLE = 0xFFFFFFFF  # a sentinel's place in a packed order

Array = NDArray[Any]

_HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


@njit(cache=True)
def _key(ids: Array, job: int) -> Any:
    """The packed place of a job: expert in the upper 16 bits, job in the lower; sentinels above all of them."""
    return np.int64(ids[job]) << 16 | job if ids[job] >= 0 else np.int64(1) << 32 | job


@njit(cache=True)
def rank_order(ids: Array, order: Array) -> None:
    """Fill `order` by rank: a job goes where as many jobs have a smaller key. Keys differ, so the order is stable."""
    for job in range(ids.size):
        key = _key(ids, job)
        rank = 0
        for other in range(ids.size):
            rank += _key(ids, other) < key
        order[rank] = key if ids[job] >= 0 else IDLE


@njit(cache=True)
def serial_order(ids: Array, order: Array) -> None:
    """The same order by insertion, one job after another."""
    for job in range(ids.size):
        place = job
        packed = _key(ids, job) if ids[job] >= 0 else IDLE
        while place > 0 and order[place - 1] > packed:
            order[place] = order[place - 1]
            place -= 1
        order[place] = packed


@njit(cache=True)
def _partner_by_token(ids: Array, slot: int) -> int:
    """For unsorted pairs: the slot fused with this one, -1 if it runs alone, -2 if another runs it."""
    half = ids.size // 2
    token = slot >= half
    for other in range(half if token else 0, slot):
        if ids[other] == ids[slot]:
            return -1
    for other in range(0 if token else half, half if token else ids.size):
        if ids[other] == ids[slot]:
            return -2 if token else other
    return -1


@njit(cache=True)
def _partner_in_order(order: Array, place: int) -> int:
    """For a sorted order: the job fused with the one at `place`, -1 if it runs alone, -2 if another runs it."""
    expert = order[place] >> 16
    before = 0
    while before < place and order[place - before - 1] >> 16 == expert:
        before += 1
    if before & 1:
        return -2
    if place + 1 < order.size and order[place + 1] != IDLE and order[place + 1] >> 16 == expert:
        return int(order[place + 1] & 0xFFFF)
    return -1


@njit(cache=True)
def _unpack_row(row: Array, half: Array, q: Array, steps: Array, scales: Array) -> None:
    """Weights of one row: q int8 [n, 8, 32] less 32 in groups of 32, scales [n, 16], the block's d [n]."""
    # Constant shifts and one output a loop: in this form LLVM works on bytes, three times as fast.
    for block in range(row.shape[0]):
        b, out = row[block], q[block]
        for h in range(2):
            low0, low1 = b[64 * h : 64 * h + 32], b[64 * h + 32 : 64 * h + 64]
            high = b[128 + 32 * h : 160 + 32 * h]
            g0, g1, g2, g3 = out[4 * h], out[4 * h + 1], out[4 * h + 2], out[4 * h + 3]
            for j in range(32):
                g0[j] = np.int8((low0[j] & 15) | ((high[j] & 3) << 4)) - np.int8(32)
            for j in range(32):
                g1[j] = np.int8((low1[j] & 15) | ((high[j] & 12) << 2)) - np.int8(32)
            for j in range(32):
                g2[j] = np.int8((low0[j] >> 4) | (high[j] & 48)) - np.int8(32)
            for j in range(32):
                g3[j] = np.int8((low1[j] >> 4) | ((high[j] & 192) >> 2)) - np.int8(32)
        for j in range(16):
            scales[block, j] = np.int8(b[192 + j])
        steps[block] = half[np.uint16(b[208]) | np.uint16(b[209]) << 8]


@njit(cache=True)
def _dot(q: Array, steps: Array, scales: Array, activations: Array, half: Array, part: Array, lanes: Array) -> Any:
    """One row sum with the roundings of `moe.q6k_dot.dot`."""
    for lane in range(32):
        lanes[lane] = np.float32(0)
    for block in range(q.shape[0]):
        for h in range(2):
            for p in range(2):
                for i in range(2):
                    group = 4 * h + 2 * p + i
                    a = activations[8 * block + group]
                    a_step = half[np.uint16(a[0]) | np.uint16(a[1]) << 8]
                    w = q[block, group]
                    for k in range(8):
                        total = np.int32(0)
                        for j in range(4 * k, 4 * k + 4):
                            total += np.int32(w[j]) * np.int32(np.int8(a[4 + j]))
                        scaled = np.float32(total * scales[block, 2 * group + k // 4]) * a_step
                        if p == 0:
                            part[8 * i + k] = scaled
                        else:
                            lanes[16 * h + 8 * i + k] += (part[8 * i + k] + scaled) * steps[block]
    width = 16
    while width:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


@njit(cache=True)
def _leaders(ids: Array, order: Array, in_order: bool, fused: bool) -> Any:
    """The jobs that are run, in their order, each with its partner or -1: int64 [n, 2]."""
    found = np.empty((ids.size, 2), np.int64)
    n = 0
    for place in range(ids.size):
        if in_order and order[place] == IDLE:
            break
        job = int(order[place] & 0xFFFF) if in_order else place
        if ids[job] < 0:
            continue
        partner = np.int64(-1)
        if fused:
            partner = np.int64(_partner_in_order(order, place) if in_order else _partner_by_token(ids, job))
        if partner != -2:
            found[n, 0], found[n, 1] = job, partner
            n += 1
    return found[:n]


@njit(parallel=True, cache=True)
def _walk(
    threads: int,
    ids: Array,
    leaders: Array,
    weights: Array,
    activations: Array,
    half: Array,
    out: Array,
    walk: tuple[int, int, int, int],
) -> None:
    """Tiles in the order x = tile in band, y = job, z = band, dealt to the threads in turn."""
    tiles, bands, tile_rows, band_rows = walk
    rows, n = weights.shape[1], weights.shape[2]
    for thread in prange(threads):
        q = np.empty((n, 8, 32), np.int8)
        steps, scales = np.empty(n, np.float32), np.empty((n, 16), np.int32)
        part, lanes = np.empty(16, np.float32), np.empty(32, np.float32)
        for unit in range(thread, tiles * len(leaders) * bands, threads):
            tile, place, band = unit % tiles, unit // tiles % len(leaders), unit // (tiles * len(leaders))
            job, partner = leaders[place]
            first = band * band_rows + tile * tile_rows
            for row in range(first, min(first + tile_rows, (band + 1) * band_rows, rows)):
                _unpack_row(weights[ids[job], row], half, q, steps, scales)
                out[job, row] = _dot(q, steps, scales, activations[job], half, part, lanes)
                if partner >= 0:
                    out[partner, row] = _dot(q, steps, scales, activations[partner], half, part, lanes)


@dataclass(frozen=True)
class Clocked:
    """One launch: microseconds of grouping and of the dot products, by the monotonic clock."""

    grouping_us: float
    compute_us: float

    @property
    def inclusive_us(self) -> float:
        return self.grouping_us + self.compute_us


def make_order(arm: Arm, ids: NDArray[np.int32]) -> NDArray[np.uint32]:
    """The packed order, uint32 [slots], that `arm` walks: (expert << 16 | job), 0xFFFFFFFF for a sentinel, last."""
    order = np.full(ids.size, IDLE, np.uint32)
    if arm.grouping is Grouping.RANK:
        rank_order(ids, order)
    elif arm.grouping is Grouping.SERIAL:
        serial_order(ids, order)
    return order


def walk_of(arm: Arm, fixture: Fixture) -> Geometry:
    """The CPU's walk of `arm`: tiles of 32 rows, or of the band where that is shorter."""
    return geometry(arm, fixture.cell.slots, fixture.cell.rows, min(arm.band or TILE_ROWS, TILE_ROWS))


def launch(arm: Arm, fixture: Fixture, out: NDArray[np.float32], threads: int) -> Clocked:
    """Run `arm` once on `threads` threads into `out` float32 [slots, rows]; a sentinel's row is left alone."""
    numba.set_num_threads(threads)
    ids, g = fixture.ids, walk_of(arm, fixture)
    walk = (g.tiles, g.bands, g.tile_rows, g.band_rows)
    start = perf_counter_ns()
    order = make_order(arm, ids)
    grouped = perf_counter_ns()
    leaders = _leaders(ids, order, arm.grouping is not Grouping.NONE, is_fused(arm, fixture.cell.family))
    _walk(threads, ids, leaders, fixture.weights, fixture.activations, _HALF, out, walk)
    end = perf_counter_ns()
    return Clocked((grouped - start) / 1000, (end - grouped) / 1000)
