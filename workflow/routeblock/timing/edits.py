# SPDX-License-Identifier: Apache-2.0
"""Edits of a record of timings, each as hard to see as it can be; fixtures/record_edits.json declares them.

Rows have the names of `batches.BatchTable.rows`. A study adds edits of its own documents (see its `edits.py`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from routeblock.timing.batches import Row
from routeblock.timing.record import Study

Edit = Callable[["Copy"], None]
OUTSIDE = 9  # tokens or slots that no stage has


class ImpossibleError(Exception):
    """An edit that this record has no room for."""


@dataclass(frozen=True)
class Room:
    """Where a study's edits are made.

    module: whose code it is. soft, hard: clocks whose repetitions can be rejected for `soft_reason`, and others.
    candidate, baseline, other: series; floor_names: the series that change names when floor labels do. moved: the
    column that takes a stage out of the protocol. shown, itself: the series of a row of statistics that exists, and of
    one that cannot. judged, opposite: the values by which a decided row is found, and another verdict. checks: the list
    of checks among a record's documents. whole: as in `plan.Stage`. further: the study's own edits.
    """

    module: str
    soft: tuple[str, ...]
    hard: tuple[str, ...]
    soft_reason: str
    candidate: str
    baseline: str
    other: str
    floor_names: Mapping[str, str]
    moved: str
    shown: str
    itself: str
    judged: Mapping[str, Any]
    opposite: str
    checks: Callable[[dict[str, Any]], list[Row]]
    whole: bool = True
    further: Mapping[str, Edit] = field(default_factory=dict)


@dataclass
class Copy:
    """A record, its protocol as plain JSON and its statistics, to be edited."""

    study: Study
    room: Room
    rows: list[Row]
    documents: dict[str, Any]
    rules: Row
    statistics: Row

    @property
    def run(self) -> Row:
        """run.json."""
        run: Row = self.documents["run"]
        return run

    def again(self) -> Copy:
        """A copy of its own."""
        rest = json.loads(json.dumps([self.documents, self.rules, self.statistics]))
        return Copy(self.study, self.room, [dict(row) for row in self.rows], *rest)

    def count(self) -> None:
        """Let run.json count the batches as they now are."""
        self.run["batches"] = dict(Counter(self.study.counted(row) for row in self.rows))

    def carry(self) -> None:
        """Let run.json carry the digest of the protocol as it now is."""
        self.run["protocol_sha256"] = self.study.protocol.model_validate(self.rules).digest()


def where(rows: Iterable[Row], /, **values: Any) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


def only(found: Iterable[Any], what: str) -> Any:
    """The first of `found`. Raises ImpossibleError without one."""
    try:
        return next(iter(found))
    except StopIteration:
        raise ImpossibleError(f"this record has no {what}") from None


def change(rows: Iterable[Row], /, **values: Any) -> None:
    """Give rows these values."""
    for row in rows:
        row.update(values)


def other_digest(digest: str) -> str:
    """A digest that differs in its last digit."""
    return digest[:-1] + ("0" if digest[-1] != "0" else "1")


def first(copy: Copy, /, **values: Any) -> list[Row]:
    """The batches of the first stage with these values."""
    return where(copy.rows, **{name: copy.rows[0][name] for name in copy.study.key}, **values)


def checks(copy: Copy) -> list[Row]:
    """The checks of the first stage."""
    every, row = copy.room.checks(copy.documents), copy.rows[0]
    return [c for c in every if all(c[name] == row[name] for name in copy.study.key)]


def _hard(copy: Copy, /, **values: Any) -> list[Row]:
    return [row for row in first(copy, **values) if row.get("clock", "") in copy.room.hard]


def _repetitions(copy: Copy, clocks: tuple[str, ...], /, **values: Any) -> Iterator[dict[int, list[Row]]]:
    """Every repetition on these clocks: its batches by attempt."""
    found: dict[Any, dict[int, list[Row]]] = {}
    for row in where(copy.rows, **values):
        if row.get("clock", "") in clocks:
            key = (*(row[name] for name in copy.study.key), row["repetition"])
            found.setdefault(key, {}).setdefault(row["attempt"], []).append(row)
    yield from found.values()


def _accepted(copy: Copy, clocks: tuple[str, ...] | None = None, *series: str) -> list[Row]:
    """The batches of a repetition that was accepted at once, and has these series."""
    at_once = (a[0] for a in _repetitions(copy, clocks or copy.room.soft) if list(a) == [0] and a[0][0]["accepted"])
    one: list[Row] = only((a for a in at_once if {*series} <= {row["series"] for row in a}), "such repetition")
    return one


def _rejected(copy: Copy) -> tuple[list[Row], list[Row]]:
    """What was rejected at the first attempt at a repetition, and the second, which was accepted."""
    for attempts in _repetitions(copy, copy.room.soft):
        if sorted(attempts) == [0, 1] and all(row["accepted"] for row in attempts[1]):
            return where(attempts[0], accepted=False), attempts[1]
    raise ImpossibleError("this record has no rejected repetition")


def _remove(copy: Copy, rows: Iterable[Row]) -> None:
    gone = {id(row) for row in rows}
    copy.rows[:] = [row for row in copy.rows if id(row) not in gone]


def _again(copy: Copy, rows: list[Row], /, **values: Any) -> None:
    """Put copies of `rows` with other values behind them."""
    last = id(rows[-1])
    at = next(i for i, row in enumerate(copy.rows) if id(row) == last) + 1
    copy.rows[at:at] = [row | values for row in rows]


def _swap(a: Row, b: Row, *names: str) -> None:
    for name in names:
        if name in a:
            a[name], b[name] = b[name], a[name]


def _timed(row: Row, time_us: float) -> None:
    row["time_us"] = time_us
    if "elapsed_us" in row:
        row["elapsed_us"] = time_us * row["calls"]
        row["time_us"] = row["elapsed_us"] / row["calls"]


def _calls(rows: Iterable[Row], more: Callable[[int], int]) -> None:
    for row in rows:
        row["calls"] = more(row["calls"])
        if "elapsed_us" in row:
            row["time_us"] = row["elapsed_us"] / row["calls"]


def _moved(copy: Copy) -> None:
    change([*checks(copy), *first(copy)], **{copy.room.moved: OUTSIDE})


def _deleted(copy: Copy) -> None:
    every, mine = copy.room.checks(copy.documents), checks(copy)
    every[:] = [check for check in every if check not in mine]
    _remove(copy, first(copy))


def _slow_deleted(copy: Copy) -> None:
    rows = [row for row in _hard(copy) if row["accepted"]]
    us = {(r["series"], r["repetition"]): r["time_us"] for r in rows}
    candidate, baseline = copy.room.candidate, copy.room.baseline
    repetitions = sorted({r["repetition"] for r in rows}, key=lambda n: us[candidate, n] / us[baseline, n])
    worst = repetitions[-(len(repetitions) // 4) :]
    _remove(copy, [r for r in rows if r["repetition"] in worst])


def _turned(copy: Copy) -> None:
    rows = _accepted(copy)
    change(rows, direction="forward" if rows[0]["direction"] == "reversed" else "reversed")


def _rotation(copy: Copy) -> None:
    for row in _hard(copy):
        row["repetition"] = {1: 3, 3: 1}.get(row["repetition"], row["repetition"])


def _relabel(copy: Copy, *names: str) -> None:
    both = copy.room.baseline, copy.room.candidate
    rows = _accepted(copy, copy.room.hard, *both)
    baseline, candidate = (where(rows, series=name)[0] for name in both)
    _swap(baseline, candidate, "series", "side", "variant", *names)


def _floor_labels(copy: Copy) -> None:
    names = copy.room.floor_names
    if not any(row["series"] in names for row in copy.rows):
        raise ImpossibleError("this record has no floor")
    for row in copy.rows:
        row["series"] = names.get(row["series"], row["series"])


def _next_attempt(copy: Copy, rows: list[Row]) -> None:
    """Copies of accepted batches as the next attempt, where it would have been timed."""
    if copy.room.whole:
        _again(copy, rows, attempt=1)
        return
    for row in rows:
        same = {name: row[name] for name in (*copy.study.key, "repetition", "series")}
        last = id(where(copy.rows, **same)[-1])
        at = next(i for i, other in enumerate(copy.rows) if id(other) == last) + 1
        copy.rows.insert(at, row | {"attempt": 1})


def _impossible_late(copy: Copy) -> None:
    rows = _accepted(copy, copy.room.hard)
    _next_attempt(copy, rows)
    change(rows, accepted=False, reason="late")


def _attempt_beyond(copy: Copy) -> None:
    most = copy.rules["acceptance"]["attempts"]
    every = _repetitions(copy, copy.room.soft[:1], campaign="layer")
    attempts = only((a for a in every if len(a) == most and not a[most - 1][0]["accepted"]), "repetition given up")
    _again(copy, attempts[most - 1], attempt=most)


def _candidate(copy: Copy) -> Row:
    row: Row = where(copy.rows, series=copy.room.candidate)[0]
    return row


def _of_floor(copy: Copy) -> Row:
    names = [*copy.room.floor_names][1:]
    row: Row = only((row for row in copy.rows if row["series"] in names), "floor")
    return row


def _displaced(copy: Copy) -> None:
    one = copy.rows[0]
    _swap(one, next(row for row in copy.rows if row["position"] != one["position"]), "position")


def _nothing_sooner(copy: Copy) -> None:
    row = copy.rows[2]
    half = {"elapsed_us": row["elapsed_us"] / 2} if "elapsed_us" in row else {}
    time_us = row["elapsed_us"] / 2 / row["calls"] if half else row["time_us"] / 2
    _again(copy, [row], time_us=time_us, **half)


def _last(copy: Copy) -> int:
    return max(int(row["repetition"]) for row in first(copy))


def _left_out(copy: Copy) -> None:
    """Every batch of the baseline in the whole record."""
    _remove(copy, where(copy.rows, series=copy.room.baseline))


# After each, run.json counts the batches as they then are.
BATCHES: Mapping[str, Edit] = {
    "calls": lambda c: _calls(c.rows[:1], lambda n: n + 1),
    "calls_of_a_point": lambda c: _calls(first(c), lambda n: 2 * n),
    "warmups": lambda c: c.rows[0].update(warmups=c.rows[0]["warmups"] + 1),
    "batch_rejected": lambda c: _accepted(c)[0].update(accepted=False, reason=c.room.soft_reason),
    "batch_accepted": lambda c: _rejected(c)[0][0].update(accepted=True, reason=""),
    "repetition_rejected": lambda c: change(_accepted(c), accepted=False, reason=c.room.soft_reason),
    "graph_late": _impossible_late,
    "throttled_unseen": lambda c: change(_rejected(c)[0], reason="throttled"),
    "other_process_unseen": lambda c: change(_rejected(c)[0], reason="other_process"),
    "rejected_accepted": lambda c: change(_rejected(c)[0], accepted=True, reason=""),
    "rejected_deleted": lambda c: _remove(c, _rejected(c)[0]),
    "retry_deleted": lambda c: _remove(c, _rejected(c)[1]),
    "repetition_deleted": lambda c: _remove(c, first(c, repetition=3)),
    "last_repetitions_deleted": lambda c: _remove(c, [r for r in first(c) if r["repetition"] > _last(c) - 5]),
    "slow_repetitions_deleted": _slow_deleted,
    "batch_deleted": lambda c: _remove(c, c.rows[5:6]),
    "baseline_batch_deleted": lambda c: _remove(c, _hard(c, series=c.room.baseline, accepted=True, attempt=0)[:1]),
    "baseline_left_out": _left_out,
    "series_deleted": lambda c: _remove(c, _hard(c, series=c.room.other)),
    "host_clock_deleted": lambda c: _remove(c, first(c, clock=c.room.soft[-1])),
    "batch_twice": lambda c: _again(c, c.rows[3:4]),
    "faster_twice": _nothing_sooner,
    "repetition_more": lambda c: _again(c, _accepted(c), repetition=1 + _last(c)),
    "attempt_more": lambda c: _next_attempt(c, _accepted(c)),
    "attempt_beyond": _attempt_beyond,
    "clock_event": lambda c: change(_accepted(c), clock_events=0x4),
    "other_process": lambda c: change(_accepted(c), compute_processes=2),
    "clock_event_of_one": lambda c: _accepted(c)[1].update(clock_events=0x20),
    "temperature_of_one": lambda c: c.rows[1].update(temperature_c=c.rows[1]["temperature_c"] + 1),
    "position": _displaced,
    "direction": _turned,
    "rotation": _rotation,
    "labels": _relabel,
    "labels_and_positions": lambda c: _relabel(c, "position"),
    "floor_labels": _floor_labels,
    "arm": lambda c: _candidate(c).update(side=where(c.rows, series=c.room.baseline)[0]["side"]),
    "floor_arm": lambda c: _of_floor(c).update(side=where(c.rows, series=c.room.other)[0]["side"]),
    "point_unknown": lambda c: _again(c, first(c), **{c.room.moved: OUTSIDE}),
    "point_moved": _moved,
    "point_deleted": _deleted,
    "series_unknown": lambda c: _again(c, [_candidate(c)], series=f"{c.room.candidate}_again_and_again"),
    "time_nan": lambda c: _timed(c.rows[0], math.nan),
    "time_infinite": lambda c: _timed(c.rows[0], math.inf),
    "time_zero": lambda c: _timed(c.rows[0], 0.0),
    "time_negative": lambda c: _timed(c.rows[0], -c.rows[0]["time_us"]),
    "time_of_calls": lambda c: c.rows[2].update(elapsed_us=0.9 * c.rows[2]["elapsed_us"]),
    "time_a_call": lambda c: c.rows[2].update(time_us=0.9 * c.rows[2]["time_us"]),
    "reason_unknown": lambda c: change(_rejected(c)[0], reason="slow"),
    "reason_kept": lambda c: change(_accepted(c), reason=c.room.soft_reason),
    "reason_dropped": lambda c: change(_rejected(c)[0], reason=""),
}


def _counted(copy: Copy) -> None:
    kind = sorted(k for k in copy.run["batches"] if k.endswith("accepted"))[0]
    copy.run["batches"][kind] += 1


def _uncounted(copy: Copy) -> None:
    counts = copy.run["batches"]
    if not any(kind.endswith(copy.room.soft_reason) for kind in counts):
        raise ImpossibleError("this record has no rejected repetition")
    copy.run["batches"] = {kind: n for kind, n in counts.items() if not kind.endswith(copy.room.soft_reason)}


def _check_deleted(copy: Copy) -> None:
    copy.room.checks(copy.documents).remove(checks(copy)[0])


DOCUMENTS: Mapping[str, Edit] = {
    "counts": _counted,
    "rejections_uncounted": _uncounted,
    "protocol_digest": lambda c: c.run.update(protocol_sha256=other_digest(c.run["protocol_sha256"])),
    "protocol_bootstrap_seed": lambda c: c.rules["bootstrap"].update(seed=c.rules["bootstrap"]["seed"] + 1),
    "protocol_confidence": lambda c: c.rules["bootstrap"].update(confidence=0.9),
    "check_deleted": _check_deleted,
    "check_twice": lambda c: c.room.checks(c.documents).append(dict(checks(c)[0])),
}


def _compared(copy: Copy, /, **values: Any) -> Row:
    row: Row = only(where(copy.statistics["comparisons"], **values), "such comparison")
    return row


def _nudge(row: Row, name: str) -> None:
    row[name] = math.nextafter(row[name], math.inf)


def _shown(copy: Copy) -> Row:
    return _compared(copy, series=copy.room.shown)


def _bound(copy: Copy) -> Row:
    """A comparison with a target, where the study has any."""
    fits = [row for row in copy.statistics["comparisons"] if row["target"] is not None]
    row: Row = only(fits or copy.statistics["comparisons"], "comparison")
    return row


def _judged(copy: Copy) -> Row:
    return _compared(copy, **copy.room.judged)


def _floored(copy: Copy) -> Row:
    rows = [row for row in copy.statistics["comparisons"] if row["floor_high"] is not None]
    row: Row = only([row for row in rows if row["target"] is not None] or rows, "floor")
    return row


def swap_compared(copy: Copy, one: str, other: str, *names: str) -> None:
    a = _compared(copy, series=one)
    same = {name: a[name] for name in (*copy.study.key, copy.study.table.names.get("clock", "")) if name in a}
    b = _compared(copy, series=other, **same)
    _swap(a, b, "series", copy.study.table.names["side"], *names)


def _add(copy: Copy, row: Row) -> None:
    copy.statistics["comparisons"].append(row)


STATISTICS: Mapping[str, Edit] = {
    "statistics_change": lambda c: _nudge(_shown(c), "change"),
    "statistics_low": lambda c: _nudge(_shown(c), "low"),
    "statistics_high": lambda c: _judged(c).update(high=(_judged(c)["threshold"] or 1) / 2),
    "statistics_verdict": lambda c: _judged(c).update(verdict=c.room.opposite),
    "statistics_n": lambda c: _bound(c).update(n=_bound(c)["n"] + 1),
    "statistics_planned": lambda c: _bound(c).update(planned=_bound(c)["planned"] - 1),
    "statistics_margin": lambda c: _judged(c).update(threshold=0.05),
    "statistics_baseline": lambda c: _bound(c).update(baseline_us=_bound(c)["baseline_us"] * 1.01),
    "statistics_floor": lambda c: _floored(c).update(floor_high=_floored(c)["floor_high"] + 0.1),
    "statistics_target": lambda c: _bound(c).update(target=1.5),
    "statistics_reached": lambda c: _bound(c).update(reached=not _bound(c)["reached"]),
    "statistics_best": lambda c: _compared(c, best=True).update(best=False),
    "statistics_nan": lambda c: _bound(c).update(high=math.nan),
    "statistics_kind": lambda c: _bound(c).update(n=float(_bound(c)["n"])),
    "statistics_column": lambda c: _bound(c).update(note=""),
    "statistics_labels": lambda c: swap_compared(c, c.room.shown, c.room.other),
    "statistics_missing": lambda c: c.statistics["comparisons"].remove(_bound(c)),
    "statistics_more": lambda c: _add(c, _bound(c) | {c.room.moved: OUTSIDE}),
    "statistics_twice": lambda c: _add(c, dict(_bound(c))),
    "statistics_baseline_row": lambda c: _add(c, _bound(c) | {"series": c.room.itself}),
    "statistics_protocol": lambda c: c.statistics.update(protocol_sha256=other_digest(c.statistics["protocol_sha256"])),
}

UNCHANGED = "unchanged"
# Of statistics or the record's own documents, which only one study has, by the prefix of their names.
GENERAL: Mapping[str, Edit] = {**BATCHES, **DOCUMENTS, **STATISTICS, UNCHANGED: lambda c: None}


def known(room: Room) -> Mapping[str, Edit]:
    """Every edit by name, a study's own included."""
    return {**GENERAL, **room.further}


def is_of_statistics(name: str) -> bool:
    """Whether an edit is one of the statistics."""
    return name.startswith("statistics_")


def apply(copy: Copy, name: str) -> None:
    """Make the edit; run.json then counts the batches that are there. Raises ImpossibleError without room for it."""
    edit = known(copy.room)[name]
    edit(copy)
    if name in BATCHES:
        copy.count()
