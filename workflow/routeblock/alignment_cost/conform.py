# SPDX-License-Identifier: Apache-2.0
"""Does a record hold what its protocol asks for, batch by batch: each expected one, once, as ordered, and no other?

The protocol and the record's documents are read as plain JSON, batches as plain rows; no code of the measurement is
used. How long a batch took is looked at no further than that it took some time.

A few things leave no trace, and no walk can tell them: a rejected attempt that is deleted with those after it numbered
anew, times that change places between series, and whether the host really was late. The record's digests can.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

from routeblock.alignment_cost.reasons import Finding, Reason
from routeblock.evidence.digest import sha256_json

Row = dict[str, Any]
Key = tuple[Any, ...]

# Clocks that are read together, by campaign: those of one attempt at a repetition. The protocol's `modes`.
CLOCKS = {"operator": (("graph",), ("stream", "host")), "layer": (("graph",), ("stream",))}
_FAMILIES = {(campaign, clock): f for campaign, every in CLOCKS.items() for f in every for clock in f}
# NVML: nvmlClocksEventReasons.
_EVENTS = {
    "sw_power_cap": 1 << 2,
    "hw_slowdown": 1 << 3,
    "sw_thermal_slowdown": 1 << 5,
    "hw_thermal_slowdown": 1 << 6,
    "hw_power_brake": 1 << 7,
}
_STATE = ("clock_events", "compute_processes", "sm_clock_mhz", "temperature_c")
_state = itemgetter(*_STATE)
_UNKNOWN = -1  # an answer that NVML refused
_POINT = ("campaign", "experts", "top_k", "tokens")
_point = itemgetter(*_POINT)
_CANONICAL = "canonical"
# Columns that follow from the protocol and a batch's place in it.
_LABELS = {
    "role": Reason.ROLE,
    "block_size": Reason.BLOCK_SIZE,
    "arm": Reason.ARM,
    "variant": Reason.VARIANT,
    "position": Reason.POSITION,
    "direction": Reason.DIRECTION,
    "calls": Reason.CALLS,
    "warmups": Reason.WARMUPS,
}
_labels = itemgetter(*_LABELS)


def protocol_digest(rules: Row) -> str:
    """SHA-256 of the canonical JSON of a protocol, what it leaves out filled in, as a record carries it."""
    whole = dict(rules)
    for campaign in CLOCKS:
        groups = [{"calls": None, "pause_ms": 0} | group for group in rules[campaign]["points"]]
        whole[campaign] = rules[campaign] | {"points": groups}
    whole["margins"] = {name: float(value) for name, value in rules["margins"].items()}
    whole["minimum_pairs"] = float(rules["minimum_pairs"])
    whole["bootstrap"] = rules["bootstrap"] | {"confidence": float(rules["bootstrap"]["confidence"])}
    whole["targets"] = [target | {"ratio": float(target["ratio"])} for target in rules["targets"]]
    return sha256_json(whole)


def block_size(tokens: int, top_k: int, experts: int) -> int:
    """vLLM's fused_marlin_moe: the first of 8, 16, 32, 48, 64 that routes an expert fill to less than 0.9, else 64."""
    return next((b for b in (8, 16, 32, 48, 64) if tokens * top_k / experts / b < 0.9), 64)


@dataclass(frozen=True)
class Planned:
    """One point of the protocol; `calls` by clock."""

    campaign: str
    experts: int
    top_k: int
    tokens: int
    role: str
    repetitions: int
    calls: dict[str, int]

    @property
    def key(self) -> Key:
        return self.campaign, self.experts, self.top_k, self.tokens

    @cached_property
    def block_size(self) -> int:
        return block_size(self.tokens, self.top_k, self.experts)


def planned(rules: Row) -> Iterator[Planned]:
    """Every point that the protocol asks for."""
    for campaign, families in CLOCKS.items():
        for group in rules[campaign]["points"]:
            usual = rules[campaign]["calls"]
            counts = {"graph": usual["graph"], "stream": usual["stream"], "host": usual["stream"]}
            calls = {clock: group.get("calls") or counts[clock] for family in families for clock in family}
            for tokens in group["tokens"]:
                shape = (campaign, group["experts"], group["top_k"], tokens)
                yield Planned(*shape, group["role"], group["repetitions"], calls)


def place(row: Row) -> str:
    """A point by name, as the record names it."""
    return f"{row['campaign']} E={row['experts']} k={row['top_k']} M={row['tokens']}"


