# SPDX-License-Identifier: Apache-2.0
"""One run of study A: one cell, one history, one replicate, one process, three files.

record.json is deterministic, tensors.safetensors holds the raw surfaces and the plan, telemetry.json what depends on
the machine and the moment. The folder appears whole or not at all.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, code_digest, sha256_array, sha256_json
from routeblock.evidence.files import atomic_folder
from routeblock.evidence.manifest import seal
from routeblock.evidence.record import (
    FORMAT,
    RECORD,
    RECORD_MANIFEST,
    TELEMETRY,
    TELEMETRY_MANIFEST,
    TENSORS,
    Consumption,
    Identity,
    LaunchMarker,
    PlanUsed,
    Record,
    Tensor,
    Treatment,
    TreatmentMarker,
    write_record,
)
from routeblock.evidence.tensors import save_tensors
from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan, check_plan
from routeblock.route_block.facts import CELLS, HISTORIES, Cell, Intervention, injected_plan, position
from routeblock.route_block.fixtures.fixture import (
    INPUTS,
    LAYER,
    PLANS,
    SPEC,
    LayerFixture,
    captured_plans,
    load_fixture,
    pairs_of,
)
from routeblock.route_block.operating_point import GEMMS, cut
from routeblock.route_block.prediction.predict import confirm_full_k, load_prediction
from routeblock.route_block.runs.identity import code_of
from routeblock.route_block.runs.lane import Lane, Outcome, Request, Turn

DTYPE_NAMES = {"float16": "F16", "bfloat16": "BF16"}  # as safetensors writes them


def _known(value: str, known: Mapping[str, Any] | tuple[str, ...], what: str) -> None:
    if value not in known:
        raise InputError(
            f"{what} {value!r}", where="run", limit=f"known are {', '.join(known)}", way_out="choose one of them"
        )


def _launches(prediction: Mapping[str, Any], cell: Cell) -> dict[str, Launch]:
    native = {g: Launch(*prediction["launches"][g]) for g in GEMMS}
    if cell.full_k_grid:
        return {g: launch._replace(grid=prediction["full_k_grid"]) for g, launch in native.items()}
    return native


def _asked_plan(
    fixture: LayerFixture, prediction: Mapping[str, Any], plans: Mapping[str, AlignedPlan], cell: Cell, history: str
) -> AlignedPlan:
    """The plan that this run should use, checked against the frozen prediction before any arithmetic."""
    pairs = pairs_of(prediction["exchange"])
    plan = injected_plan(cell, history, plans, pairs, fixture.topk_ids, fixture.spec["num_experts"])
    if plan is None:
        raise InputError(
            f"cell {cell.name}: no exchange pair for it",
            where=str(fixture.folder / SPEC),
            limit=str(prediction["exchange"].get("why", "exchange cells need a pair")),
            way_out="leave the cell out",
        )
    check_plan(plan, fixture.topk_ids, fixture.spec["num_experts"], where=f"cell {cell.name}, {history}")
    frozen = [a["fingerprint"] for a in prediction["arms"] if (a["cell"], a["history"]) == (cell.name, history)]
    if frozen != [plan.fingerprint()]:
        raise InputError(
            f"cell {cell.name}, {history}: plan {plan.fingerprint()[:16]}",
            where="run",
            limit=f"the frozen prediction has {frozen[0][:16] if frozen else 'no such arm'}",
            way_out="predict again from these plans",
        )
    return plan


def plan_used(plan: AlignedPlan) -> PlanUsed:
    """The record's entry of a plan."""
    return PlanUsed(
        fingerprint=plan.fingerprint(),
        sorted_token_ids=sha256_array(plan.sorted_token_ids[: plan.num_tokens_post_padded]),
        expert_ids=sha256_array(plan.expert_ids[: plan.num_blocks]),
        num_tokens_post_padded=plan.num_tokens_post_padded,
        block_size=plan.block_size,
        num_routes=plan.num_routes,
    )


