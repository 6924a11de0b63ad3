# SPDX-License-Identifier: Apache-2.0
"""Captured plans: what vLLM's own alignment gave in one process per history, frozen before the runs.

The exchange pairs of such plans are the fixture's where their preconditions hold, else found by search over the plans.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from routeblock.cuda.gpu_lock import Turn
from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import canonical_json, code_digest, sha256_json
from routeblock.evidence.files import atomic_folder, write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.tensors import load_tensors, save_tensors
from routeblock.route_block.facts import HISTORIES
from routeblock.route_block.fixtures.fixture import INPUTS, LAYER, PLANS, SPEC, load_fixture, plan_tensors
from routeblock.route_block.runs.cuda import CudaLane

CAPTURE_FORMAT, PLANS_FORMAT = "routeblock.capture.v1", "routeblock.captured_plans.v1"
CAPTURE, CAPTURED = "capture.json", "plans.json"


def capture(lane: CudaLane, fixture_folder: Path, history: str, out: Path, *, turn: Turn) -> None:
    """Run the native alignment once in this process, after the history's prelude and its weights, and keep its plan.

    Writes plans.safetensors, capture.json (deterministic but for the plan) and telemetry.json to the folder `out`.
    """
    fixture = load_fixture(fixture_folder)
    lane.prepare(fixture)
    waited = turn.take()
    session = lane.open(fixture, history)
    plan = session.native_plan()
    document = {
        "format": CAPTURE_FORMAT,
        "fixture": fixture.digest,
        "history": history,
        "prelude": session.has_prelude,
        "fingerprint": plan.fingerprint(),
        "identity": {"source": code_digest(__name__, *lane.modules), **asdict(session.computer())},
    }
    with atomic_folder(out) as folder:
        save_tensors(folder / PLANS, plan_tensors({history: plan}))
        (folder / CAPTURE).write_bytes(canonical_json(document))
        (folder / "telemetry.json").write_bytes(canonical_json({**session.telemetry(), "turn": waited}))
        inputs = [fixture_folder / name for name in (SPEC, LAYER, INPUTS)]
        for name, files in (("capture", (CAPTURE, PLANS)), ("telemetry", ("telemetry.json",))):
            seal(
                folder / f"{name}{SUFFIX}",
                rule="capture",
                outputs=[folder / f for f in files],
                inputs=inputs if name == "capture" else [folder / CAPTURE],
                parameters={"history": history},
                modules=[__name__, *lane.modules],
            )


def freeze_plans(fixture_folder: Path, captures: Sequence[Path], out: Path) -> None:
    """Put the plans of two captures, one per history, into the file `out` (plans.safetensors), plans.json beside it.

    Raises InputError unless the captures are of both histories, of this fixture, and by one binary.
    """
    fixture = load_fixture(fixture_folder)
    documents = [_read(folder / CAPTURE) for folder in captures]
    by_history = {d["history"]: (d, folder) for d, folder in zip(documents, captures, strict=True)}
    binaries = {d["identity"]["binary"] for d in documents}
    if sorted(d["history"] for d in documents) != list(HISTORIES) or len(binaries) != 1:
        found = ", ".join(f"{d['history']} by {d['identity']['binary'][:12]}" for d in documents)
        raise InputError(
            f"captures of {found}",
            where=", ".join(map(str, captures)),
            limit=f"one capture each of {' and '.join(HISTORIES)}, by one binary",
            way_out="capture again (routeblock study-a capture)",
        )
    for document, folder in by_history.values():
        if document["fixture"] != fixture.digest:
            raise InputError(
                f"captured on fixture {document['fixture'][:16]}",
                where=str(folder / CAPTURE),
                limit=f"this is fixture {fixture.digest[:16]}",
                way_out="capture again (routeblock study-a capture)",
            )
    tensors = {k: x for _, folder in by_history.values() for k, x in load_tensors(folder / PLANS).items()}
    fingerprints = {history: by_history[history][0]["fingerprint"] for history in HISTORIES}
    document = {
        "format": PLANS_FORMAT,
        "fixture": fixture.digest,
        "plans": fingerprints,
        "captures": {history: sha256_json(by_history[history][0]) for history in HISTORIES},
        "informative": len(set(fingerprints.values())) == len(HISTORIES),
    }
    save_tensors(out, tensors)
    write_json(out.with_name(CAPTURED), document)
    seal(
        out.with_suffix(SUFFIX),
        rule="captured_plans",
        outputs=[out, out.with_name(CAPTURED)],
        inputs=[folder / name for folder in captures for name in (CAPTURE, PLANS)],
        parameters={},
        modules=[__name__],
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != CAPTURE_FORMAT:
            raise ValueError(f"format {document['format']}")
        return dict(document)
    except UNREADABLE as e:
        raise InputError(
            f"not a readable capture: {e}",
            where=str(path),
            limit=f"canonical JSON of {CAPTURE_FORMAT}",
            way_out="capture again (routeblock study-a capture)",
        ) from e
