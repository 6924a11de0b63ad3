# SPDX-License-Identifier: Apache-2.0
"""A protocol of the study's form that takes a second, and a device whose clock is made up."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.cuda.telemetry import State
from routeblock.evidence.digest import sha256_file
from routeblock.grouped_schedule import cpu, protocol, record
from routeblock.grouped_schedule.campaigns import Place, Planner, Setup
from routeblock.grouped_schedule.fixture import Fixture
from routeblock.grouped_schedule.measure import POISON
from routeblock.grouped_schedule.schedules import Arm
from routeblock.grouped_schedule.study import STUDY
from routeblock.timing.loop import Sample
from routeblock.timing.plan import Series
from routeblock.timing.record import Record

COMMITTED = Path(__file__).resolve().parents[2] / "fixtures/protocols/grouped_schedule.json"


def told() -> dict[str, Any]:
    """The tiny protocol as JSON: every family and arm, few rows, one shape each."""
    plan = json.loads(COMMITTED.read_text())
    plan |= {"rows": 37, "cols": 256, "repetitions": 3}
    plan["families"][0] |= {"slots": [16], "pools": [8]}
    plan["families"][1] |= {"slots": [16], "pools": [8]}
    plan["confirmation"]["shapes"] = [{"slots": 16, "pool": 8}]
    plan["serial_prototype"]["shapes"] = [{"slots": 16, "pool": 8}]
    plan["expected_per_device"] = {
        "sweep_comparisons": 13,
        "sweep_batches": 13 * 3 * 2,
        "confirmation_comparisons": 6,
        "confirmation_batches": 12,
    }
    return plan


def write(folder: Path) -> Path:
    """The tiny protocol as a file."""
    path = folder / "protocol.json"
    path.write_text(json.dumps(told()))
    return path


PLAN = protocol.Protocol.model_validate(told())


CUBIN = "c" * 64


def contents(root: Path) -> Path:
    """The list of an archive of everything below `root`, as the recording machine writes it."""
    listed = {p.relative_to(root).as_posix(): {"sha256": sha256_file(p)} for p in root.rglob("*") if p.is_file()}
    path = root / "contents.json"
    path.write_text(json.dumps(listed | {"build/none/q6k_schedules.cubin": {"sha256": CUBIN}}))
    return path


class MadeUpClock:
    """Runs on this CPU; times come from `time_us(arm, call)`, rejections from `reason(arm, call)`."""

    place = Place("made-up", "cpu0", None)

    def __init__(
        self,
        time_us: Callable[[str, int], float] = lambda arm, call: 100.0 + call % 7,
        reason: Callable[[str, int], str] = lambda arm, call: "",
        spoil: str = "",
    ) -> None:
        self.time_us, self.reason, self.spoil = time_us, reason, spoil
        self.calls, self.rests = itertools.count(), list[float]()
        self.now = State(0, 1, -1, -1)

    def load(self, fixture: Fixture, setup: Setup) -> None:
        self.fixture = fixture

    def output(self, arm: Arm) -> np.ndarray:
        out = np.full((self.fixture.cell.slots, self.fixture.cell.rows), POISON, np.uint32).view(np.float32)
        cpu.launch(arm, self.fixture, out, 1)
        if arm.name == self.spoil:
            out.view(np.uint32)[self.fixture.active[0], 0] ^= 1
        return out

    def warm_up(self, series: Series, clocks: tuple[str, ...]) -> None:
        """Nothing to warm."""

    def measure(self, series: Series, clocks: tuple[str, ...]) -> list[Sample]:
        """All clocks in one call, whose rejection is seen right after it."""
        calls = [next(self.calls) for _ in clocks]
        reason = next((r for call in calls if (r := self.reason(series.side, call))), "")
        events, processes = {"throttled": (4, 1), "other_process": (0, 2), "": (0, 1)}[reason]
        self.now = State(events, processes, -1, -1)
        return [Sample(self.time_us(series.side, call), 1) for call in calls]

    def state(self) -> State:
        """Of the last call, once: the next look sees a quiet device."""
        seen, self.now = self.now, State(0, 1, -1, -1)
        return seen

    def pause(self, seconds: float) -> None:
        self.rests.append(seconds)

    def memory_in_use(self) -> int:
        return 7 << 20

    def identity(self) -> dict[str, Any]:
        place = self.place
        return {"lane": place.lane, "device": place.device, "architecture": "none", "cubin_sha256": CUBIN}


CODE = "0" * 64


def recorded(folder: Path, clock: MadeUpClock, rule: str, protocol_file: Path) -> Record:
    """A record of the tiny protocol."""
    plan = protocol.load(protocol_file)
    stages = Planner(plan, clock.place).stages(rule)
    return record.write(folder, clock, stages, plan, rule=rule, inputs=[protocol_file], modules=[STUDY.module])