def run(
    *,
    lane_name: str,
    lane: Lane,
    fixture_folder: Path,
    prediction_path: Path,
    cell: str,
    history: str,
    replicate: int,
    out: Path,
    rule: str = "run",
    plans_path: Path | None = None,
    turn: Turn | None = None,
    identity_path: Path | None = None,
) -> Record:
    """Run one cell and write its folder.

    `rule`: what the seal names as maker. `plans_path`: the captured plans of H0 and H1; default: the fixture's
    stored ones. `turn`: when this process may use its GPU; None for a lane without one. `identity_path`: the expected
    identity, frozen before; it is sealed as an input, and the scorer holds the run against it. Raises InputError,
    before any arithmetic, if fixture, prediction, plan and launch do not fit one another, and after it if the lane used
    another plan or launch than it was asked to.
    """
    started = datetime.now(UTC)
    clock = time.perf_counter()
    _known(cell, CELLS, "cell")
    _known(history, HISTORIES, "history")
    if replicate < 1:
        raise InputError(
            f"replicate {replicate}", where="run", limit="replicates count from 1", way_out="use 1 or more"
        )
    fixture = load_fixture(fixture_folder)
    prediction, prediction_digest = load_prediction(prediction_path)
    if (prediction["fixture"], prediction["lane"]) != (fixture.digest, lane_name):
        raise InputError(
            f"prediction for fixture {prediction['fixture'][:16]} on lane {prediction['lane']}",
            where=str(prediction_path),
            limit=f"this run has fixture {fixture.digest[:16]} on lane {lane_name}",
            way_out="predict for this fixture and lane",
        )
    confirm_full_k(prediction, fixture, where=str(prediction_path))
    chosen, launches = CELLS[cell], _launches(prediction, CELLS[cell])
    plans = captured_plans(fixture, plans_path) if plans_path else fixture.plans
    plan = _asked_plan(fixture, prediction, plans, chosen, history)
    native = chosen.intervention is Intervention.NONE
    read = time.perf_counter()
    lane.prepare(fixture)
    ready = time.perf_counter()
    waited = turn.take() if turn else None
    turned, began = time.perf_counter(), datetime.now(UTC)
    outcome = lane.run(fixture, Request(None if native else plan, launches, history, replicate))
    computed = time.perf_counter()
    ended = datetime.now(UTC)
    _check_consumed(lane_name, fixture, outcome, None if native else plan, launches)
    record = _record(
        lane_name,
        lane,
        fixture,
        prediction,
        prediction_digest,
        chosen,
        history,
        replicate,
        plan,
        launches,
        outcome,
        code_digest(*code_of(lane)),
    )
    telemetry = {
        "start": started.isoformat(),
        "begin": began.isoformat(),
        "end": ended.isoformat(),
        "seconds": {"reading": read - clock, "preparing": ready - read, "lane": computed - turned},
        "turn": waited,
        "max_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "host": platform.node(),
        "pid": os.getpid(),
        "lane": dict(outcome.telemetry),
    }
    inputs = [prediction_path, *(fixture_folder / name for name in (SPEC, LAYER, INPUTS, PLANS))]
    inputs += [path for path in (plans_path, identity_path) if path]
    _write(out, record, outcome, telemetry, inputs, rule, code_of(lane))
    return record


def _check_consumed(
    lane_name: str, fixture: LayerFixture, outcome: Outcome, asked: AlignedPlan | None, launches: Mapping[str, Launch]
) -> None:
    """Refuse a lane that used another plan than the injected one, or other slices than those of its launch."""
    if asked is not None and (used := plan_used(outcome.plan)) != (wanted := plan_used(asked)):
        raise InputError(
            f"the lane used plan {used.fingerprint[:16]}, sorted_token_ids {used.sorted_token_ids[:16]}",
            where=f"lane {lane_name}",
            limit=f"{wanted.fingerprint[:16]}, {wanted.sorted_token_ids[:16]} was asked for",
            way_out="report this lane: what it computed is no run of this cell",
        )
    for gemm, launch in launches.items():
        if outcome.grids[gemm] != launch.grid:
            raise InputError(
                f"{gemm} was launched on {outcome.grids[gemm]} blocks",
                where=f"lane {lane_name}",
                limit=f"{launch.grid} were asked for",
                way_out="check the grid probe (docs/on-a-gpu.md)",
            )
        if outcome.slices is None:
            continue
        partition = cut(fixture.spec, gemm, outcome.plan.num_blocks, launch)
        for tile, found in enumerate(outcome.slices[gemm]):
            if list(found) != (wanted_slices := partition.slices(*divmod(tile, partition.n_tiles))):
                raise InputError(
                    f"{gemm}: the loops cut tile {tile} into {list(found)}",
                    where=f"lane {lane_name}",
                    limit=f"a grid of {launch.grid} blocks was asked for, which gives {wanted_slices}",
                    way_out="report this lane: what it computed is no run of this cell",
                )


