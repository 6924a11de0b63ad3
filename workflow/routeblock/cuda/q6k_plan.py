# SPDX-License-Identifier: Apache-2.0
"""How q6k_dispatch.cu is launched: everything follows from sizes that the host knows, never from the ids."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from routeblock.errors import InputError

WARP = 32
BLOCK_BYTES, BLOCK_WEIGHTS = 210, 256
ACTIVATION_BYTES, ACTIVATION_STRIDE, HEADER_BYTES = 576, 592, 512  # as in q6k_dispatch.cu
CAPACITIES = (8, 16, 32)  # jobs whose activations a block of threads holds at a time
MAX_SLOTS = 65_535
NEVER, ALWAYS = 0, 2**31 - 1
# Shared memory that a block of threads may have, bytes: CUDA programming guide, technical specifications by capability.
SHARED_BYTES = {"sm_70": 96, "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227}


class Products(StrEnum):
    """Which products a job takes. `auto`: dp4a up to `Tuning.few` jobs of an expert, tensor cores above."""

    AUTO = "auto"
    DP4A = "dp4a"
    TENSOR = "tensor"


@dataclass(frozen=True)
class Sizes:
    """One call: slots = tokens * top_k, experts [experts, rows, cols]."""

    slots: int
    experts: int
    top_k: int
    rows: int
    cols: int

    def __post_init__(self) -> None:
        for wrong, what, limit in (
            (not 0 < self.slots <= MAX_SLOTS, f"{self.slots:,} job slots", f"1 to {MAX_SLOTS:,}"),
            (not 0 < self.experts <= MAX_SLOTS, f"{self.experts:,} experts", f"1 to {MAX_SLOTS:,}"),
            (
                self.top_k < 1 or self.slots % max(self.top_k, 1) != 0,
                f"top_k {self.top_k} with {self.slots} slots",
                "slots are tokens times top_k",
            ),
            (self.rows < 1, f"{self.rows} rows", "1 or more"),
            (self.cols < 1 or self.cols % BLOCK_WEIGHTS != 0, f"{self.cols} columns", "a multiple of 256"),
        ):
            if wrong:
                raise InputError(what, where="q6k_dispatch", limit=limit, way_out="split the jobs or pad the matrix")

    @property
    def tokens(self) -> int:
        return self.slots // self.top_k

    @property
    def blocks(self) -> int:
        """Q6_K blocks in a row."""
        return self.cols // BLOCK_WEIGHTS

    @property
    def segments(self) -> int:
        return -(-self.blocks // 2)

    @property
    def groups(self) -> int:
        """The most experts that can have jobs: blocks of threads are launched for so many."""
        return min(self.slots, self.experts)

    @property
    def expected_jobs(self) -> int:
        """Jobs of an expert, were all used alike."""
        return -(-self.slots // self.groups)

    @property
    def suffix(self) -> str:
        """Of the kernels' names: rows of an odd number of blocks start at odd halves of a word."""
        return "odd" if self.blocks % 2 else "even"


@dataclass(frozen=True)
class Tuning:
    """What may be chosen freely: it moves time, never bits.

    warps: of a block of threads. tile_segments: segments of weights it holds at a time, about. tiles: that it takes one
    after another. capacity: jobs whose activations it holds. few: up to so many jobs of an expert go through dp4a.
    fused: every block of threads quantises for itself; else a kernel before does it once.
    """

    warps: int
    tile_segments: int
    tiles: int
    capacity: int
    few: int
    fused: bool


def tuned(sizes: Sizes, multiprocessors: int) -> Tuning:
    """What was found to be fast on an H200, at the shapes that its protocol names for tuning."""
    capacity = next((c for c in CAPACITIES if c >= 2 * sizes.expected_jobs - 2), CAPACITIES[-1])
    wide = capacity > CAPACITIES[0] and capacity * sizes.segments >= 32  # activations take much of shared memory
    segments = 128 if wide and sizes.segments > 1 else 64
    blocks = -(-sizes.rows // tile_rows(sizes, segments)) * sizes.groups
    return Tuning(
        warps=8 if wide else 4,
        tile_segments=segments,
        tiles=min(4, max(1, round(blocks / (4 * multiprocessors)))),
        capacity=capacity,
        few=4,
        fused=sizes.tokens <= 2 or sizes.expected_jobs * sizes.segments <= 1,
    )


@dataclass(frozen=True)
class Plan:
    """One launch of the products, after one of `quantize` unless `fused`."""

    tile_rows: int
    tiles: int
    slabs: int
    capacity: int
    few: int
    fused: bool
    threads: int
    grid: int
    shared_bytes: int


def plan(sizes: Sizes, tuning: Tuning, path: Products = Products.AUTO, *, architecture: str = "sm_90") -> Plan:
    """The launch for `sizes`. Raises InputError if 16 rows with the activations of 8 jobs do not fit, or the GPU is
    unknown."""
    if architecture not in SHARED_BYTES:
        raise InputError(
            f"a GPU of {architecture}",
            where="q6k_dispatch",
            limit=f"shared memory is known of {', '.join(SHARED_BYTES)}",
            way_out="add the architecture to cuda/q6k_plan.py",
        )
    limit = SHARED_BYTES[architecture] * 1024
    fitting = [
        (rows, capacity)
        for rows in range(tile_rows(sizes, tuning.tile_segments), 0, -16)
        for capacity in reversed(CAPACITIES)
        if capacity <= tuning.capacity and shared_bytes(sizes, rows, capacity) <= limit
    ]
    if not fitting:
        raise InputError(
            f"{sizes.cols:,} columns",
            where="q6k_dispatch",
            limit=f"{shared_bytes(sizes, 16, CAPACITIES[0]):,} bytes of shared memory are needed, {limit:,} are there",
            way_out="split the columns",
        )
    rows, capacity = fitting[0]
    tiles = min(tuning.tiles, -(-sizes.rows // rows))
    slabs = -(-sizes.rows // (rows * tiles))
    return Plan(
        rows,
        tiles,
        slabs,
        capacity,
        {Products.AUTO: tuning.few, Products.DP4A: ALWAYS, Products.TENSOR: NEVER}[path],
        tuning.fused,
        WARP * tuning.warps,
        slabs * sizes.groups,
        shared_bytes(sizes, rows, capacity),
    )


def tile_rows(sizes: Sizes, segments: int) -> int:
    """Rows, a multiple of 16, of about so many segments."""
    return min(max(16, segments // sizes.segments // 16 * 16), -(-sizes.rows // 16) * 16)


def shared_bytes(sizes: Sizes, rows: int, capacity: int) -> int:
    """Shared memory of a block of threads: header, weights, activations, sums of blocks."""
    tile = -(-rows * sizes.blocks * BLOCK_BYTES // 16) * 16
    sums = 4 * sizes.blocks * capacity * (rows + 1)
    return HEADER_BYTES + tile + sizes.segments * capacity * ACTIVATION_STRIDE + sums


def quantized_bytes(sizes: Sizes) -> int:
    """The buffer that `quantize` fills."""
    return sizes.tokens * sizes.segments * ACTIVATION_BYTES
