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


class Path(StrEnum):
    """Which products a job takes. `auto`: dp4a up to `Plan.few` jobs of an expert, tensor cores above."""

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
    def suffix(self) -> str:
        """Of the kernels' names: rows of an odd number of blocks start at odd halves of a word."""
        return "odd" if self.blocks % 2 else "even"


@dataclass(frozen=True)
class Tuning:
    """What may be chosen freely: it moves time, never bits.

    warps: of a block of threads. tile_segments: segments of weights it holds at a time, about. tiles: that it takes one
    after another, `stages` of them in shared memory at once. few: up to so many jobs of an expert go through dp4a. fused_tokens: up to so many tokens every block
    of threads quantises for itself; above, a kernel before does it once.
    """

    warps: int = 4
    tile_segments: int = 64
    tiles: int = 1
    stages: int = 1
    few: int = 4
    fused_tokens: int = 8


@dataclass(frozen=True)
class Plan:
    """One launch of the products, after one of `quantize` unless `fused`."""

    tile_rows: int
    tiles: int
    slabs: int
    stages: int
    capacity: int
    few: int
    fused: bool
    threads: int
    grid: int
    shared_bytes: int


def plan(sizes: Sizes, tuning: Tuning, path: Path = Path.AUTO, *, shared_limit: int = 227 * 1024) -> Plan:
    """The launch for `sizes` on a GPU whose blocks may have `shared_limit` bytes of shared memory.

    Raises InputError if 16 rows with the activations of 8 jobs do not fit.
    """
    rows = max(16, tuning.tile_segments // sizes.segments // 16 * 16)
    rows = min(rows, -(-sizes.rows // 16) * 16)
    expected = -(-sizes.slots // min(sizes.experts, sizes.slots))  # jobs of an expert, were all used alike
    wanted = next((c for c in CAPACITIES if c >= 2 * expected - 2), CAPACITIES[-1])
    fitting = [
        (stages, r, c)
        for stages in range(min(tuning.stages, tuning.tiles), 0, -1)
        for r in range(rows, 0, -16)
        for c in reversed(CAPACITIES)
        if c <= wanted and shared_bytes(sizes, r, c, stages) <= shared_limit
    ]
    if not fitting:
        raise InputError(
            f"{sizes.cols:,} columns",
            where="q6k_dispatch",
            limit=f"{shared_bytes(sizes, 16, 8, 1):,} bytes of shared memory are needed, {shared_limit:,} are there",
            way_out="split the columns",
        )
    stages, tile_rows, capacity = fitting[0]
    tiles = min(tuning.tiles, -(-sizes.rows // tile_rows))
    slabs = -(-sizes.rows // (tile_rows * tiles))
    return Plan(
        tile_rows,
        tiles,
        slabs,
        stages,
        capacity,
        {Path.AUTO: tuning.few, Path.DP4A: ALWAYS, Path.TENSOR: NEVER}[path],
        sizes.tokens <= tuning.fused_tokens,
        WARP * tuning.warps,
        slabs * min(sizes.slots, sizes.experts),
        shared_bytes(sizes, tile_rows, capacity, stages),
    )


def shared_bytes(sizes: Sizes, tile_rows: int, capacity: int, stages: int) -> int:
    """Shared memory of a block of threads: header, weights, activations, sums of blocks."""
    tile = -(-tile_rows * sizes.blocks * BLOCK_BYTES // 16) * 16
    sums = 4 * sizes.blocks * capacity * (tile_rows + 1)
    return HEADER_BYTES + stages * tile + sizes.segments * capacity * ACTIVATION_STRIDE + sums


def quantized_bytes(sizes: Sizes) -> int:
    """The buffer that `quantize` fills."""
    return sizes.tokens * sizes.segments * ACTIVATION_BYTES