def _record(
    lane_name: str,
    lane: Lane,
    fixture: LayerFixture,
    prediction: Mapping[str, Any],
    prediction_digest: str,
    cell: Cell,
    history: str,
    replicate: int,
    asked_plan: AlignedPlan,
    launches: Mapping[str, Launch],
    outcome: Outcome,
    source: str,
) -> Record:
    native = cell.intervention is Intervention.NONE
    pairs = pairs_of(prediction["exchange"])
    pair = {Intervention.SWAP_WITHIN: pairs.within, Intervention.SWAP_ACROSS: pairs.across}
    used = plan_used(outcome.plan)
    asked = Treatment(
        intervention=str(cell.intervention),
        pair=pair.get(cell.intervention),
        prelude=history == "H1" and lane_name == "cuda",
        sorted_token_ids=None if native else plan_used(asked_plan).sorted_token_ids,
    )
    consumed = asked.model_copy(
        update={"prelude": outcome.prelude, "sorted_token_ids": None if native else used.sorted_token_ids}
    )
    return Record(
        format=FORMAT,
        lane=lane_name,
        point=prediction["point"],
        plan_source=prediction["plan_source"],
        cell=cell.name,
        history=history,
        replicate=replicate,
        position=position(cell.name, history, replicate),
        status=lane.status,
        fixture=fixture.digest,
        prediction=prediction_digest,
        inputs={
            "hidden": sha256_array(fixture.hidden),
            "topk_ids": sha256_array(fixture.topk_ids),
            "topk_weights": sha256_array(fixture.topk_weights),
            "layer": fixture.spec["digests"][LAYER],
        },
        plan=used,
        treatment=TreatmentMarker(asked=asked, consumed=consumed),
        grid={
            g: LaunchMarker(
                thread_k=launches[g].thread_k,
                thread_n=launches[g].thread_n,
                asked=launches[g].grid,
                launched=outcome.grids[g],
            )
            for g in GEMMS
        },
        surfaces={
            name: Tensor(dtype=DTYPE_NAMES[x.dtype.name], shape=x.shape, sha256=sha256_array(x))
            for name, x in outcome.surfaces.items()
        },
        identity=Identity(
            source=source, binary=outcome.computer.binary, environment=dict(outcome.computer.environment)
        ),
        consumption=Consumption(
            source=outcome.consumption,
            sorted_token_ids=used.sorted_token_ids,
            expert_ids=used.expert_ids,
            num_tokens_post_padded=used.num_tokens_post_padded,
            slices={g: sha256_json(tiles) for g, tiles in outcome.slices.items()} if outcome.slices else None,
        ),
    )


def _write(
    out: Path,
    record: Record,
    outcome: Outcome,
    telemetry: Mapping[str, Any],
    inputs: Sequence[Path],
    rule: str,
    modules: Sequence[str],
) -> None:
    plan = outcome.plan
    tensors: dict[str, NDArray[Any]] = {
        **outcome.surfaces,
        "sorted_token_ids": np.asarray(plan.sorted_token_ids[: plan.num_tokens_post_padded], np.int32),
        "expert_ids": np.asarray(plan.expert_ids[: plan.num_blocks], np.int32),
    }
    parameters = {"lane": record.lane, "cell": record.cell, "history": record.history, "replicate": record.replicate}
    with atomic_folder(out) as folder:
        write_record(folder / RECORD, record)
        save_tensors(folder / TENSORS, tensors)
        (folder / TELEMETRY).write_bytes(canonical_json(dict(telemetry)))
        seal(
            folder / RECORD_MANIFEST,
            rule=rule,
            outputs=[folder / RECORD, folder / TENSORS],
            inputs=inputs,
            parameters=parameters,
            modules=modules,
        )
        # Sealed apart: telemetry differs from run to run. The scorer reads the process in it, tables read none of it.
        seal(
            folder / TELEMETRY_MANIFEST,
            rule=rule,
            outputs=[folder / TELEMETRY],
            inputs=[folder / RECORD],
            parameters=parameters,
            modules=modules,
        )
