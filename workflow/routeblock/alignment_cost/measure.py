# SPDX-License-Identifier: Apache-2.0
"""Timing by the protocol: correctness first, then repetitions in its order, accepted or rejected by its rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from routeblock.alignment_cost.batches import Batch
from routeblock.alignment_cost.protocol import Arm, Campaign, Mode, Point, Reason, Role, Series, points
from routeblock.alignment_cost.protocol import Protocol as Plan
from routeblock.cuda.telemetry import State, rejection, seen
from routeblock.protocols import ordered

# Queued calls are clocked on the device and on the host at once.
CLOCKS = {Mode.GRAPH: (Mode.GRAPH,), Mode.STREAM: (Mode.STREAM, Mode.HOST)}


@dataclass(frozen=True)
class Sample:
    """One batch: microseconds of all `calls` by clock, and whether a streamed one found the device ahead."""

    elapsed_us: dict[Mode, float]
    calls: int
    late: bool = False


@dataclass(frozen=True)
class Checked:
    """What was checked at a point before timing: the arms that are wrong, and facts for the record."""

    wrong: frozenset[Arm]
    facts: dict[str, Any]


class Session(Protocol):
    """One point on a device, ready to run."""

    variant: str

    def check(self) -> Checked:
        """Run every arm and compare."""

    def warm_up(self, series: Series, mode: Mode, times: int) -> None:
        """Make the batch of a series and run it without clocking."""

    def measure(self, series: Series, mode: Mode) -> Sample:
        """Time one batch, `mode` graph or stream."""


class Rig(Protocol):
    """A device that points can be run on."""

    def open(self, point: Point) -> Session:
        """Make a point the one that runs."""

    def state(self) -> State:
        """What the device is doing."""

    def pause(self, seconds: float) -> None:
        """Let the device rest."""


@dataclass
class Measured:
    """What is there so far. left: the points that the time did not suffice for."""

    batches: list[Batch] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def planned(protocol: Plan) -> list[Point]:
    """All points: those that the targets bind first, the operator before the layer."""
    every = [*points(protocol, Campaign.OPERATOR), *points(protocol, Campaign.LAYER)]
    return [p for p in every if p.role is Role.BOUND] + [p for p in every if p.role is not Role.BOUND]


def run(
    rig: Rig, protocol: Plan, measured: Measured, *, deadline: float, progress: Callable[[str], None] = lambda _: None
) -> None:
    """Measure every point into `measured`; none is begun after `deadline`, a value of time.monotonic()."""
    for point in planned(protocol):
        if time.monotonic() > deadline:
            measured.left.append(point.label)
            continue
        session = rig.open(point)
        checked = session.check()
        measured.checks.append(
            {
                "campaign": str(point.campaign),
                "experts": point.experts,
                "top_k": point.top_k,
                "tokens": point.tokens,
                "block_size": point.block_size,
                "variant": session.variant,
                "wrong": sorted(checked.wrong),
                **checked.facts,
            }
        )
        for mode in CLOCKS:
            measured.batches += _mode(rig, session, point, protocol, mode, checked.wrong)
        progress(point.label)


def _mode(
    rig: Rig, session: Session, point: Point, protocol: Plan, mode: Mode, wrong: frozenset[Arm]
) -> Iterator[Batch]:
    rules = protocol.acceptance
    for series in protocol.series:
        session.warm_up(series, mode, protocol.warmups)
    spare = rules.extra_repetitions
    before = rig.state()
    for repetition in range(point.repetitions):
        for attempt in range(rules.attempts):
            if point.pause_ms:
                rig.pause(point.pause_ms / 1000)
            order = ordered(protocol.series, repetition)
            samples = [session.measure(series, mode) for series in order]
            after = rig.state()
            state, before = seen(before, after), after
            reason = _reason(protocol, order, samples, state, wrong)
            yield from _batches(session, point, protocol, mode, order, samples, repetition, attempt, state, reason)
            if reason in ("", Reason.INCORRECT) or attempt + 1 == rules.attempts or not spare:
                break
            spare -= 1
            rig.pause(rules.pause_ms / 1000)
            before = rig.state()


def _reason(
    protocol: Plan, order: tuple[Series, ...], samples: list[Sample], state: State, wrong: frozenset[Arm]
) -> str:
    if wrong & {s.arm for s in order}:
        return Reason.INCORRECT
    late = Reason.LATE if any(s.late for s in samples) else ""
    return rejection(state, protocol.acceptance.throttle_reasons) or late


def _batches(
    session: Session,
    point: Point,
    protocol: Plan,
    mode: Mode,
    order: tuple[Series, ...],
    samples: list[Sample],
    repetition: int,
    attempt: int,
    state: State,
    reason: str,
) -> Iterator[Batch]:
    for position, (series, sample) in enumerate(zip(order, samples, strict=True)):
        for clock in CLOCKS[mode]:
            if clock is Mode.HOST and point.campaign is Campaign.LAYER:
                continue
            yield Batch(
                str(point.campaign),
                str(point.role),
                point.experts,
                point.top_k,
                point.tokens,
                point.block_size,
                str(clock),
                series.name,
                str(series.arm),
                session.variant if series.arm is Arm.CANONICAL else "",
                repetition,
                attempt,
                position,
                "reversed" if repetition % 2 else "forward",
                sample.elapsed_us[clock],
                sample.calls,
                sample.elapsed_us[clock] / sample.calls,
                protocol.warmups,
                not reason,
                str(reason),
                state.clock_events,
                state.compute_processes,
                state.sm_clock_mhz,
                state.temperature_c,
            )
