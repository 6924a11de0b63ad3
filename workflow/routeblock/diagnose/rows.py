# SPDX-License-Identifier: Apache-2.0
"""Rows of a layer by form: each computed once, however many plans and launches give it the same form.

A row's bits depend on its operands and on the form of the block that it stands in. Forms get small numbers here, so
that whole plans compare as tuples of integers, and rows are kept under (route, form).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.layer_run import GEMMS, SEGMENT, GemmProblem, LayerInputs, Setting, only
from routeblock.moe.launches import Launch
from routeblock.moe.partition import partition
from routeblock.moe.routing import AlignedPlan
from routeblock.twin.layer import combine, silu_and_mul
from routeblock.twin.tensor_core import architecture_of

Settings = Mapping[str, Setting]
Row = NDArray[Any]
WORTH_THREADS = 48  # rows from which starting threads costs less than it saves


class Numbers:
    """Small numbers for things that are equal."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def __call__(self, thing: Any) -> int:
        return self._known.setdefault(thing, len(self._known))


class Forms:
    """The number of each block's form in a GEMM, equal where rows are computed alike."""

    def __init__(self, inputs: LayerInputs) -> None:
        self._inputs = inputs
        self._slices, self._number = Numbers(), Numbers()
        self._cuts: dict[Any, list[tuple[int, bool]]] = {}

    def _signatures(self, gemm: str, blocks: int, launch: Launch, full_k: bool) -> list[tuple[int, bool]]:
        """Of each block: a number for thread_k and the slices of its columns, and whether any tile is split."""
        key = gemm, blocks, launch, full_k
        if key not in self._cuts:
            n, k = self._inputs.weights[gemm].q.shape[:0:-1]
            cut = partition(
                blocks, n, k, launch.thread_n, launch.thread_k, launch.grid, self._inputs.group_size, full_k=full_k
            )
            repeat = launch.thread_n // SEGMENT
            found = []
            for block in range(blocks):
                tiles: list[tuple[tuple[int, int], ...]] = [((0, cut.k_tiles),)] * cut.n_tiles
                if (block + 1) * cut.n_tiles > cut.direct_tiles:
                    tiles = [tuple(cut.slices(block, n_tile)) for n_tile in range(cut.n_tiles)]
                columns = tuple(tile for tile in tiles for _ in range(repeat))
                found.append((self._slices((launch.thread_k, columns)), any(len(t) > 1 for t in tiles)))
            self._cuts[key] = found
        return self._cuts[key]

    def of_blocks(self, gemm: str, blocks: int, setting: Setting) -> list[int]:
        """The number of each block's form."""
        core = architecture_of(setting.architecture)
        signatures = self._signatures(gemm, blocks, setting.launch, setting.full_k)
        arithmetic = core.group, core.fraction_bits
        return [self._number((*arithmetic, s, split and not setting.fp32_reduce)) for s, split in signatures]


