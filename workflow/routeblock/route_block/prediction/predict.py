# SPDX-License-Identifier: Apache-2.0
"""The frozen prediction: from plans and launches alone, before any arithmetic, which bits can differ between which
runs.

A route's signature at a GEMM is the list of its block's slices over all N-tiles. Equal signatures are equal arithmetic
on equal inputs, so equal bits; where a signature changes, bits can change. W2 reads what W13 wrote, so a route whose
W13 signature changes can change on every later surface.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import canonical_json, sha256_bytes
from routeblock.moe.launches import Launch
from routeblock.moe.partition import Partition
from routeblock.moe.routing import AlignedPlan, changed_memberships
from routeblock.route_block.facts import CELLS, HISTORIES, SURFACES, Cell, Pairs, injected_plan
from routeblock.route_block.fixtures.exchange import exchange_for
from routeblock.route_block.fixtures.fixture import Exchange, LayerFixture, Size, first_fault, pairs_of
from routeblock.route_block.operating_point import CUDA, GEMMS, cut, full_k_grid, lane_facts, operating_point

FORMAT = "routeblock.prediction.v1"
CAPTURED = "captured"
TRANSPOSED_GRID = 240  # of the superseded prediction of the study, which had thread_k and thread_n swapped


def signatures(plan: AlignedPlan, partition: Partition, thread_k: int) -> list[Any]:
    """For each route the (thread_k, slices of every N-tile) of its block; None for a route without a slot.

    thread_k belongs to it: it sets the warps along K, whose sums are added in a fixed order.
    """
    per_block = [(thread_k, partition.signature(b)) for b in range(partition.blocks)]
    return [None if b < 0 else per_block[b] for b in plan.block_of()]


def changed_routes(first: Sequence[Any], second: Sequence[Any]) -> list[int]:
    """Routes whose signatures differ, ascending."""
    return [r for r, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]


def reach(w13: Sequence[int], w2: Sequence[int], top_k: int) -> dict[str, list[int]]:
    """Rows of each surface that can differ when these routes change signature: routes, and tokens for `final`."""
    routes = sorted({*w13, *w2})
    return {
        "w13": sorted(w13),
        "activation": sorted(w13),
        "w2": routes,
        "final": sorted({r // top_k for r in routes}),
    }


class Arm:
    """A cell under a history as the predictor sees it: its plan and its launches."""

    def __init__(
        self, fixture: LayerFixture, cell: Cell, history: str, plan: AlignedPlan, launches: Mapping[str, Launch]
    ) -> None:
        self.plan, self.launches = plan, launches
        self.cuts = {g: cut(fixture.spec, g, plan.num_blocks, launches[g]) for g in GEMMS}
        self.signatures = {g: signatures(plan, self.cuts[g], launches[g].thread_k) for g in GEMMS}

    def describe(self) -> dict[str, Any]:
        """The arm's entry in the prediction."""
        return {
            "fingerprint": self.plan.fingerprint(),
            "launches": {g: list(self.launches[g]) for g in GEMMS},
            "single_slice": {g: self.cuts[g].is_single_slice for g in GEMMS},
            "split_routes": {g: self._split_routes(g) for g in GEMMS},
        }

    def _split_routes(self, gemm: str) -> int:
        partition = self.cuts[gemm]
        split = {b for b in range(partition.blocks) if any(len(s) > 1 for s in partition.signature(b))}
        return int(np.isin(self.plan.block_of(), list(split)).sum())


def arms(
    fixture: LayerFixture,
    lane: str,
    point: str,
    plans: Mapping[str, AlignedPlan],
    grid: int | None = None,
    pairs: Pairs | None = None,
) -> dict[tuple[str, str], Arm]:
    """Every cell and history that there is a plan for.

    `grid` overrides the derived grid of `full_k`, `pairs` the exchange pairs of the fixture.
    """
    native = operating_point(point, lane, fixture.spec).launches
    blocks = plans[HISTORIES[0]].num_blocks
    chosen = grid or full_k_grid(fixture.spec, blocks, native["w13"])
    single = {g: native[g]._replace(grid=chosen) for g in GEMMS}
    found = {}
    for cell in CELLS.values():
        for history in HISTORIES:
            plan = injected_plan(
                cell, history, plans, pairs or fixture.pairs, fixture.topk_ids, fixture.spec["num_experts"]
            )
            if plan is not None:
                found[cell.name, history] = Arm(fixture, cell, history, plan, single if cell.full_k_grid else native)
    return found


def transposed_control(fixture: LayerFixture, lane: str, point: str, blocks: int) -> dict[str, Any]:
    """The superseded prediction of the study: at grid 240 W13 looks single-slice once thread_k and thread_n are
    swapped.
    """
    launch = operating_point(point, lane, fixture.spec).launches["w13"]
    right = launch._replace(grid=TRANSPOSED_GRID)
    swapped = Launch(launch.thread_n, launch.thread_k, TRANSPOSED_GRID)
    found = cut(fixture.spec, "w13", blocks, right)
    return {
        "name": "transposed_grid_240",
        "launch": list(right),
        "claimed_single_slice": cut(fixture.spec, "w13", blocks, swapped).is_single_slice,
        "single_slice": found.is_single_slice,
        "split_tiles": sum(found.is_split(b, n) for b in range(blocks) for n in range(found.n_tiles)),
    }


