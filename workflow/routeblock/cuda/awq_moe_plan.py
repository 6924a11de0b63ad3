# SPDX-License-Identifier: Apache-2.0
"""How awq_moe.cu is launched: everything follows from sizes that the host knows, never from the routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from routeblock.errors import InputError

UNIT = 64  # columns of a warp, and the depth of a K-tile
GROUP_SIZES = (32, 64, 128, 256)
SHARED_BYTES = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227}  # KiB a block: CUDA programming guide
SHARED_BYTES_SM = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228}  # KiB, of which 1 a resident block is taken
ONE_GROUP_SHIFT = 31
SUM_THREADS, SUM_COLUMNS = 256, 8
Gemm = Literal["w13", "w2"]


@dataclass(frozen=True)
class Sizes:
    """One call of the layer.

    tokens M, top_k k, experts whose weights are here, hidden H, intermediate I; group_size: -1 for one scale a column
    (a group as long as K is the same). dtype float16 or bfloat16; zero_points: uint4, else uint4b8.
    Raises InputError for what the kernels do not do: the caller takes another path then.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int
    group_size: int = 128
    dtype: str = "float16"
    zero_points: bool = True

    def __post_init__(self) -> None:
        for wrong, what, limit in (
            (self.tokens < 1 or self.top_k < 1, f"{self.tokens} tokens, top-k {self.top_k}", "1 or more of each"),
            (self.tokens * self.top_k >= 2**31 - 2**20, f"{self.routes:,} routes", "routes are counted in int32"),
            (self.experts < 1, f"{self.experts} experts", "1 or more"),
            (self.hidden < UNIT or self.hidden % UNIT > 0, f"hidden size {self.hidden}", "a multiple of 64"),
            (
                self.intermediate < UNIT or self.intermediate % UNIT > 0,
                f"intermediate size {self.intermediate}",
                "a multiple of 64, the unit of the scales' order",
            ),
            (self.dtype not in ("float16", "bfloat16"), f"dtype {self.dtype}", "float16 or bfloat16"),
            (
                self.group_size != -1
                and any(
                    k % self.group_size or (self.group_size != k and self.group_size not in GROUP_SIZES)
                    for k in self._depths
                ),
                f"group size {self.group_size} with K = {self.hidden} and {self.intermediate}",
                f"-1, K itself, or one of {GROUP_SIZES} that divides both",
            ),
            (
                self.experts * self.hidden * self.intermediate // 16 >= 2**32,
                f"{self.experts} experts of {self.hidden} x {self.intermediate}",
                "weights are addressed by 2^32 pieces of 16 bytes",
            ),
        ):
            if wrong:
                raise InputError(what, where="awq_moe", limit=limit, way_out="leave this layer to vLLM's path")

    @property
    def _depths(self) -> tuple[int, int]:
        return self.hidden, self.intermediate

    @property
    def routes(self) -> int:
        return self.tokens * self.top_k

    def shape(self, gemm: Gemm) -> tuple[int, int]:
        """(N, K)."""
        return (2 * self.intermediate, self.hidden) if gemm == "w13" else (self.hidden, self.intermediate)

    def groups(self, gemm: Gemm) -> int:
        """Groups along K; with 1 the scale is a column's and multiplies the rounded sum, as Marlin has it."""
        k = self.shape(gemm)[1]
        return 1 if self.group_size == -1 else k // self.group_size

    def group_shift(self, gemm: Gemm) -> int:
        """log2 of the group size as the kernel takes it."""
        return ONE_GROUP_SHIFT if self.groups(gemm) == 1 else self.group_size.bit_length() - 1

    @property
    def kind(self) -> str:
        """The part of a kernel's name that dtype and weight type decide."""
        return f"{'f16' if self.dtype == 'float16' else 'bf16'}_{'u4' if self.zero_points else 'u4b8'}"


@dataclass(frozen=True)
class Form:
    """A kernel's tiling, as AWQ_FORMS in awq_moe.cu has it: it moves time, never bits.

    tokens of a block of the plan; units of 64 columns a block of threads; K-tiles of 64 a stage; stages; blocks of
    threads that one multiprocessor holds.
    """

    tokens: int
    units: int
    tiles: int
    stages: int
    resident: int

    @property
    def name(self) -> str:
        return f"{self.tokens}x{self.units}"

    @property
    def threads(self) -> int:
        """Two warps a unit multiply, four copy."""
        return 64 * self.units + 128

    def shared_bytes(self, sizes: Sizes, gemm: Gemm) -> int:
        """Shared memory of a block of threads: stages, sums of one chain, outputs, barriers, lists of routes."""
        rows = max(1, (64 * self.tiles) >> sizes.group_shift(gemm))
        weights, inputs = self.units * 4 * self.tiles * 512, self.tokens * (128 * self.tiles + 16)
        stage = weights + inputs + rows * self.units * (128 + 32)
        together = min(self.tokens, 16)
        sums, outputs = self.units * together * 64 * 4, together * (128 * self.units + 16)
        lists = (self.stages + 1) * (16 + 12 * self.tokens)
        return self.stages * (stage + 2 * 8) + sums + outputs + lists