def _label(point: Planned) -> str:
    return place({"campaign": point.campaign, **dict(zip(_POINT[1:], point.key[1:], strict=True))})


def deviations(rows: list[Row], run: Row, exactness: Row, sanitizer: Row, rules: Row) -> list[Finding]:
    """Where a record leaves its protocol; none if it does not.

    `rows` are the batches in the order of their file; `run`, `exactness`, `sanitizer` the record's documents of these
    names; `rules` the protocol.
    """
    return list(_documents(run, exactness, sanitizer, rules)) + list(_Walk(rows, run, rules).findings())


def _documents(run: Row, exactness: Row, sanitizer: Row, rules: Row) -> Iterator[Finding]:
    digest = protocol_digest(rules)
    if run["protocol_sha256"] != digest:
        told = f"carries protocol {run['protocol_sha256'][:12]}, the given one is {digest[:12]}"
        yield Finding("run.json", Reason.PROTOCOL, told)
    versions = {build["extension_sha256"]: build["vllm"] for build in rules["builds"]}
    extension = run["extension"]
    if extension["sha256"] not in versions:
        told = f"extension {extension['sha256'][:12]} is none of the protocol's builds"
        yield Finding("run.json", Reason.BUILD, told)
    elif extension["vllm"] not in (None, versions[extension["sha256"]]):  # None: a file without its wheel
        told = f"vLLM {extension['vllm']}, the protocol's build is of {versions[extension['sha256']]}"
        yield Finding("run.json", Reason.BUILD, told)
    if exactness["cubin_sha256"] != run["cubin_sha256"]:
        told = f"checked {exactness['cubin_sha256'][:12]}, timed {run['cubin_sha256'][:12]}"
        yield Finding("exactness.json", Reason.KERNELS, told)
    if exactness["gpu"] != run["device"]["name"]:
        told = f"checked on {exactness['gpu']}, timed on {run['device']['name']}"
        yield Finding("exactness.json", Reason.DEVICE, told)
    if exactness["differs"]:
        yield Finding("exactness.json", Reason.BITS, exactness["differs"])
    for tool in sanitizer["tools"]:
        if tool["outcome"] == "found":
            yield Finding("sanitizer.json", Reason.SANITIZER, f"{tool['tool']}: {tool['lines'][-1]}")


