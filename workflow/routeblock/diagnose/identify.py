# SPDX-License-Identifier: Apache-2.0
"""Which launches, and which plans, reproduce an output: the whole class of them, and for each other candidate the first
element that contradicts it.

A row's bits depend on its operands and on its form (`layer_run`), so a row is computed once for each form that some
candidate gives it, however many candidates share it. Rows are taken in order, and a candidate that a row contradicts
takes no part in later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.layer_run import GEMMS, LayerInputs, Run, Setting, bits
from routeblock.diagnose.rows import Numbers, Rows
from routeblock.errors import InputError
from routeblock.moe.devices import DEVICES
from routeblock.moe.launches import Launch
from routeblock.moe.partition import thread_sizes
from routeblock.moe.routing import AlignedPlan
from routeblock.twin.tensor_core import ARCHITECTURES

BLOCKS_PER_SM = (1, 2, 3, 4)
GRIDS = tuple(sorted({gpu.sms * blocks for gpu, blocks in product(DEVICES.values(), BLOCKS_PER_SM)}))


@dataclass(frozen=True)
class Candidate:
    """A plan, by name, and how the GEMM was launched (for `w2` and `final` without an activation: both GEMMs)."""

    plan: str
    setting: Setting

    @property
    def settings(self) -> dict[str, Setting]:
        """The setting of each GEMM."""
        return dict.fromkeys(GEMMS, self.setting)

    def document(self) -> dict[str, Any]:
        """The candidate as JSON."""
        setting = self.setting
        return {
            "plan": self.plan,
            "thread_k": setting.launch.thread_k,
            "thread_n": setting.launch.thread_n,
            "grid": setting.launch.grid,
            "reduction": "float32" if setting.fp32_reduce else "output dtype",
            "architecture": setting.architecture,
            "full_k": setting.full_k,
        }


@dataclass(frozen=True)
class Contradiction:
    """The first element, by row and column, at which a candidate gives other bits than the output has."""

    row: int
    column: int
    given: int
    computed: int


@dataclass(frozen=True)
class Identified:
    """The candidates that reproduce every element; the others, each with its contradiction; what was computed.

    classes: candidates that give every row the same form are one class. rows_computed: rows, each counted once a form.
    """

    reproduce: tuple[Candidate, ...]
    excluded: Mapping[Candidate, Contradiction]
    classes: int
    rows_computed: int
    rows: int


def settings(
    block_size: int,
    shapes: Iterable[tuple[int, int]],
    grids: Sequence[int] = GRIDS,
    architectures: Sequence[str] = tuple(ARCHITECTURES),
) -> list[Setting]:
    """Every combination of thread sizes that exist for the block size and divide the shapes (N, K), grid, architecture,
    reduction and full K.
    """
    fit = [
        (k, n) for k, n in thread_sizes(block_size) if all(shape[0] % n == 0 and shape[1] % k == 0 for shape in shapes)
    ]
    return [
        Setting(Launch(*sizes, grid), architecture, fp32, full_k)
        for sizes, grid, architecture, fp32, full_k in product(fit, grids, architectures, (True, False), (False, True))
    ]


def identify(
    inputs: LayerInputs,
    surface: str,
    output: NDArray[Any],
    plans: Mapping[str, AlignedPlan],
    candidates: Sequence[Candidate],
    given: Mapping[str, NDArray[Any]] | None = None,
    progress: Callable[[float], None] | None = None,
) -> Identified:
    """Which candidates reproduce `output`, the rows of `surface`.

    plans name experts by their rows in the weights. given: earlier surfaces of the same run (w13 or activation), from
    which W2 is computed; without them one setting is taken for both GEMMs. Rows of routes that take no slot are not
    written by a GPU and not compared.
    Raises InputError for an output of another shape or dtype, and without candidates.
    """
    given = {name: x for name, x in (given or {}).items() if name in ("w13", "activation") and name != surface}
    if surface == "activation":
        given = {}
    top_k, routes = inputs.top_k, inputs.topk_ids.size
    width = {"w13": inputs.weights["w13"].q.shape[2], "activation": inputs.weights["w2"].q.shape[1]}
    shape = (routes // top_k if surface == "final" else routes, width.get(surface, inputs.weights["w2"].q.shape[2]))
    if output.shape != shape or output.dtype != inputs.hidden.dtype or not candidates:
        raise InputError(
            f"an output {output.dtype} {output.shape}, {len(candidates)} candidates",
            where=f"identify {surface}",
            limit=f"{inputs.hidden.dtype} {shape} for these inputs, and at least one candidate",
            way_out="give the surface of this batch, and thread sizes that divide the layer's shape",
        )
    words = bits(output)
    rows_of = Rows(inputs, given)
    owners = {name: plan.block_of() for name, plan in plans.items()}
    members: dict[tuple[int, ...], list[Candidate]] = {}
    number = Numbers()
    for candidate in candidates:
        plan = plans[candidate.plan]
        of_block = np.array([*map(number, rows_of.keys(surface, plan, candidate.settings)), -1])
        of_row: list[int] = of_block[owners[candidate.plan]].tolist()
        if surface == "final":
            of_row = [number(tuple(of_row[i : i + top_k])) for i in range(0, len(of_row), top_k)]
        members.setdefault(tuple(of_row), []).append(candidate)

    found: dict[tuple[int, int], Contradiction | None] = {}

    def compute(candidate: Candidate, rows: Sequence[int], row_forms: Sequence[int]) -> None:
        plan, owner = plans[candidate.plan], owners[candidate.plan]
        if surface == "final":
            blocks = owner.reshape(-1, top_k)
            computed = [rows_of.final(plan, candidate.settings, t, blocks[t].tolist()) for t in rows]
        else:
            computed = rows_of.routed(surface, plan, candidate.settings, [(r, int(owner[r])) for r in rows])
        for row, form, values in zip(rows, row_forms, computed, strict=True):
            found[row, form] = _first(words[row : row + 1], bits(values)[None], row)

    alive = dict(members)
    excluded: dict[Candidate, Contradiction] = {}
    start, size = 0, 1
    while start < len(words) and alive:
        stop = min(start + size, len(words))
        for rows, those in list(alive.items()):
            needed = [r for r in range(start, stop) if rows[r] != -1 and (r, rows[r]) not in found]
            if needed:
                compute(those[0], needed, [rows[r] for r in needed])
            wrong = next((c for r in range(start, stop) if rows[r] != -1 and (c := found[r, rows[r]])), None)
            if wrong is not None:
                excluded |= dict.fromkeys(those, wrong)
                del alive[rows]
        start, size = stop, min(2 * stop, 4 * size)
        if progress:
            progress(start / len(words))
    reproduce = [c for those in alive.values() for c in those]
    order = {c: i for i, c in enumerate(candidates)}
    return Identified(
        tuple(sorted(reproduce, key=order.__getitem__)),
        {c: excluded[c] for c in candidates if c in excluded},
        len(members),
        rows_of.computed,
        len(words),
    )


def by_brute_force(
    inputs: LayerInputs,
    surface: str,
    output: NDArray[Any],
    plans: Mapping[str, AlignedPlan],
    candidates: Sequence[Candidate],
    given: Mapping[str, NDArray[Any]] | None = None,
) -> dict[Candidate, Contradiction | None]:
    """The same by computing the whole surface for every candidate: the control."""
    words = bits(output)
    found: dict[Candidate, Contradiction | None] = {}
    for candidate in candidates:
        run = Run(candidate.plan, inputs, plans[candidate.plan], candidate.settings, given or {})
        computed = bits(run.surfaces[surface])
        found[candidate] = _first(words, computed)
    return found


def _first(words: NDArray[np.uint16], computed: NDArray[np.uint16], row: int = 0) -> Contradiction | None:
    where = np.argwhere(computed != words)
    if not len(where):
        return None
    at, column = (int(x) for x in where[0])
    return Contradiction(row + at, column, int(words[at, column]), int(computed[at, column]))
