# SPDX-License-Identifier: Apache-2.0
"""The protocol check: does a record hold each batch that its protocol orders, once, in order, and no other?

How long a batch took is looked at no further than that it took some time. A few things leave no trace in a record whose
digests are written anew: a rejected attempt deleted with those after it renumbered, plausible times in place of others,
and whether the host really was late. The digests of the recording machine show those.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

from routeblock.cuda.telemetry import UNKNOWN, State, throttled
from routeblock.timing.batches import Row
from routeblock.timing.plan import Checked, Key, Series, Stage
from routeblock.timing.protocol import Acceptance, Rejection
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import Record, Study

_STATE = ("clock_events", "compute_processes", "sm_clock_mhz", "temperature_c")
_state = itemgetter(*_STATE)
LATE = "stream"  # the clock on which a host can be late
# The reason for a label that is not the stage's; any other is called by its own name.
_LABELS = {"side": Reason.ARM, "calls": Reason.CALLS}
# Without these a record can still be recounted: what is not there is named.
INCOMPLETE = frozenset({Reason.POINT_MISSING, Reason.SERIES_MISSING, Reason.SEAL})

Family = tuple[tuple[str, ...], ...]


def findings(study: Study, record: Record, protocol: Any) -> list[Finding]:
    """Where a record leaves its protocol; empty if nowhere."""
    return check(study, record, study.table.rows(record.batches), protocol)


def check(study: Study, record: Record, rows: list[Row], protocol: Any) -> list[Finding]:
    """The same, with the batches of `record` given as `rows`, in the order of their file."""
    carried, given = record.run["protocol_sha256"], protocol.digest()
    wrong = []
    if carried != given:
        detail = f"carries protocol {carried[:12]}, the given one is {given[:12]}"
        wrong.append(Finding("run.json", Reason.PROTOCOL, detail))
    wrong += study.documents_check(protocol, record)
    wrong += _counts(study, record, rows)
    return wrong + list(_Walk(study, record, rows, protocol).findings())


def _counts(study: Study, record: Record, rows: list[Row]) -> Iterator[Finding]:
    stated, ours = record.run["batches"], Counter(study.counted(row) for row in rows)
    for kind in sorted(ours.keys() | stated.keys()):
        if ours.get(kind, 0) != stated.get(kind, 0):
            yield Finding("run.json", Reason.COUNTS, f"{stated.get(kind, 0)} {kind}, there are {ours.get(kind, 0)}")


@dataclass(frozen=True)
class _Planned:
    """A stage with what is looked up of it for every batch."""

    stage: Stage
    number: int

    @cached_property
    def series(self) -> dict[str, Series]:
        return {series.name: series for series in self.stage.series}

    @cached_property
    def family_of(self) -> dict[str, Family]:
        return {clock: family for family in self.stage.families for group in family for clock in group}

    @cached_property
    def positions(self) -> list[dict[str, int]]:
        """By repetition: the place of each series."""
        orders = (self.stage.order(repetition) for repetition in range(self.stage.repetitions))
        return [{series.name: place for place, series in enumerate(order)} for order in orders]

    @cached_property
    def _known(self) -> dict[Key, tuple[Callable[[Row], Any], dict[str, Any]]]:
        return {}

    def labels(
        self, series: str, side: str, repetition: int, clock: str
    ) -> tuple[Callable[[Row], Any], dict[str, Any]]:
        """The columns that follow from the protocol for such a batch, and how they are read from a row."""
        key = series, side, repetition, clock
        if key not in self._known:
            due = {
                **self.stage.labels,
                **self.stage.of_side.get(side, {}),
                "side": self.series[series].side,
                "position": self.positions[repetition][series],
                "direction": "reversed" if repetition % 2 else "forward",
                "calls": self.stage.calls[clock],
            }
            self._known[key] = itemgetter(*due), due
        return self._known[key]


class _Walk:
    """The batches of one record, sorted into attempts at the units that are accepted or rejected together."""

    def __init__(self, study: Study, record: Record, rows: list[Row], protocol: Any) -> None:
        self._study, self._record, self._rows = study, record, rows
        self._rules: Acceptance = protocol.acceptance
        self._key: Callable[[Row], Key] = itemgetter(*study.key)
        self._reasons = {str(reason) for reason in self._rules.reject}
        stages: Sequence[Stage] = study.stages(protocol, record)
        self._stages = {stage.key: _Planned(stage, number) for number, stage in enumerate(stages)}
        self._wrong: dict[Key, set[str]] = {}
        self._checked: set[tuple[Key, str]] = set()
        # By stage and family: by unit, attempt: the batches.
        self._units: dict[tuple[Key, Family], dict[Key, dict[int, list[int]]]] = {}

    def findings(self) -> Iterator[Finding]:
        for check in self._study.checks(self._record):
            yield from self._check(check)
        yield from self._sort()
        timed = {key for key, _ in self._units}
        left = set(self._record.run.get("not_measured", ()))
        for key, planned in self._stages.items():
            stage, named = planned.stage, planned.stage.label in left
            if key in timed and named:
                yield Finding(stage.label, Reason.COUNTS, "run.json says that it was not measured, it has batches")
            if key not in timed:
                detail = "not measured" if named else "no batches, and run.json does not say that it was not measured"
                yield Finding(stage.label, Reason.POINT_MISSING, detail)
                continue
            for side in stage.checked:
                if (key, side) not in self._checked:
                    yield Finding(stage.label, Reason.NOT_CHECKED, f"timed, {side + ' ' if side else ''}not checked")
            for family in stage.families:
                yield from self._family(planned, family)

    def _check(self, check: Checked) -> Iterator[Finding]:
        planned = self._stages.get(check.key)
        if planned is None or check.side not in planned.stage.checked:
            yield Finding(check.where, Reason.POINT_UNKNOWN, "no point of the protocol")
            return
        if (check.key, check.side) in self._checked:
            yield Finding(check.where, Reason.NOT_CHECKED, "checked twice")
        self._checked.add((check.key, check.side))
        if check.wrong:
            self._wrong.setdefault(check.key, set()).update(check.wrong)
            yield Finding(check.where, Reason.PLAN_WRONG, f"wrong {', '.join(check.wrong)}")

    def _who(self, index: int) -> str:
        row = self._rows[index]
        planned = self._stages.get(self._key(row))
        where = planned.stage.label if planned else " ".join(map(str, self._key(row)))
        who = f"batch {index} ({where} {row.get('clock', '')} {row['series']}, repetition {row['repetition']}"
        return f"{' '.join(who.split())}, attempt {row['attempt']})"

    def _sort(self) -> Iterator[Finding]:
        """Put every batch where it belongs, and look at it alone."""
        strangers: set[Key] = set()
        reached = (0, 0)  # stage and family
        for index, row in enumerate(self._rows):
            planned = self._stages.get(self._key(row))
            if planned is None:
                if self._key(row) not in strangers:
                    yield Finding(self._who(index), Reason.POINT_UNKNOWN, "no point of the protocol")
                strangers.add(self._key(row))
                continue
            clock, stage = row.get("clock", ""), planned.stage
            family = planned.family_of.get(clock)
            if family is None:
                detail = f"its clocks are {', '.join(planned.family_of)}, not {clock!r}"
                yield Finding(self._who(index), Reason.CLOCK_UNKNOWN, detail)
            elif row["series"] not in planned.series:
                detail = f"the protocol's series are {', '.join(planned.series)}"
                yield Finding(self._who(index), Reason.SERIES_UNKNOWN, detail)
            elif not 0 <= row["repetition"] < stage.repetitions:
                detail = f"{stage.repetitions} repetitions are planned"
                yield Finding(self._who(index), Reason.REPETITION_UNKNOWN, detail)
            elif not 0 <= row["attempt"] < self._rules.attempts:
                detail = f"{self._rules.attempts} attempts are allowed"
                yield Finding(self._who(index), Reason.ATTEMPT_UNPLANNED, detail)
            else:
                unit = (row["repetition"],) if stage.whole else (row["repetition"], row["series"], clock)
                units = self._units.setdefault((stage.key, family), {})
                units.setdefault(unit, {}).setdefault(row["attempt"], []).append(index)
                yield from self._alone(index, row, planned)
                here = planned.number, stage.families.index(family)
                if here < reached:
                    yield Finding(self._who(index), Reason.ORDER, "its stage was over")
                reached = here

    def _alone(self, index: int, row: Row, planned: _Planned) -> Iterator[Finding]:
        values, due = planned.labels(row["series"], row["side"], row["repetition"], row.get("clock", ""))
        if (stated := values(row)) != tuple(due.values()):
            for (name, should), is_ in zip(due.items(), stated, strict=True):
                if is_ != should:
                    reason = _LABELS.get(name) or Reason(name)
                    yield Finding(self._who(index), reason, f"{name} is {is_!r}, the protocol gives {should!r}")
        times = row.get("elapsed_us", row["time_us"]), row["time_us"]
        if not (all(map(math.isfinite, times)) and min(times) > 0):
            yield Finding(self._who(index), Reason.TIME, f"{times[0]!r} us, {times[1]!r} us a call: no time")
        elif "elapsed_us" in row and (row["calls"] == 0 or times[1] != times[0] / row["calls"]):
            detail = f"{times[1]!r} us a call are not {times[0]!r} us by {row['calls']}"
            yield Finding(self._who(index), Reason.TIME, detail)
        if min(state := _state(row)) < UNKNOWN:
            yield Finding(self._who(index), Reason.STATE, f"{state} is no state of a device")
        if row["accepted"] != (row["reason"] == "") or (row["reason"] and row["reason"] not in self._reasons):
            detail = f"accepted {row['accepted']} with reason {row['reason']!r}"
            yield Finding(self._who(index), Reason.ACCEPTANCE, detail)

    def _family(self, planned: _Planned, family: Family) -> Iterator[Finding]:
        """The units of a stage on clocks that are read together, attempt by attempt."""
        stage = planned.stage
        units = self._units.get((stage.key, family), {})
        yield from self._sequence(planned, family, units)
        clocks = [clock for group in family for clock in group]
        spare = self._rules.retries
        for repetition in range(stage.repetitions):
            where = f"{stage.label} {clocks[0]}".rstrip() + f", repetition {repetition}"
            mine = [unit for unit in units if unit[0] == repetition]
            if not mine:
                yield Finding(where, Reason.REPETITION_MISSING, f"no batches, {stage.repetitions} are planned")
                continue
            for unit, batches in _expected(stage, repetition, clocks):
                if unit in units:
                    spare = yield from self._attempts(where, units[unit], batches, spare)
                else:
                    yield Finding(where, Reason.BATCH_MISSING, f"no batch of {' '.join(map(str, unit[1:]))}".rstrip())

    def _attempts(
        self, where: str, attempts: dict[int, list[int]], batches: list[Key], spare: int | None
    ) -> Generator[Finding, None, int | None]:
        """The attempts at one unit, whose batches are (clock, series). Returns the retries that are left."""
        over = ""
        for attempt in range(max(attempts) + 1):
            here = f"{where}, attempt {attempt}"
            if attempt not in attempts:
                yield Finding(here, Reason.ATTEMPT_MISSING, f"no batches, there are some of {max(attempts)}")
                continue
            if over:
                yield Finding(here, Reason.ATTEMPT_UNPLANNED, over)
                continue
            indices = attempts[attempt]
            yield from self._whole(here, indices, batches)
            accepted, reason = Counter(self._verdict(i) for i in indices).most_common(1)[0][0]
            if accepted:
                over = f"attempt {attempt} was accepted"
            elif reason == Rejection.INCORRECT:  # of the stage, so of every further attempt too
                over = "another attempt does not make a result right"
            elif spare == 0:
                over = f"all {self._rules.retries} retries were used"
            elif attempt + 1 < self._rules.attempts:
                spare = None if spare is None else spare - 1
                if attempt == max(attempts):
                    yield Finding(here, Reason.ATTEMPT_MISSING, f"rejected as {reason!r}, not timed again")
        return spare

    def _verdict(self, index: int) -> tuple[bool, str]:
        return self._rows[index]["accepted"], self._rows[index]["reason"]

    def _whole(self, where: str, indices: list[int], batches: list[Key]) -> Iterator[Finding]:
        """One attempt: each batch once, one verdict, one state, and a verdict that fits it."""
        there = Counter((self._rows[i].get("clock", ""), self._rows[i]["series"]) for i in indices)
        for clock, name in batches:
            if not there[clock, name]:
                yield Finding(where, Reason.BATCH_MISSING, f"no batch of {name}, {clock}".rstrip(", "))
        seen: set[Key] = set()
        for i in indices:
            key = (self._rows[i].get("clock", ""), self._rows[i]["series"])
            if key in seen:
                yield Finding(self._who(i), Reason.BATCH_TWICE, f"{there[key]} batches")
            seen.add(key)
        if len(verdicts := {self._verdict(i) for i in indices}) > 1:
            detail = "; ".join(f"accepted {accepted}, reason {reason!r}" for accepted, reason in sorted(verdicts))
            yield Finding(where, Reason.SPLIT, detail)
        states = {_state(self._rows[i]) for i in indices}
        if len(states) > 1:
            detail = f"{len(states)} states of {', '.join(_STATE)}: {' and '.join(map(str, sorted(states)))}"
            yield Finding(where, Reason.STATE, detail)
        due = self._due(indices)
        verdict = verdicts.pop() if len(verdicts) == 1 else None
        if due and any(self._rows[i]["accepted"] for i in indices):
            yield Finding(where, Reason.NOT_REJECTED, f"accepted, the protocol rejects it: {', '.join(sorted(due))}")
        elif verdict and verdict[1] in self._reasons:
            possible = due | ({Rejection.LATE} if LATE in {clock for clock, _ in batches} else set())
            if verdict[1] not in possible:
                detail = f"rejected as {verdict[1]!r}, seen was {', '.join(sorted(due)) or 'nothing'}"
                yield Finding(where, Reason.REASON_NOT_SEEN, detail)

    def _due(self, indices: list[int]) -> set[str]:
        """The protocol's reasons for rejection that the device's state and the check before timing give."""
        due: set[str] = set()
        for state in {State(*_state(self._rows[i])) for i in indices}:
            if throttled(state, self._rules.throttle_reasons):
                due.add(Rejection.THROTTLED)
            if state.compute_processes > 1:
                due.add(Rejection.OTHER_PROCESS)
        wrong = self._wrong.get(self._key(self._rows[indices[0]]), set())
        return due | ({Rejection.INCORRECT} if any(self._rows[i]["side"] in wrong for i in indices) else set())

    def _sequence(self, planned: _Planned, family: Family, units: dict[Key, dict[int, list[int]]]) -> Iterator[Finding]:
        """Batches stand in their file as they were timed. A wrong position is reported as such: no order follows."""
        clocks = [clock for group in family for clock in group]
        before: tuple[Key, Key] = ((), ())
        for i in sorted(i for attempts in units.values() for mine in attempts.values() for i in mine):
            row, stage = self._rows[i], planned.stage
            repetition, attempt, clock = row["repetition"], row["attempt"], clocks.index(row.get("clock", ""))
            turn: Key
            place: Key
            if stage.whole:
                turn, place = (repetition, attempt), (row["position"], clock)
            else:
                turn = (repetition,)
                place = (row["position"], attempt, -clock if repetition % 2 else clock)
            if row["position"] != planned.positions[repetition][row["series"]]:
                place = ()
            if turn < before[0] or (turn == before[0] and place and before[1] and place < before[1]):
                detail = f"repetition {repetition}, attempt {attempt}, position {row['position']} stands too late"
                yield Finding(self._who(i), Reason.ORDER, detail)
            before = turn, place


def _expected(stage: Stage, repetition: int, clocks: list[str]) -> Iterator[tuple[Key, list[Key]]]:
    """The units of one repetition, each with its batches as (clock, series)."""
    every = [(clock, series.name) for clock in clocks for series in stage.series]
    if stage.whole:
        yield (repetition,), every
    else:
        for clock, name in every:
            yield (repetition, name, clock), [(clock, name)]