class _Walk:
    """The batches of one record, sorted into attempts of repetitions of points."""

    def __init__(self, rows: list[Row], run: Row, rules: Row) -> None:
        self._rows, self._run, self._rules = rows, run, rules
        self._points = {point.key: point for point in planned(rules)}
        self._places: dict[str, int] = {series["name"]: place for place, series in enumerate(rules["series"])}
        self._arms = {series["name"]: series["arm"] for series in rules["series"]}
        self._checks: dict[Key, Row] = {}
        self._attempts: dict[Key, dict[int, dict[int, list[int]]]] = {}
        self._reasons: dict[str, str] = rules["acceptance"]["reject"]
        self._watched = sum(_EVENTS[name] for name in rules["acceptance"]["throttle_reasons"])

    def findings(self) -> Iterator[Finding]:
        yield from self._check_counts()
        yield from self._check_checks()
        yield from self._sort()
        timed = {key[:-1] for key in self._attempts}
        for key, point in self._points.items():
            named = _label(point) in self._run["not_measured"]
            if key in timed and named:
                yield Finding(_label(point), Reason.COUNTS, "run.json says that it was not measured, it has batches")
            if key not in timed:
                told = "not measured" if named else "no batches, and run.json does not say that it was not measured"
                yield Finding(_label(point), Reason.POINT_MISSING, told)
                continue
            if key not in self._checks:
                yield Finding(_label(point), Reason.NOT_CHECKED, "timed, not checked")
            for family in CLOCKS[point.campaign]:
                yield from self._family(point, family)

    def _who(self, index: int) -> str:
        row = self._rows[index]
        who = f"batch {index} ({place(row)} {row['mode']} {row['series']}, repetition {row['repetition']}"
        return f"{who}, attempt {row['attempt']})"

    def _check_counts(self) -> Iterator[Finding]:
        told = self._run["batches"]
        ours = Counter(f"{r['campaign']} {r['mode']} {r['reason'] or 'accepted'}" for r in self._rows)
        for kind in sorted(ours.keys() | told.keys()):
            if ours.get(kind, 0) != told.get(kind, 0):
                yield Finding("run.json", Reason.COUNTS, f"{told.get(kind, 0)} {kind}, there are {ours.get(kind, 0)}")

    def _check_checks(self) -> Iterator[Finding]:
        for check in self._run["checks"]:
            key, where = _point(check), f"check of {place(check)}"
            if key not in self._points:
                yield Finding(where, Reason.POINT_UNKNOWN, "no point of the protocol")
                continue
            if key in self._checks:
                yield Finding(where, Reason.NOT_CHECKED, "checked twice")
            self._checks[key] = check
            if check["wrong"]:
                yield Finding(where, Reason.PLAN_WRONG, f"wrong {', '.join(check['wrong'])}")
            if check["block_size"] != self._points[key].block_size:
                told = f"block size {check['block_size']}, vLLM takes {self._points[key].block_size}"
                yield Finding(where, Reason.BLOCK_SIZE, told)

    def _sort(self) -> Iterator[Finding]:
        """Put every batch where it belongs, and look at it alone."""
        strangers: set[str] = set()
        for index, row in enumerate(self._rows):
            point = self._points.get(_point(row))
            if point is None:
                if place(row) not in strangers:
                    yield Finding(self._who(index), Reason.POINT_UNKNOWN, "no point of the protocol")
                strangers.add(place(row))
                continue
            family = _FAMILIES.get((point.campaign, row["mode"]))
            if family is None:
                told = f"campaign {point.campaign} has no clock {row['mode']!r}"
                yield Finding(self._who(index), Reason.CLOCK_UNKNOWN, told)
            elif row["series"] not in self._arms:
                told = f"the protocol's series are {', '.join(self._places)}"
                yield Finding(self._who(index), Reason.SERIES_UNKNOWN, told)
            elif not 0 <= row["repetition"] < point.repetitions:
                told = f"{point.repetitions} repetitions are planned"
                yield Finding(self._who(index), Reason.REPETITION_UNKNOWN, told)
            elif not 0 <= row["attempt"] < self._rules["acceptance"]["attempts"]:
                told = f"{self._rules['acceptance']['attempts']} attempts are allowed"
                yield Finding(self._who(index), Reason.ATTEMPT_UNPLANNED, told)
            else:
                repetitions = self._attempts.setdefault((*point.key, family), {})
                repetitions.setdefault(row["repetition"], {}).setdefault(row["attempt"], []).append(index)
                yield from self._alone(index, row, point)

    def _position(self, row: Row) -> int:
        """`order`: rotated by half the repetition, rounded down; reversed in odd repetitions."""
        count, repetition = len(self._places), int(row["repetition"])
        position = (self._places[row["series"]] - repetition // 2) % count
        return count - 1 - position if repetition % 2 else position

    def _alone(self, index: int, row: Row, point: Planned) -> Iterator[Finding]:
        variant = ""
        if row["arm"] == _CANONICAL:
            check = self._checks.get(point.key)
            variant = row["variant"] if check is None else check["variant"]
        due = (
            point.role,
            point.block_size,
            self._arms[row["series"]],
            variant,
            self._position(row),
            "reversed" if row["repetition"] % 2 else "forward",
            point.calls[row["mode"]],
            self._rules["warmups"],
        )
        if (told := _labels(row)) != due:
            for (name, reason), is_, should in zip(_LABELS.items(), told, due, strict=True):
                if is_ != should:
                    yield Finding(self._who(index), reason, f"{name} is {is_!r}, the protocol gives {should!r}")
        times = row["elapsed_us"], row["time_us"]
        if not (math.isfinite(times[0]) and math.isfinite(times[1]) and min(times) > 0):
            yield Finding(self._who(index), Reason.TIME, f"{times[0]!r} us, {times[1]!r} us a call: no time")
        elif row["calls"] == 0 or times[1] != times[0] / row["calls"]:
            detail = f"{times[1]!r} us a call are not {times[0]!r} us by {row['calls']}"
            yield Finding(self._who(index), Reason.TIME, detail)
        if min(state := _state(row)) < _UNKNOWN:
            yield Finding(self._who(index), Reason.STATE, f"{state} is no state of a device")
        if row["accepted"] != (row["reason"] == "") or (row["reason"] and row["reason"] not in self._reasons):
            detail = f"accepted {row['accepted']} with reason {row['reason']!r}"
            yield Finding(self._who(index), Reason.ACCEPTANCE, detail)

    def _family(self, point: Planned, family: tuple[str, ...]) -> Iterator[Finding]:
        """The repetitions of a point on clocks that are read together, attempt by attempt."""
        allowed = self._rules["acceptance"]
        spare = allowed["extra_repetitions"]
        repetitions = self._attempts.get((*point.key, family), {})
        yield from self._sequence(repetitions)
        for repetition in range(point.repetitions):
            where = f"{_label(point)} {family[0]}, repetition {repetition}"
            attempts = repetitions.get(repetition)
            if attempts is None:
                yield Finding(where, Reason.REPETITION_MISSING, f"no batches, {point.repetitions} are planned")
                continue
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
                yield from self._whole(here, indices, family)
                accepted, reason = Counter(self._verdict(i) for i in indices).most_common(1)[0][0]
                if accepted:
                    over = f"attempt {attempt} was accepted"
                elif reason == "incorrect":  # of the point, so of every further attempt too
                    over = "another attempt does not make a plan right"
                elif not spare:
                    over = f"all {allowed['extra_repetitions']} extra repetitions were used"
                elif attempt + 1 < allowed["attempts"]:
                    spare -= 1
                    if attempt == max(attempts):
                        yield Finding(here, Reason.ATTEMPT_MISSING, f"rejected as {reason!r}, not timed again")

    def _verdict(self, index: int) -> tuple[bool, str]:
        return self._rows[index]["accepted"], self._rows[index]["reason"]

    def _whole(self, where: str, indices: list[int], family: tuple[str, ...]) -> Iterator[Finding]:
        """One attempt: each series once on each clock, one verdict, one state, and a verdict that fits it."""
        there = Counter((self._rows[i]["mode"], self._rows[i]["series"]) for i in indices)
        for clock in family:
            for name in self._places:
                if not there[clock, name]:
                    yield Finding(where, Reason.BATCH_MISSING, f"no batch of {name}, {clock}")
        seen: set[Key] = set()
        for i in indices:
            key = (self._rows[i]["mode"], self._rows[i]["series"])
            if key in seen:
                yield Finding(self._who(i), Reason.BATCH_TWICE, f"{there[key]} batches")
            seen.add(key)
        if len(verdicts := {self._verdict(i) for i in indices}) > 1:
            told = "; ".join(f"accepted {accepted}, reason {reason!r}" for accepted, reason in sorted(verdicts))
            yield Finding(where, Reason.SPLIT, told)
        states = {_state(self._rows[i]) for i in indices}
        if len(states) > 1:
            told = f"{len(states)} states of {', '.join(_STATE)}: {' and '.join(map(str, sorted(states)))}"
            yield Finding(where, Reason.STATE, told)
        due = self._due(indices)
        verdict = verdicts.pop() if len(verdicts) == 1 else None
        if due and any(self._rows[i]["accepted"] for i in indices):
            yield Finding(where, Reason.NOT_REJECTED, f"accepted, the protocol rejects it: {', '.join(sorted(due))}")
        elif verdict and verdict[1] in self._reasons:
            possible = due | ({"late"} if "stream" in family else set())
            if verdict[1] not in possible:
                told = f"rejected as {verdict[1]!r}, seen was {', '.join(sorted(due)) or 'nothing'}"
                yield Finding(where, Reason.REASON_NOT_SEEN, told)

    def _due(self, indices: list[int]) -> set[str]:
        """The protocol's reasons for rejection that the device's state and the point's check give."""
        due = set()
        for row in (self._rows[i] for i in indices):
            if row["clock_events"] != _UNKNOWN and row["clock_events"] & self._watched:
                due.add("throttled")
            if row["compute_processes"] > 1:
                due.add("other_process")
        check = self._checks.get(_point(self._rows[indices[0]]))
        return due | ({"incorrect"} if check and check["wrong"] else set())

    def _sequence(self, repetitions: dict[int, dict[int, list[int]]]) -> Iterator[Finding]:
        """Batches on one clock stand in their file by repetition, attempt and position."""
        last: dict[str, tuple[Key, int | None]] = {}
        for i in sorted(i for attempts in repetitions.values() for mine in attempts.values() for i in mine):
            row = self._rows[i]
            turn = (row["repetition"], row["attempt"])
            # A wrong position is told as such, and says nothing of the order.
            position = row["position"] if row["position"] == self._position(row) else None
            before, stood = last.get(row["mode"], (turn, None))
            if turn < before:
                told = f"stands after repetition {before[0]}, attempt {before[1]}"
                yield Finding(self._who(i), Reason.ORDER, told)
            elif turn == before and position is not None and stood is not None and position < stood:
                yield Finding(self._who(i), Reason.ORDER, f"position {position} stands after position {stood}")
            last[row["mode"]] = (turn, position)
