# SPDX-License-Identifier: Apache-2.0
"""A small protocol, and a device that makes times up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.alignment_cost import routings, verification
from routeblock.alignment_cost.batches import Batch
from routeblock.alignment_cost.protocol import Arm, Mode, load, planned
from routeblock.alignment_cost.study import KEY, STUDY, check_of, counted, of_side, stage
from routeblock.cuda.align_variants import Gpu, Problem, serving
from routeblock.cuda.sanitizer import TOOLS
from routeblock.cuda.telemetry import State
from routeblock.timing.loop import Measured, Sample, Verdict, run
from routeblock.timing.plan import Series, Stage
from routeblock.timing.record import Record

COMMITTED = Path(__file__).parents[2] / "fixtures/protocols/alignment_cost.json"
SEED = load(COMMITTED).seed
H200 = Gpu((9, 0), verification.SHARED_BYTES["sm_90"])
SPEED = {Arm.NATIVE: 4.0, Arm.CANONICAL: 2.4, Arm.SORT: 9.0}
CODE = "0" * 64


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
    def __init__(self, device: FakeDevice, timed: Stage) -> None:
        self.device, self.point = device, timed.shape
        point = self.point
        self.variant = serving(Problem(point.tokens * point.top_k, point.experts, point.block_size), H200).name
        self.stage = replace(timed, of_side=of_side(self.variant))

    def check(self) -> Verdict:
        wrong = frozenset(map(str, self.device.wrong))
        facts = {"canonical_sha256": list(routings.digests(self.point, SEED))}
        return Verdict(wrong, check_of(self.point, self.variant, wrong) | facts)

    def warm_up(self, series: Series, clocks: tuple[str, ...]) -> None:
        self.device.log.append(f"warm {series.name} {clocks}")

    def measure(self, series: Series, clocks: tuple[str, ...]) -> list[Sample]:
        self.device.log.append(series.name)
        noise = float(self.device.rng.normal(1, 0.01))
        by_graph = Mode.GRAPH in clocks
        calls = self.point.graph_calls if by_graph else self.point.stream_calls
        us = SPEED[Arm(series.side)] * noise * calls
        late = not by_graph and bool(self.device.late) and self.device.late.pop()
        return [Sample(3 * us if clock == Mode.HOST else us, calls, late) for clock in clocks]

    def close(self) -> None:
        pass


class FakeDevice:
    """states: what NVML says in turn, then nothing special; late: of streamed batches, last first."""

    def __init__(self, *, wrong: set[Arm] | None = None, late: list[bool] | None = None) -> None:
        self.rng = np.random.default_rng(1)
        self.wrong, self.late = wrong or set(), late or []
        self.states: list[State] = []
        self.always = State(0, 1, 1980, 40)
        self.log: list[str] = []
        self.pauses: list[float] = []

    def open(self, timed: Stage) -> FakeSession:
        return FakeSession(self, timed)

    def state(self) -> State:
        return self.states.pop(0) if self.states else self.always

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


def measured(device: FakeDevice, path: Path, deadline: float = float("inf")) -> Measured:
    found, plan = Measured(), load(path)
    stages = [stage(point, plan, None) for point in planned(plan)]
    run(device, stages, plan.acceptance, KEY, found, deadline=deadline)
    return found


def batches(found: Measured) -> list[Batch]:
    """What was measured, as it is recorded."""
    return [STUDY.table.batch(row) for row in found.rows]


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
        "batches": dict(Counter(map(counted, found.rows))),
    }
    lines = ["1 cases, 0 differences", "========= ERROR SUMMARY: 0 errors"]
    tools = [{"tool": t, "outcome": "clean", "exit_code": 0, "lines": lines} for t in TOOLS]
    compared = {"repeated": {}, "random": {"routings": 2, "variants": {"tiles_512x4": 2}}}
    return {
        "run": run,
        "exactness": {"differs": "", "cubin_sha256": "c" * 64, "gpu": "NVIDIA H200", **compared},
        "sanitizer": {"tools": tools},
    }


def made_up(device: FakeDevice, path: Path) -> Record:
    """A record that is not written anywhere."""
    found = measured(device, path)
    return Record(path.parent, batches(found), documents(found, path))


def write_record(out: Path, path: Path, found: Iterable[Batch], told: dict[str, Any]) -> Path:
    """Write and seal a record, over one that is there."""
    STUDY.write(out, list(found), told)
    STUDY.seal(out, "record_alignment", path, [STUDY.module])
    return out


def record_folder(out: Path, path: Path) -> Path:
    """A sealed record of made-up times, with late repetitions."""
    found = measured(FakeDevice(late=late_streams()), path)
    return write_record(out, path, batches(found), documents(found, path))
