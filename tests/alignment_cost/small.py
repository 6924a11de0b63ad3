# SPDX-License-Identifier: Apache-2.0
"""A small protocol, and a device that makes times up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.alignment_cost import batches as raw
from routeblock.alignment_cost import record, reprove, routings
from routeblock.alignment_cost.measure import Checked, Measured, Sample, run
from routeblock.alignment_cost.protocol import Arm, Mode, Point, Series, load
from routeblock.cuda.align_variants import Gpu, Problem, serving
from routeblock.cuda.sanitizer import TOOLS
from routeblock.cuda.telemetry import State
from routeblock.evidence.digest import canonical_json

COMMITTED = Path(__file__).parents[2] / "fixtures/protocols/alignment_cost.json"
SEED = load(COMMITTED).seed
H200 = Gpu((9, 0), reprove.SHARED_BYTES["sm_90"])
SPEED = {Arm.NATIVE: 4.0, Arm.CANONICAL: 2.4, Arm.SORT: 9.0}


def protocol_file(folder: Path, **changes: Any) -> Path:
    """The committed protocol with few points and repetitions."""
    told = json.loads(COMMITTED.read_text())
    told["operator"]["points"] = [
        {"role": "bound", "experts": 128, "top_k": 8, "tokens": [1, 128], "repetitions": 8},
        {"role": "reported", "experts": 8, "top_k": 2, "tokens": [4], "repetitions": 5},
    ]
    told["layer"]["points"] = [
        {"role": "bound", "experts": 128, "top_k": 8, "tokens": [1], "repetitions": 8, "calls": 2, "pause_ms": 1}
    ]
    told["acceptance"]["pause_ms"] = 0
    path = folder / "protocol.json"
    path.write_text(json.dumps(told | changes))
    return path


class FakeSession:
    def __init__(self, rig: FakeRig, point: Point) -> None:
        self.rig, self.point = rig, point
        self.variant = serving(Problem(point.tokens * point.top_k, point.experts, point.block_size), H200).name

    def check(self) -> Checked:
        return Checked(frozenset(self.rig.wrong), {"canonical_sha256": list(routings.digests(self.point, SEED))})

    def warm_up(self, series: Series, mode: Mode, times: int) -> None:
        self.rig.log.append(f"warm {series.name} {mode}")

    def measure(self, series: Series, mode: Mode) -> Sample:
        self.rig.log.append(series.name)
        noise = float(self.rig.rng.normal(1, 0.01))
        calls = self.point.graph_calls if mode is Mode.GRAPH else self.point.stream_calls
        us = SPEED[series.arm] * noise * calls
        if mode is Mode.GRAPH:
            return Sample({mode: us}, calls)
        return Sample({mode: us, Mode.HOST: 3 * us}, calls, self.rig.late.pop() if self.rig.late else False)


class FakeRig:
    """states: what NVML says in turn, then nothing special; late: of streamed batches, last first."""

    def __init__(self, *, wrong: set[Arm] | None = None, late: list[bool] | None = None) -> None:
        self.rng = np.random.default_rng(1)
        self.wrong, self.late = wrong or set(), late or []
        self.states: list[State] = []
        self.always = State(0, 1, 1980, 40)
        self.log: list[str] = []
        self.pauses: list[float] = []

    def open(self, point: Point) -> FakeSession:
        return FakeSession(self, point)

    def state(self) -> State:
        return self.states.pop(0) if self.states else self.always

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


def measured(rig: FakeRig, path: Path, deadline: float = float("inf")) -> Measured:
    found = Measured()
    run(rig, load(path), found, deadline=deadline)
    return found


def late_streams() -> list[bool]:
    """Late in the first streamed repetition of the first point, and in all three attempts at the layer's first."""
    late, timely = [True, False, False, False], [False] * 4
    return (late + timely * 8 + timely * 8 + late * 3)[::-1]


def documents(found: Measured, path: Path) -> dict[str, Any]:
    """What a record tells besides its batches."""
    protocol = load(path)
    build = protocol.builds[0]
    run = {
        "protocol_sha256": protocol.digest(),
        "device": {"name": "NVIDIA H200", "architecture": "sm_90", "driver": "580", "cuda": "13.0"},
        "extension": {"sha256": build.extension_sha256, "vllm": build.vllm},
        "cubin_sha256": "c" * 64,
        "checks": found.checks,
        "not_measured": found.left,
        "batches": dict(Counter(f"{b.campaign} {b.mode} {b.reason or 'accepted'}" for b in found.batches)),
    }
    tools = [{"tool": t, "outcome": "clean", "lines": ["0 errors"]} for t in TOOLS]
    return {
        record.RUN: run,
        record.EXACT: {"differs": "", "cubin_sha256": "c" * 64, "gpu": "NVIDIA H200"},
        record.SANITIZER: {"tools": tools},
    }


def write_record(out: Path, path: Path, batches: Iterable[raw.Batch], told: dict[str, Any]) -> Path:
    """Write and seal a record, over one that is there."""
    out.mkdir(exist_ok=True)
    raw.write(out / record.BATCHES, batches)
    for name, document in told.items():
        (out / name).write_bytes(canonical_json(document))
    record.FOLDER.seal(out, path, load(path).digest(), record.MODULES)
    return out


def record_folder(out: Path, path: Path) -> Path:
    """A sealed record of made-up times, with late repetitions."""
    found = measured(FakeRig(late=late_streams()), path)
    return write_record(out, path, found.batches, documents(found, path))
