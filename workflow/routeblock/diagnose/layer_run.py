# SPDX-License-Identifier: Apache-2.0
"""One run of a layer on the twin, by row: its plan and launches, and any row of any surface without the others.

A row's bits depend on its operands and on the form of its block alone, so a plan from which other routes are left out
gives the same bits for those that stay, as long as the number of blocks stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.summation_tree import Element, Form, Terms, build, common_scale, form_of
from routeblock.moe.launches import Launch
from routeblock.moe.partition import Partition, partition
from routeblock.moe.routing import AlignedPlan
from routeblock.twin.gemm import UNSIGNED_ZERO_POINT, moe_gemm
from routeblock.twin.layer import GemmWeights, combine, silu_and_mul
from routeblock.twin.tensor_core import architecture_of, operand_type_of

GEMMS = ("w13", "w2")
SEGMENT = 64  # columns: the smallest thread_n, within which a row has one form


@dataclass(frozen=True)
class Setting:
    """How one GEMM is launched: thread sizes and grid, tensor cores, reduction between slices, batch-invariant mode."""

    launch: Launch
    architecture: str
    fp32_reduce: bool = True
    full_k: bool = False


@dataclass(frozen=True)
class LayerInputs:
    """What a layer computes with: hidden [M, H], topk_ids int32 [M, k], topk_weights float32 [M, k], the weights of
    `w13` and `w2`, and the row of each global expert in them, int32 [experts].
    """

    hidden: NDArray[Any]
    topk_ids: NDArray[np.int32]
    topk_weights: NDArray[np.float32]
    weights: Mapping[str, GemmWeights]
    group_size: int
    expert_rows: NDArray[np.int32]

    @property
    def top_k(self) -> int:
        """Routes of a token."""
        return int(self.topk_ids.shape[1])

    def tokens(self, chosen: Sequence[int]) -> LayerInputs:
        """The batch of some of the tokens, in this order."""
        rows = list(chosen)
        return replace(
            self,
            hidden=np.ascontiguousarray(self.hidden[rows]),
            topk_ids=np.ascontiguousarray(self.topk_ids[rows]),
            topk_weights=np.ascontiguousarray(self.topk_weights[rows]),
        )


@dataclass(frozen=True)
class GemmProblem:
    """One GEMM: a [rows, K], route r reads row r // top_k; topk_weights as `moe_gemm` takes them."""

    a: NDArray[Any]
    weights: GemmWeights
    group_size: int
    top_k: int
    topk_weights: NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weights.q.shape[2], self.weights.q.shape[1]

    def cut(self, blocks: int, setting: Setting) -> Partition:
        """The partition at a setting."""
        launch, (n, k) = setting.launch, self.shape
        return partition(
            blocks, n, k, launch.thread_n, launch.thread_k, launch.grid, self.group_size, full_k=setting.full_k
        )

    def compute(self, plan: AlignedPlan, setting: Setting) -> NDArray[Any]:
        """All rows; `plan` names experts by their rows in the weights."""
        q, zeros, scales = self.weights
        launch = setting.launch
        return moe_gemm(
            self.a, q, zeros, scales, plan, top_k=self.top_k, architecture=setting.architecture,
            thread_k=launch.thread_k, thread_n=launch.thread_n, grid=launch.grid, group_size=self.group_size,
            topk_weights=self.topk_weights, fp32_reduce=setting.fp32_reduce, full_k=setting.full_k,
        )  # fmt: skip

    def terms(self, expert: int, route: int, column: int) -> Terms:
        """The operands of one element; `expert` is a row of the weights."""
        q, zeros, scales = self.weights
        operand = operand_type_of(self.a.dtype, "diagnose")
        k = q.shape[1]
        nibbles = q[expert, :, column].astype(np.float32)
        if self.group_size == -1:
            zero = UNSIGNED_ZERO_POINT if zeros is None else zeros[expert, 0, column]
            w = nibbles - np.float32(zero)
        else:
            repeat = self.group_size
            zero = np.full(k, UNSIGNED_ZERO_POINT) if zeros is None else np.repeat(zeros[expert, :, column], repeat)
            scale = np.repeat(scales[expert, :, column].astype(np.float32), repeat)
            w = ((nibbles - zero.astype(np.float32)) * scale).astype(operand.dtype).astype(np.float32)
        return Terms(self.a[route // self.top_k].astype(np.float32), w, operand)

    def tail(self, expert: int, route: int, column: int) -> list[tuple[str, NDArray[Any]]]:
        """What the rounded sum is multiplied with, in the output dtype and in order: name, one element."""
        dtype = self.a.dtype
        factors = []
        if self.group_size == -1:
            factors.append(("column scale", self.weights.scales[expert, 0, column : column + 1]))
        if self.topk_weights is not None:
            factors.append(("top-k weight", self.topk_weights.reshape(-1)[route : route + 1].astype(dtype)))
        return factors


def only(plan: AlignedPlan, places: Mapping[int, int]) -> AlignedPlan:
    """The plan's blocks with these routes alone, each in the block given for it."""
    rows = np.full((plan.num_blocks, plan.block_size), plan.num_routes, np.int32)
    filled: dict[int, int] = {}
    for route, block in places.items():
        rows[block, filled.get(block, 0)] = route
        filled[block] = filled.get(block, 0) + 1
    return replace(plan, sorted_token_ids=rows.reshape(-1))


@dataclass(frozen=True)
class Run:
    """A layer under a plan (experts as rows of the weights) and a setting for each GEMM."""

    name: str
    inputs: LayerInputs
    plan: AlignedPlan
    settings: Mapping[str, Setting]
    given: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # surfaces that were recorded

    def problem(self, gemm: str) -> GemmProblem:
        """One of its GEMMs, with the operands that this run has there."""
        inputs = self.inputs
        if gemm == "w13":
            return GemmProblem(inputs.hidden, inputs.weights["w13"], inputs.group_size, inputs.top_k)
        a = self.surfaces["activation"]
        return GemmProblem(a, inputs.weights["w2"], inputs.group_size, 1, inputs.topk_weights)

    @cached_property
    def surfaces(self) -> dict[str, NDArray[Any]]:
        """All four surfaces, each computed when it is first asked for."""
        return _Surfaces(self)

    @cached_property
    def blocks(self) -> NDArray[np.int32]:
        """The block of each route."""
        return self.plan.block_of()

    @cached_property
    def cuts(self) -> dict[str, Partition]:
        """The partitions of both GEMMs."""
        found = {}
        for gemm in GEMMS:
            setting, (n, k) = self.settings[gemm], self.inputs.weights[gemm].q.shape[:0:-1]
            launch = setting.launch
            found[gemm] = partition(
                self.plan.num_blocks, n, k, launch.thread_n, launch.thread_k, launch.grid, self.inputs.group_size,
                full_k=setting.full_k,
            )  # fmt: skip
        return found

    def form(self, gemm: str, route: int, column: int) -> Form:
        """The form of an element of a GEMM."""
        setting = self.settings[gemm]
        launch, core = setting.launch, architecture_of(setting.architecture)
        block = int(self.blocks[route])
        return form_of(
            self.cuts[gemm], block, column, launch.thread_k, launch.thread_n, core, setting.fp32_reduce
        )  # fmt: skip

    def expert_row(self, route: int) -> int:
        """The row of a route's expert in the weights."""
        return int(self.plan.expert_ids[int(self.blocks[route])])


class _Surfaces(dict[str, NDArray[Any]]):
    def __init__(self, run: Run) -> None:
        super().__init__(run.given)
        self._run = run

    def __missing__(self, name: str) -> NDArray[Any]:
        run = self._run
        if name in GEMMS:
            self[name] = run.problem(name).compute(run.plan, run.settings[name])
        elif name == "activation":
            self[name] = silu_and_mul(self["w13"])
        else:
            self[name] = combine(self["w2"].reshape(*run.inputs.topk_ids.shape, -1))
        return self[name]


def elements(gemm: str, column: int, runs: tuple[Run, Run], routes: tuple[int, int]) -> tuple[Element, Element]:
    """The same element of a GEMM in two runs, in one scale."""
    terms = [run.problem(gemm).terms(run.expert_row(r), r, column) for run, r in zip(runs, routes, strict=True)]
    scale = common_scale(*terms)
    made = [Element(build(run.form(gemm, r, column)), t, scale) for run, r, t in zip(runs, routes, terms, strict=True)]
    return made[0], made[1]


def bits(x: NDArray[Any]) -> NDArray[np.uint16]:
    """The 16-bit words of an array."""
    return np.ascontiguousarray(x).view(np.uint16)