class Rows:
    """Rows of the routed surfaces, computed when they are first asked for.

    given: surfaces that were recorded (w13 or activation), from which later ones are computed.
    """

    def __init__(self, inputs: LayerInputs, given: Mapping[str, NDArray[Any]] | None = None) -> None:
        self.inputs, self.given = inputs, dict(given or {})
        self.forms = Forms(inputs)
        self._kept: dict[str, dict[tuple[int, ...], Row]] = {"w13": {}, "activation": {}, "w2": {}}
        self.computed = 0

    def gemms(self, surface: str) -> tuple[str, ...]:
        """The GEMMs that are launched between what is given and a surface."""
        if surface in ("w13", "activation"):
            return ("w13",)
        return ("w2",) if self.given else GEMMS

    def key(self, surface: str, plan: AlignedPlan, settings: Settings, block: int) -> tuple[int, ...]:
        """The form of a row of a block on a surface: equal keys, equal bits of one route."""
        return tuple(self.forms.of_blocks(g, plan.num_blocks, settings[g])[block] for g in self.gemms(surface))

    def keys(self, surface: str, plan: AlignedPlan, settings: Settings) -> list[tuple[int, ...]]:
        """The form of every block."""
        return list(
            zip(*(self.forms.of_blocks(g, plan.num_blocks, settings[g]) for g in self.gemms(surface)), strict=True)
        )

    def routed(
        self, surface: str, plan: AlignedPlan, settings: Settings, places: Iterable[tuple[int, int]]
    ) -> list[Row]:
        """The rows of a routed surface for (route, block): as if each route stood in that block."""
        wanted = list(places)
        keys = self.keys(surface, plan, settings)
        kept = self._kept[surface]
        missing = {(r, *keys[b]): (r, b) for r, b in wanted if (r, *keys[b]) not in kept}
        if surface == "activation" and missing:
            gate_up = self.routed("w13", plan, settings, missing.values())
            kept |= zip(missing, silu_and_mul(np.stack(gate_up)), strict=True)
        elif missing:
            for part in _parts(list(missing.values()), plan.block_size):
                rows = self._compute(surface, plan, settings, part)
                kept |= {(r, *keys[b]): row for (r, b), row in zip(part.items(), rows, strict=True)}
                self.computed += len(part)
        return [kept[r, *keys[b]] for r, b in wanted]

    def _compute(self, gemm: str, plan: AlignedPlan, settings: Settings, part: Mapping[int, int]) -> NDArray[Any]:
        """Rows of a GEMM, with the other routes left out of the plan and of the operands."""
        inputs, routes = self.inputs, list(part)
        weights = None
        if gemm == "w13":
            a = inputs.hidden[[r // inputs.top_k for r in routes]]
        else:
            a, weights = self._operands(plan, settings, part), inputs.topk_weights.reshape(-1)[routes]
        problem = GemmProblem(a, inputs.weights[gemm], inputs.group_size, 1, weights)
        alone = only(replace(plan, num_routes=len(routes)), dict(enumerate(part.values())))
        threads = numba.get_num_threads()
        try:
            if len(routes) < WORTH_THREADS:
                numba.set_num_threads(1)
            return problem.compute(alone, settings[gemm])
        finally:
            numba.set_num_threads(threads)

    def _operands(self, plan: AlignedPlan, settings: Settings, part: Mapping[int, int]) -> NDArray[Any]:
        """The rows that W2 reads."""
        if "activation" in self.given:
            return self.given["activation"][list(part)]
        if "w13" in self.given:
            return silu_and_mul(self.given["w13"][list(part)])
        return np.stack(self.routed("activation", plan, settings, part.items()))

    def final(self, plan: AlignedPlan, settings: Settings, token: int, blocks: Sequence[int]) -> Row:
        """The row of a token whose routes stand in these blocks (-1: no slot, a row of zeros)."""
        first = token * self.inputs.top_k
        width = self.inputs.weights["w2"].q.shape[2]
        routed = np.zeros((1, len(blocks), width), self.inputs.hidden.dtype)
        slots = [i for i, b in enumerate(blocks) if b >= 0]
        found = self.routed("w2", plan, settings, [(first + i, blocks[i]) for i in slots])
        for slot, row in zip(slots, found, strict=True):
            routed[0, slot] = row
        return np.asarray(combine(routed)[0])


def _parts(places: Sequence[tuple[int, int]], block_size: int) -> list[dict[int, int]]:
    """Places in as few plans as they fit: each route once, no block beyond its size."""
    parts: list[dict[int, int]] = []
    filled: list[dict[int, int]] = []
    for route, block in places:
        for part, count in zip(parts, filled, strict=True):
            if route not in part and count.get(block, 0) < block_size:
                break
        else:
            part, count = {}, {}
            parts.append(part)
            filled.append(count)
        part[route] = block
        count[block] = count.get(block, 0) + 1
    return parts
