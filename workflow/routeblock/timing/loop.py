# SPDX-License-Identifier: Apache-2.0
"""The measuring loop: series in the protocol's order, rejected by its rules, timed again where it allows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from routeblock.cuda.telemetry import State, rejection, seen
from routeblock.timing.batches import Row
from routeblock.timing.plan import Key, Series, Stage
from routeblock.timing.protocol import Acceptance, Rejection


@dataclass(frozen=True)
class Sample:
    """One batch on one clock: microseconds of all its calls. late: the host did not fill the queue in time."""

    elapsed_us: float
    calls: int
    late: bool = False


class Device(Protocol):
    """Where batches are timed."""

    def state(self) -> State:
        """What the device is doing now."""

    def pause(self, seconds: float) -> None:
        """Leave it idle for so long."""


@dataclass(frozen=True)
class Verdict:
    """What was checked before timing: the sides that are wrong, and the facts that the record keeps."""

    wrong: frozenset[str]
    facts: dict[str, Any]


class Clocked(Protocol):
    """Batches that can be run."""

    def warm_up(self, series: Series, clocks: tuple[str, ...]) -> None:
        """Make the batch of a series and run it without timing."""

    def measure(self, series: Series, clocks: tuple[str, ...]) -> list[Sample]:
        """Run one batch and read these clocks, in this order."""


class Session(Clocked, Protocol):
    """One stage on a device, ready to run. stage: with the labels that this device gives it."""

    stage: Stage

    def check(self) -> Verdict:
        """Run every side and compare."""

    def close(self) -> None:
        """Free what nothing else frees."""


@dataclass(frozen=True)
class _Turn:
    """One run of a batch: a series at its position, and the clocks that are read."""

    position: int
    series: Series
    clocks: tuple[str, ...]


class _Watch:
    """What was seen of the device right after one batch was seen right before the next."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._before = device.state()

    def look(self) -> State:
        """The state over what ran since the last look."""
        after = self._device.state()
        state, self._before = seen(self._before, after), after
        return state

    def rest(self, seconds: float) -> None:
        """Let the device rest: what was seen before no longer counts."""
        self._device.pause(seconds)
        self._before = self._device.state()


class Opening(Device, Protocol):
    """A device that makes stages the ones that run."""

    def open(self, stage: Stage) -> Session:
        """Its session."""


@dataclass
class Measured:
    """What is there so far. left: the stages that the time did not suffice for."""

    rows: list[Row] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def run(
    device: Opening,
    stages: Iterable[Stage],
    rules: Acceptance,
    key: tuple[str, ...],
    measured: Measured,
    *,
    deadline: float = math.inf,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Check and time every stage into `measured`; none is begun after `deadline`, a value of time.monotonic()."""
    for stage in stages:
        if time.monotonic() > deadline:
            measured.left.append(stage.label)
            continue
        session = device.open(stage)
        verdict = session.check()
        measured.checks.append(verdict.facts)
        measured.rows += time_stage(device, session, session.stage, rules, key, verdict.wrong)
        session.close()
        progress(stage.label)


def time_stage(
    device: Device, session: Clocked, stage: Stage, rules: Acceptance, key: tuple[str, ...], wrong: frozenset[str]
) -> Iterator[Row]:
    """Every batch of `stage`, accepted or not, as rows (see `batches`). `key` names the columns of the stage's key.

    A batch of a side in `wrong` is rejected as incorrect; in a stage that is judged whole, every batch then is.
    """
    for family in stage.families:
        for series in stage.series:
            for group in family:
                session.warm_up(series, group)
        spare, watch = rules.retries, _Watch(device)
        for repetition in range(stage.repetitions):
            for unit in _units(stage, family, repetition):
                pending = unit
                for attempt in range(rules.attempts):
                    if stage.pause_s:
                        device.pause(stage.pause_s)
                    rows = [
                        row
                        for part in ([pending] if stage.whole else [[turn] for turn in pending])
                        for row in _timed(session, stage, part, watch, rules, wrong)
                    ]
                    place: Row = {"repetition": repetition, "attempt": attempt}
                    place |= {"direction": "reversed" if repetition % 2 else "forward"}
                    yield from ({**dict(zip(key, stage.key, strict=True)), **place, **row} for row in rows)
                    pending = _again(pending, rows)
                    if not pending or attempt + 1 == rules.attempts or spare == 0:
                        break
                    spare = None if spare is None else spare - 1
                    watch.rest(rules.rest_s)


def _units(stage: Stage, family: tuple[tuple[str, ...], ...], repetition: int) -> Iterator[list[_Turn]]:
    """What is tried again together: a whole repetition, or one series on its clocks."""
    order = enumerate(stage.order(repetition))
    if stage.whole:
        yield [_Turn(position, series, group) for position, series in order for group in family]
        return
    groups = [group[::-1] for group in family[::-1]] if repetition % 2 else list(family)
    for position, series in order:
        yield [_Turn(position, series, group) for group in groups]


def _timed(
    session: Clocked, stage: Stage, part: list[_Turn], watch: _Watch, rules: Acceptance, wrong: frozenset[str]
) -> Iterator[Row]:
    """Run what is accepted or rejected together."""
    found = [(turn, session.measure(turn.series, turn.clocks)) for turn in part]
    state = watch.look()
    reason: str = rejection(state, rules.throttle_reasons)
    if not reason and any(sample.late for _, samples in found for sample in samples):
        reason = str(Rejection.LATE)
    if wrong and (stage.whole or part[0].series.side in wrong):
        reason = str(Rejection.INCORRECT)
    for turn, samples in found:
        for clock, sample in zip(turn.clocks, samples, strict=True):
            yield {
                **stage.labels,
                **stage.of_side.get(turn.series.side, {}),
                "series": turn.series.name,
                "side": turn.series.side,
                "clock": clock,
                "position": turn.position,
                "elapsed_us": sample.elapsed_us,
                "calls": sample.calls,
                "time_us": sample.elapsed_us / sample.calls,
                "accepted": not reason,
                "reason": reason,
                **vars(state),
            }


def _again(turns: list[_Turn], rows: list[Row]) -> list[_Turn]:
    """The runs, with the clocks, that were rejected for something that may pass."""
    rejected: set[Key] = {
        (row["series"], row["clock"]) for row in rows if row["reason"] not in ("", Rejection.INCORRECT)
    }
    pending = []
    for turn in turns:
        if clocks := tuple(clock for clock in turn.clocks if (turn.series.name, clock) in rejected):
            pending.append(_Turn(turn.position, turn.series, clocks))
    return pending
