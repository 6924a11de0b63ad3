# SPDX-License-Identifier: Apache-2.0
"""Timing, acceptance and verdicts of the fast paths on a device that is no GPU."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeblock.cuda.q6k_plan import plan, tuned
from routeblock.cuda.telemetry import State
from routeblock.errors import InputError
from routeblock.q6k_dispatch import counters, fixture, targets
from routeblock.q6k_dispatch.batches import Batch
from routeblock.q6k_dispatch.protocol import OURS, Protocol, Role, Side, load, shapes
from routeblock.q6k_dispatch.study import KEY, STUDY, pairs, planned
from routeblock.timing.loop import Measured, Sample, Verdict, run
from routeblock.timing.plan import Series, Stage
from routeblock.timing.record import Record
from routeblock.timing.statistics import Comparison, comparisons

ROOT = Path(__file__).resolve().parents[2]
PLAN = load(ROOT / targets.PROTOCOL)
QUIET = State(0, 1, 1980, 40)


class Session:
    """Times by side: a table, and a little noise by repetition."""

    def __init__(self, device: Device, stage: Stage) -> None:
        self.device, self.stage = device, stage
        shape = stage.shape
        self.jobs = fixture.make(shape, PLAN.seed)
        self.plan = plan(shape.sizes, tuned(shape.sizes, 132))

    def check(self) -> Verdict:
        facts = {"output_sha256": {str(s): "x" for s in OURS}, "samples": [], "furthest_of_bound": 0.0}
        shape = dict(zip(KEY, self.stage.key, strict=True))
        return Verdict(self.device.wrong, shape | facts | {"wrong": sorted(self.device.wrong)})

    def warm_up(self, series: Series, clocks: tuple[str, ...]) -> None:
        self.device.warmed.append(series.name)

    def measure(self, series: Series, clocks: tuple[str, ...]) -> list[Sample]:
        self.device.calls += 1
        return [Sample(16 * self.device.times[Side(series.side)] * (1 + 0.001 * (self.device.calls % 3)), 16)]

    def close(self) -> None:
        self.device.closed += 1


class Device:
    """Sides with given times; `states` are what NVML says, the last one for ever."""

    def __init__(self, times: dict[Side, float], states: list[State], wrong: frozenset[str] = frozenset()) -> None:
        self.times, self.states, self.wrong = times, states, wrong
        self.calls = self.closed = 0
        self.warmed: list[str] = []

    def state(self) -> State:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def open(self, stage: Stage) -> Session:
        return Session(self, stage)

    def pause(self, seconds: float) -> None:
        pass


def small(**changes: Any) -> Protocol:
    """The protocol with one shape of every role."""
    told = PLAN.model_dump(mode="json")
    told["shapes"] = {role: matrices[:1] for role, matrices in told["shapes"].items()}
    return Protocol.model_validate(told | changes)


TIMES = dict.fromkeys((s.side for s in PLAN.series), 20.0) | {Side.AUTO: 9.0, Side.VLLM_BATCHED: 10.0}


def measured(device: Device, protocol: Protocol) -> Measured:
    found = Measured()
    stages = planned(protocol, set(Side) - set(device.times))
    run(device, stages, protocol.acceptance, KEY, found)
    return found


def batches(device: Device, protocol: Protocol) -> list[Batch]:
    return [STUDY.table.batch(row) for row in measured(device, protocol).rows]


def compare(found: list[Batch], protocol: Protocol) -> list[Comparison]:
    record = Record(Path(), found, {})
    return comparisons(STUDY.table.rows(found), KEY, pairs(protocol, record), protocol.bootstrap)


def best(found: list[Comparison]) -> list[tuple[str, str | None, bool | None]]:
    """By role: the best peer, and whether the threshold is reached."""
    return [(c.role, c.series, c.reached) for c in found if c.best]


def test_a_shape_is_reached_where_the_whole_interval_is(tmp_path: Path) -> None:
    protocol = small()
    STUDY.table.write(tmp_path / "b.parquet", batches(Device(TIMES, [QUIET]), protocol))
    compared = compare(STUDY.table.read(tmp_path / "b.parquet"), protocol)
    assert best(compared) == [
        ("tuned", "vllm_batched", True),
        ("held_out", "vllm_batched", True),
        ("study", "vllm_batched", None),
    ]
    first = next(c for c in compared if c.best)
    assert first.change is not None and first.low is not None and first.high is not None
    assert abs(first.change + 0.1) < 0.01 and first.low <= first.change <= first.high


def test_a_slower_kernel_is_not_reached() -> None:
    protocol = small()
    found = batches(Device(TIMES | {Side.AUTO: 10.01}, [QUIET]), protocol)
    assert [reached for _, _, reached in best(compare(found, protocol))] == [False, False, None]


def test_absent_peers_are_no_victory() -> None:
    protocol = small()
    there = {side: t for side, t in TIMES.items() if side not in (Side.VLLM_VEC, Side.VLLM_BATCHED, Side.LLAMA_CPP)}
    compared = compare(batches(Device(there, [QUIET]), protocol), protocol)
    assert not any(c.best or c.reached for c in compared)
    assert {c.verdict for c in compared if c.series in protocol.peers} == {"too few accepted"}


def test_a_peer_without_one_repetition_leaves_its_shape_undecided() -> None:
    """The hole that there was: the best peer dropped out, and the next best was beaten by more."""
    protocol = small()
    found = batches(Device(TIMES, [QUIET]), protocol)
    gone = next(b for b in found if b.series == "vllm_batched" and b.repetition == 5)
    compared = compare([b for b in found if b is not gone], protocol)
    assert [role for role, _, _ in best(compared)] == ["held_out", "study"]
    mine = [c for c in compared if c.role == "tuned" and c.series in protocol.peers]
    assert {c.reached for c in mine} == {None}
    assert {(c.series, c.n) for c in mine if c.verdict == "too few accepted"} == {("vllm_batched", 11)}


def test_a_throttled_repetition_is_timed_again_and_kept() -> None:
    protocol = small()
    found = batches(Device(TIMES, [QUIET, State(0x8, 1, 900, 80), QUIET]), protocol)
    reasons = Counter(b.reason for b in found)
    assert reasons["throttled"] == len(PLAN.series)
    again = [b for b in found if b.attempt == 1]
    assert again and {b.repetition for b in again} == {0}
    assert all(c.n == PLAN.repetitions for c in compare(found, protocol))


def test_a_wrong_side_voids_the_shape() -> None:
    protocol = small()
    found = batches(Device(TIMES, [QUIET], frozenset({"vllm_vec"})), protocol)
    assert {b.reason for b in found} == {"incorrect"}
    assert all(c.reached is None and c.candidate_us is None for c in compare(found, protocol))


def test_a_repetition_accepted_twice_is_refused() -> None:
    protocol = small()
    found = batches(Device(TIMES, [QUIET]), protocol)
    with pytest.raises(InputError, match="accepted twice"):
        compare([*found, found[0]], protocol)


def test_every_series_stands_in_every_place() -> None:
    found = batches(Device(TIMES, [QUIET]), small())
    places = Counter((b.series, b.position) for b in found if b.role == "tuned")
    assert max(places.values()) <= 3 and {b.direction for b in found} == {"forward", "reversed"}


def test_shapes_have_their_jobs() -> None:
    assert len({s.label for s in shapes(PLAN)}) == 28
    for shape in shapes(PLAN):
        jobs = fixture.make(shape, PLAN.seed)
        assert jobs.x.shape == (shape.slots // shape.top_k, shape.cols) and jobs.ids.max() < shape.pool
        if shape.role is Role.STUDY:
            assert jobs.active.size == shape.slots - 1
        else:
            rows = jobs.ids.reshape(-1, PLAN.top_k)
            assert jobs.active.size == shape.slots
            assert all(np.unique(row).size == PLAN.top_k for row in rows)


def test_held_out_shapes_are_not_among_the_tuned() -> None:
    assert not set(PLAN.shapes.held_out) & set(PLAN.shapes.tuned)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"candidate": "nobody"}, "series 'nobody' is there 0 times"),
        ({"surprise": 1}, "surprise: Extra inputs"),
        (
            {
                "shapes": PLAN.model_dump(mode="json")["shapes"]
                | {"tuned": [{"slots": 9, "pool": 8, "rows": 1, "cols": 256}]}
            },
            "9 slots over a pool of 8",
        ),
    ],
)
def test_a_protocol_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(PLAN.model_dump(mode="json") | change))
    with pytest.raises(InputError, match=says):
        load(path)


def ncu(graphs: int) -> str:
    """What ncu prints: a head, units, a line a graph."""
    metrics = [*PLAN.counters.metrics.values(), *PLAN.counters.stalls.values()]
    lines = ["==PROF== Connected", ",".join(f'"{n}"' for n in ("ID", "Kernel Name", *metrics))]
    lines.append(",".join(f'"{n}"' for n in ("", "", *["unit"] * len(metrics))))
    for i in range(graphs):
        lines.append(",".join(f'"{n}"' for n in (i, "graph", *[f"1,{i:03}.5"] * len(metrics))))
    return "\n".join(lines)


def test_some_sides_are_counted_at_every_bound_shape_and_all_at_some() -> None:
    plan, cases = PLAN.counters, counters.cases(PLAN)
    bound = {(s.role, s.slots, s.pool, s.rows, s.cols) for s in shapes(PLAN) if s.role in PLAN.threshold.roles}
    assert Side.AUTO in plan.everywhere
    for everywhere in plan.everywhere:
        assert {(s.role, s.slots, s.pool, s.rows, s.cols) for s, side in cases if side is everywhere} == bound
    others = set(plan.sides) - set(plan.everywhere)
    assert len(cases) == len(set(cases)) == len(bound) * len(plan.everywhere) + len(plan.shapes) * len(others)


def test_a_graph_of_every_case_is_counted() -> None:
    cases = counters.cases(PLAN)
    rows = counters.parse(ncu(len(cases)), PLAN)
    assert [(r["role"], r["slots"], r["side"]) for r in rows] == [(s.role, s.slots, side) for s, side in cases]
    assert [r["time_ns"] for r in rows[:2]] == [1000.5, 1001.5]
    assert rows[1]["stalls"] == dict.fromkeys(PLAN.counters.stalls, 1001.5)


def test_a_missing_graph_is_a_refusal() -> None:
    with pytest.raises(ValueError, match="graphs were counted"):
        counters.parse(ncu(len(counters.cases(PLAN)) - 1), PLAN)


def test_a_machine_without_ncu_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert counters.count(ROOT / targets.PROTOCOL, tmp_path, tmp_path, None)["outcome"] == "absent"
