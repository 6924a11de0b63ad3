# SPDX-License-Identifier: Apache-2.0
"""A small protocol, and a device that makes times up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.alignment_cost import batches as raw
from routeblock.alignment_cost import record
from routeblock.alignment_cost.measure import Checked, Measured, Sample, run
from routeblock.alignment_cost.protocol import Arm, Mode, Point, Series, load
from routeblock.cuda.telemetry import State
from routeblock.evidence.digest import canonical_json

COMMITTED = Path(__file__).parents[2] / "fixtures/protocols/alignment_cost.json"
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
    variant = "staged_512x1b"

    def __init__(self, rig: FakeRig, point: Point) -> None:
        self.rig, self.point = rig, point

    def check(self) -> Checked:
        return Checked(frozenset(self.rig.wrong), {"canonical_sha256": []})

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


def record_folder(out: Path, path: Path) -> Path:
    """A sealed record of made-up times."""
    protocol, found = load(path), measured(FakeRig(), path)
    out.mkdir()
    raw.write(out / record.BATCHES, found.batches)
    told = {
        "protocol_sha256": protocol.digest(),
        "extension": {"sha256": protocol.builds[0].extension_sha256},
        "cubin_sha256": "c",
        "checks": found.checks,
        "not_measured": found.left,
    }
    (out / record.RUN).write_bytes(canonical_json(told))
    (out / record.EXACT).write_bytes(canonical_json({"differs": "", "cubin_sha256": "c"}))
    tools = [{"tool": t, "outcome": "clean", "lines": ["0 errors"]} for t in record.TOOLS]
    (out / record.SANITIZER).write_bytes(canonical_json({"tools": tools}))
    record._seal(out, path, protocol, "0" * 64)
    return out
