# SPDX-License-Identifier: Apache-2.0
"""How many plans, and how many final outputs, native alignment gives: call by call in one process under a history."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

from routeblock.cuda.gpu_lock import Turn
from routeblock.evidence.digest import code_digest, sha256_array
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.moe.launches import Launch
from routeblock.moe.routing import align
from routeblock.route_block.fixtures.fixture import INPUTS, LAYER, SPEC, load_fixture
from routeblock.route_block.operating_point import GEMMS
from routeblock.route_block.prediction.predict import load_prediction
from routeblock.route_block.runs.cuda import CudaLane

FORMAT = "routeblock.census.v1"


def count(
    lane: CudaLane,
    fixture_folder: Path,
    prediction_path: Path,
    history: str,
    process: int,
    calls: int,
    out: Path,
    *,
    turn: Turn,
) -> None:
    """Write what `calls` native alignments, each with the layer that follows, gave in this process, and as many layers
    in canonical order.

    The document has for `native` and `canonical` the distinct (plan fingerprint, SHA-256 of `final`) with their counts,
    the commonest first.
    """
    fixture = load_fixture(fixture_folder)
    prediction, _ = load_prediction(prediction_path)
    launches = {g: Launch(*prediction["launches"][g]) for g in GEMMS}
    lane.prepare(fixture)
    turn.take()
    session = lane.open(fixture, history)
    found: dict[str, Counter[tuple[str, str]]] = {"native": Counter(), "canonical": Counter()}
    stable = align(fixture.topk_ids, fixture.spec["num_experts"], fixture.spec["block_size"])
    for _ in range(calls):
        plan = session.native_plan()
        surfaces, _ = session.layer(plan, launches)
        found["native"][plan.fingerprint(), sha256_array(surfaces["final"])] += 1
    for _ in range(calls):
        surfaces, _ = session.layer(stable, launches)
        found["canonical"][stable.fingerprint(), sha256_array(surfaces["final"])] += 1
    document = {
        "format": FORMAT,
        "fixture": fixture.digest,
        "fixture_name": fixture.spec["name"],
        "lane": prediction["lane"],
        "point": prediction["point"],
        "launches": {g: list(launch) for g, launch in launches.items()},
        "history": history,
        "process": process,
        "calls": calls,
        "prelude": session.has_prelude,
        "stored": prediction["plans"],
        **{
            order: [
                {"fingerprint": plan, "final": final, "count": n}
                for (plan, final), n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            ]
            for order, counts in found.items()
        },
        "identity": {"source": code_digest(__name__, *lane.modules), **asdict(session.computer())},
    }
    write_json(out, document)
    seal(
        out.with_suffix(SUFFIX),
        rule="census",
        outputs=[out],
        inputs=[prediction_path, *(fixture_folder / name for name in (SPEC, LAYER, INPUTS))],
        parameters={"history": history, "process": process, "calls": calls},
        modules=[__name__, *lane.modules],
    )
