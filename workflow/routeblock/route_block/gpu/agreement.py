# SPDX-License-Identifier: Apache-2.0
"""The twin against every surface that a GPU gave, bit for bit: what can prove the twin wrong."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_array
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.record import RECORD, TENSORS, Record, read_record
from routeblock.evidence.tensors import load_tensors
from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan, check_plan
from routeblock.route_block.facts import SURFACES
from routeblock.route_block.fixtures.fixture import INPUTS, LAYER, SPEC, LayerFixture, load_fixture
from routeblock.route_block.operating_point import GEMMS
from routeblock.route_block.prediction.predict import load_prediction
from routeblock.route_block.runs.twin import compute
from routeblock.twin.tensor_core import ARCHITECTURES
from routeblock.twin.weights import Weights, unpack

FORMAT = "routeblock.agreement.v1"

Computation = tuple[str, str, tuple[Launch, ...]]  # both parts of the plan by SHA-256, the launch of each GEMM


def agree(fixture_folder: Path, prediction_path: Path, runs: Path, lane: str, out: Path) -> list[str]:
    """Recompute every run below `runs` and write agreement.json, sealed; the names of surfaces that differ.

    Runs with one plan (in bytes) at one launch share a recomputation; every run's own tensors are compared with it.
    Raises InputError if a run cannot be read, is not of this fixture, or came from tensor cores that no twin stands
    for.
    """
    fixture = load_fixture(fixture_folder)
    prediction, _ = load_prediction(prediction_path)
    architecture = prediction["architecture"]
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"tensor cores {architecture!r}",
            where=str(prediction_path),
            limit=f"the twin stands for {', '.join(ARCHITECTURES)}",
            way_out="leave the agreement out on this GPU",
        )
    groups: dict[Computation, list[tuple[Path, Record]]] = defaultdict(list)
    for path in sorted(runs.glob(f"*/*/*/{RECORD}")):
        record = read_record(path)
        if record.fixture != fixture.digest:
            raise InputError(
                f"recorded on fixture {record.fixture[:16]}",
                where=str(path),
                limit=f"this is fixture {fixture.digest[:16]}",
                way_out="name the fixture of these runs",
            )
        launches = tuple(Launch(m.thread_k, m.thread_n, m.launched) for m in (record.grid[g] for g in GEMMS))
        groups[record.plan.sorted_token_ids, record.plan.expert_ids, launches].append((path.parent, record))
    if not groups:
        raise InputError("no runs", where=str(runs), limit="recorded runs are needed", way_out="run the cells first")
    os.environ.setdefault("NUMBA_NUM_THREADS", str(os.cpu_count() or 1))
    weights: dict[str, Weights] = {gemm: unpack(fixture, gemm) for gemm in GEMMS}
    rows = [row for key, group in groups.items() for row in _compare(fixture, weights, key, group, architecture)]
    rows.sort(key=lambda row: row["position"])
    document = {
        "format": FORMAT,
        "fixture": {"name": fixture.spec["name"], "sha256": fixture.digest},
        "lane": lane,
        "point": prediction["point"],
        "plan_source": prediction["plan_source"],
        "architecture": architecture,
        "computations": len(groups),
        "runs": rows,
    }
    write_json(out, document)
    seal(
        out.with_suffix(SUFFIX),
        rule="agreement",
        outputs=[out],
        inputs=[
            prediction_path,
            *(fixture_folder / name for name in (SPEC, LAYER, INPUTS)),
            *(folder / name for group in groups.values() for folder, _ in group for name in (RECORD, TENSORS)),
        ],
        parameters={"lane": lane},
        modules=[__name__],
    )
    return [
        f"{row['cell']}/{row['history']}/rep{row['replicate']} {surface}"
        for row in rows
        for surface, counted in row["surfaces"].items()
        if counted["differing"]
    ]


def _compare(
    fixture: LayerFixture,
    weights: dict[str, Weights],
    key: Computation,
    group: list[tuple[Path, Record]],
    architecture: str,
) -> list[dict[str, Any]]:
    ours: dict[str, NDArray[Any]] = {}
    rows = []
    for folder, record in group:
        tensors = load_tensors(folder / TENSORS)
        for name in (*SURFACES, "sorted_token_ids", "expert_ids"):
            stated = record.surfaces[name].sha256 if name in record.surfaces else getattr(record.plan, name)
            if name not in tensors or sha256_array(tensors[name]) != stated:
                raise InputError(
                    f"{name} is not what the record says",
                    where=str(folder / TENSORS),
                    limit=f"SHA-256 {stated}",
                    way_out="restore the evidence, or run the cell again",
                )
        if not ours:
            ids, experts, plan = tensors["sorted_token_ids"], tensors["expert_ids"], record.plan
            aligned = AlignedPlan(ids, experts, int(ids.size), plan.block_size, plan.num_routes)
            check_plan(aligned, fixture.topk_ids, fixture.spec["num_experts"], where=str(folder))
            ours = compute(fixture, weights, aligned, dict(zip(GEMMS, key[2], strict=True)), architecture)
        rows.append(
            {
                "cell": record.cell,
                "history": record.history,
                "replicate": record.replicate,
                "position": record.position,
                "fingerprint": record.plan.fingerprint,
                "launches": {g: list(launch) for g, launch in zip(GEMMS, key[2], strict=True)},
                "surfaces": {
                    name: {"elements": int(ours[name].size), "differing": _differing(ours[name], tensors[name])}
                    for name in SURFACES
                },
            }
        )
    return rows


def _differing(ours: NDArray[Any], theirs: NDArray[Any]) -> int:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return int(ours.size)
    return int((ours.view(np.uint16) != theirs.view(np.uint16)).sum())