FORMS = {
    form.name: form
    for form in (
        Form(8, 2, 2, 6, 3),
        Form(8, 4, 2, 5, 2),
        Form(16, 4, 2, 4, 2),
        Form(32, 2, 2, 3, 3),
        Form(64, 4, 2, 4, 1),
    )
}
BLOCK_SIZES = tuple(sorted({form.tokens for form in FORMS.values()}))


@dataclass(frozen=True)
class Launch:
    """One GEMM's launch. The plan that it takes has blocks of `form.tokens` routes."""

    form: Form
    grid: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        return self.form.threads


@dataclass(frozen=True)
class Plan:
    """The launches of one layer. block_size: of the alignment."""

    w13: Launch
    w2: Launch

    @property
    def block_size(self) -> int:
        return self.w13.form.tokens


def blocks_bound(sizes: Sizes, block_size: int) -> int:
    """The most blocks that an alignment of these routes can have."""
    most = min(sizes.routes, sizes.experts)
    return min(sizes.routes, (sizes.routes - most) // block_size + most)


def launch(sizes: Sizes, gemm: Gemm, form: Form, architecture: str, multiprocessors: int) -> Launch:
    """The launch of `form`: persistent blocks of threads, no more than there can be tiles.

    Raises InputError if its shared memory does not fit.
    """
    shared = form.shared_bytes(sizes, gemm)
    if architecture not in SHARED_BYTES or shared > SHARED_BYTES[architecture] * 1024:
        raise InputError(
            f"{shared:,} bytes of shared memory on {architecture}",
            where="awq_moe",
            limit=", ".join(f"{name} has {1024 * kib:,}" for name, kib in SHARED_BYTES.items()),
            way_out="take a form with fewer stages or tokens",
        )
    resident = max(1, min(form.resident, SHARED_BYTES_SM[architecture] * 1024 // (shared + 1024)))
    columns = sizes.shape(gemm)[0] // UNIT
    # Tiles of W13 hold as many up units as gate units.
    tiles = -(-columns // 2 // (form.units // 2)) if gemm == "w13" else -(-columns // form.units)
    grid = min(resident * multiprocessors, blocks_bound(sizes, form.tokens) * tiles)
    return Launch(form, grid, shared)


def plan(
    sizes: Sizes,
    *,
    architecture: str = "sm_90",
    multiprocessors: int = 132,
    block_size: int | None = None,
    w13_units: int | None = None,
    w2_units: int | None = None,
) -> Plan:
    """The launches that serve these sizes, or those of a chosen block size and width.

    Raises InputError if no such form exists or none fits the GPU.
    """
    limit = 1024 * SHARED_BYTES.get(architecture, 0)
    blocks = [block_size] if block_size else [b for b in reversed(BLOCK_SIZES) if b <= tuned_block(sizes)]
    wanted: tuple[tuple[Gemm, int | None], ...] = (("w13", w13_units), ("w2", w2_units))
    for block in blocks:
        chosen = []
        for gemm, units in wanted:
            forms = [f for f in FORMS.values() if f.tokens == block and units in (None, f.units)]
            fitting = [f for f in forms if f.shared_bytes(sizes, gemm) <= limit]
            if fitting:
                form = tuned_form(sizes, gemm, fitting, multiprocessors)
                chosen.append(launch(sizes, gemm, form, architecture, multiprocessors))
        if len(chosen) == len(wanted):
            return Plan(*chosen)
    raise InputError(
        f"blocks of {blocks[0]} routes on {architecture}",
        where="awq_moe",
        limit=f"forms are {', '.join(FORMS)}; {limit:,} bytes of shared memory",
        way_out="choose another block size, or leave this layer to vLLM's path",
    )


def tuned_block(sizes: Sizes) -> int:
    """Routes of a block: found to be fast on an H200."""
    each = sizes.routes / sizes.experts  # were all experts used alike
    for limit, tokens in ((5, 8), (12, 16), (20, 32)):
        if each <= limit:
            return tokens
    return 64


def tuned_form(sizes: Sizes, gemm: Gemm, forms: list[Form], multiprocessors: int) -> Form:
    """Of forms of one block size: the widest that still has one tile and a half for each multiprocessor."""
    columns = sizes.shape(gemm)[0] // UNIT
    for form in sorted(forms, key=lambda f: -f.units):
        if min(sizes.routes, sizes.experts) * columns // form.units >= 1.5 * multiprocessors:
            return form
    return min(forms, key=lambda f: f.units)
