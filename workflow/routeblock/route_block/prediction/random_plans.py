# SPDX-License-Identifier: Apache-2.0
"""Is the prediction right, and not by predicting everything? Random legal plans against the canonical one.

For each plan and grid: the predicted routes must equal, route by route, what a walk over the CUDA blocks finds; the
rows whose bits the twin changes must be among the predicted ones. How many of the predicted rows do change is counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import seal
from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan, align, check_plan
from routeblock.route_block.facts import SURFACES
from routeblock.route_block.fixtures.fixture import INPUTS, LAYER, SPEC, LayerFixture, load_fixture
from routeblock.route_block.operating_point import GEMMS, cut, lane_facts
from routeblock.route_block.prediction.predict import changed_routes, reach, signatures
from routeblock.route_block.scorer.block_walk import routes_computed_differently
from routeblock.twin.weights import unpack

FORMAT = "routeblock.random_plans.v1"
THREADS = (64, 128)  # thread_k, thread_n
GRIDS = (246, 200, 528)  # CUDA blocks: the published launch, the full-K cell, the H200's automatic one
Surfaces = Mapping[str, NDArray[Any]]


def changed_rows(first: NDArray[Any], second: NDArray[Any]) -> list[int]:
    """Rows in which any bit differs."""
    return [int(r) for r in np.flatnonzero((first.view(np.uint16) != second.view(np.uint16)).any(axis=1))]


def compare_plan(
    fixture: LayerFixture, canonical: AlignedPlan, plan: AlignedPlan, launch: Launch, base: Surfaces, found: Surfaces
) -> dict[str, Any]:
    """One plan against the canonical one at one launch: predicted, walked and changed routes, and what fails."""
    predicted: dict[str, list[int]] = {}
    faults = []
    for gemm in GEMMS:
        n, k = fixture.shape(gemm)
        partition = cut(fixture.spec, gemm, plan.num_blocks, launch)
        both = [signatures(p, partition, launch.thread_k) for p in (canonical, plan)]
        predicted[gemm] = changed_routes(*both)
        walked = routes_computed_differently(
            canonical, plan, n, k, launch.thread_k, launch.thread_n, launch.grid, fixture.spec["group_size"]
        )
        if walked != predicted[gemm]:
            faults.append(f"{gemm}: predicted {predicted[gemm]}, walked {walked}")
    rows = reach(predicted["w13"], predicted["w2"], fixture.spec["top_k"])
    changed = {name: changed_rows(base[name], found[name]) for name in SURFACES}
    for name in SURFACES:
        if beyond := sorted(set(changed[name]) - set(rows[name])):
            faults.append(f"{name}: rows {beyond} changed beyond the prediction")
    return {
        "plan": plan.fingerprint(),
        "changed_signature": predicted,
        "predicted": {name: len(rows[name]) for name in SURFACES},
        "total": {name: len(base[name]) for name in SURFACES},
        "changed": {name: len(changed[name]) for name in SURFACES},
        "faults": faults,
    }


def check(
    fixture_folder: Path,
    lane: str,
    plans: int,
    grids: Sequence[int],
    seed: int,
    out: Path,
    *,
    progress: Callable[[float], None] | None = None,
) -> list[str]:
    """Write every comparison to the file `out`, sealed; returns what did not hold, in words."""
    os.environ.setdefault("NUMBA_NUM_THREADS", str(os.cpu_count() or 1))
    from routeblock.twin.layer import moe_layer

    fixture = load_fixture(fixture_folder)
    w13, w2 = unpack(fixture, "w13"), unpack(fixture, "w2")
    rng = np.random.Generator(np.random.PCG64(seed))
    experts, block = fixture.spec["num_experts"], fixture.spec["block_size"]
    canonical = align(fixture.topk_ids, experts, block)
    drawn = [align(fixture.topk_ids, experts, block, rng.permutation(fixture.topk_ids.size)) for _ in range(plans)]
    for plan in drawn:
        check_plan(plan, fixture.topk_ids, experts, where="random plan")

    def layer(plan: AlignedPlan, launch: Launch) -> dict[str, NDArray[Any]]:
        return moe_layer(
            fixture.hidden, fixture.topk_ids, fixture.topk_weights, w13, w2, fixture.compact(plan),
            architecture=lane_facts(lane).architecture, w13_launch=launch, w2_launch=launch,
            group_size=fixture.spec["group_size"], expert_map=fixture.expert_rows,
        )  # fmt: skip

    comparisons = []
    for place, grid in enumerate(grids):
        launch = Launch(*THREADS, grid)
        base = layer(canonical, launch)
        for number, plan in enumerate(drawn):
            found = compare_plan(fixture, canonical, plan, launch, base, layer(plan, launch))
            comparisons.append({"grid": grid, "number": number, **found})
            if progress:
                progress((place * plans + number + 1) / (plans * len(grids)))
    faults = [f"grid {c['grid']}, plan {c['number']}: {fault}" for c in comparisons for fault in c["faults"]]
    sizes = {len(c["changed_signature"]["w13"]) for c in comparisons}
    if 0 not in sizes or not any(0 < size < canonical.num_routes for size in sizes):
        faults.append(f"W13 sets of {sorted(sizes)} routes: empty and partial ones must both occur")
    document = {
        "format": FORMAT,
        "fixture": fixture.digest,
        "lane": lane,
        "threads": list(THREADS),
        "routes": canonical.num_routes,
        "seed": seed,
        "comparisons": comparisons,
        "faults": faults,
    }
    write_json(out, document)
    seal(
        out.with_suffix(".manifest.json"),
        rule="random_plans",
        outputs=[out],
        inputs=[fixture_folder / name for name in (SPEC, LAYER, INPUTS)],
        parameters={"lane": lane, "plans": plans, "grids": list(grids), "seed": seed},
        modules=[__name__],
    )
    return faults