def predict(
    fixture: LayerFixture, lane: str, point: str, plan_source: str, plans: Mapping[str, AlignedPlan]
) -> dict[str, Any]:
    """The prediction for all runs of a lane at a point, as JSON.

    `plans` are those of H0 and H1 that the injected cells use. For every pair of arms it lists the routes that change
    signature at W13 and at W2, the rows that can therefore differ on each surface, and the surfaces that must coincide.
    Raises InputError if the `full_k` grid does not make every W13 tile single-slice.
    """
    captured = plan_source == CAPTURED
    if captured and lane != CUDA:
        raise InputError(
            f"captured plans on lane {lane}",
            where="prediction",
            limit="a CPU has no alignment of its own to capture: it would replay what it was given",
            way_out="use plan source stored on this lane, or the lane cuda",
        )
    exchange = exchange_for(fixture, plans) if captured else fixture.spec["exchange"]
    found = arms(fixture, lane, point, plans, pairs=pairs_of(exchange))
    top_k = fixture.spec["top_k"]
    pairs = []
    for (first, a), (second, b) in combinations(found.items(), 2):
        changed = {g: changed_routes(a.signatures[g], b.signatures[g]) for g in GEMMS}
        rows = reach(changed["w13"], changed["w2"], top_k)
        pairs.append(
            {
                "first": list(first),
                "second": list(second),
                "changed_memberships": changed_memberships(a.plan, b.plan),
                "changed_signature": changed,
                "rows": rows,
                "must_coincide": [s for s in SURFACES if not rows[s]],
            }
        )
    point_facts = operating_point(point, lane, fixture.spec)
    blocks = plans[HISTORIES[0]].num_blocks
    document = {
        "format": FORMAT,
        "fixture": fixture.digest,
        "lane": lane,
        "point": point,
        "plan_source": plan_source,
        "architecture": lane_facts(lane).architecture,
        "launches": {g: list(point_facts.launches[g]) for g in GEMMS},
        "launch_status": {g: str(point_facts.status[g]) for g in GEMMS},
        "full_k_grid": full_k_grid(fixture.spec, blocks, point_facts.launches["w13"]),
        "plans": {h: plans[h].fingerprint() for h in HISTORIES},
        "informative": plans[HISTORIES[0]].fingerprint() != plans[HISTORIES[1]].fingerprint(),
        "exchange": exchange,
        "arms": [{"cell": c, "history": h, **arm.describe()} for (c, h), arm in found.items()],
        "pairs": pairs,
        "controls": [transposed_control(fixture, lane, point, blocks)] if point == "published" else [],
    }
    confirm_full_k(document, fixture, where="prediction")
    return document


def confirm_full_k(prediction: Mapping[str, Any], fixture: LayerFixture, *, where: str) -> None:
    """Refuse a prediction whose `full_k` grid splits a W13 tile when thread_k and thread_n stand in the right order."""
    launch = Launch(*prediction["launches"]["w13"])._replace(grid=prediction["full_k_grid"])
    partition = cut(fixture.spec, "w13", fixture.plans[HISTORIES[0]].num_blocks, launch)
    if not partition.is_single_slice:
        split = sum(partition.is_split(b, n) for b in range(partition.blocks) for n in range(partition.n_tiles))
        raise InputError(
            f"full_k at grid {launch.grid} with thread_k={launch.thread_k}, thread_n={launch.thread_n}: {split} of"
            f" {partition.tiles} W13 tiles are split",
            where=where,
            limit="full_k needs a grid at which every W13 tile is one slice",
            way_out=f"use grid {full_k_grid(fixture.spec, partition.blocks, launch)}",
        )


def superseded(prediction: Mapping[str, Any]) -> dict[str, Any]:
    """The prediction as the study first had it: `full_k` at grid 240, from swapped thread sizes."""
    return {**prediction, "full_k_grid": TRANSPOSED_GRID}


class _Read(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Launches(_Read):
    w13: Annotated[list[Size], Field(min_length=3, max_length=3)]
    w2: Annotated[list[Size], Field(min_length=3, max_length=3)]


class _Arm(_Read):
    cell: str
    history: str
    fingerprint: str


class _Control(_Read):
    name: str


class _Prediction(_Read):
    """The fields of prediction.json that a run reads; the scorer has a model of its own."""

    fixture: str
    lane: str
    point: str
    plan_source: str
    architecture: str
    launches: _Launches
    full_k_grid: Size
    plans: dict[str, str]
    exchange: Exchange
    arms: list[_Arm]
    controls: list[_Control]


def load_prediction(path: Path) -> tuple[dict[str, Any], str]:
    """A prediction and the SHA-256 of its bytes. Raises InputError if it is missing, not canonical, or lacks a field
    that a run reads.
    """
    try:
        data = path.read_bytes()
        document = json.loads(data)
        canonical = canonical_json(document) == data
    except UNREADABLE as e:
        raise InputError(
            f"not a readable prediction: {e}",
            where=str(path),
            limit="canonical JSON of a prediction is needed",
            way_out="make it with routeblock study-a freeze",
        ) from e
    if not isinstance(document, dict) or document.get("format") != FORMAT or not canonical:
        raise InputError(
            "not a prediction of this version",
            where=str(path),
            limit=f"format {FORMAT} in canonical JSON",
            way_out="make it with routeblock study-a freeze",
        )
    try:
        _Prediction.model_validate(document)
    except ValidationError as e:
        raise InputError(
            first_fault(e),
            where=str(path),
            limit="every field of a prediction, well typed",
            way_out="make it with routeblock study-a freeze",
        ) from e
    return document, sha256_bytes(data)
