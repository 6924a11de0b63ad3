# SPDX-License-Identifier: Apache-2.0
"""Edits of a record of the cost, each as hard to see as it can be; fixtures/alignment_mutations.json declares them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from routeblock.alignment_cost import conform

Row = dict[str, Any]
Edit = Callable[["Copy"], None]
_POINT = ("campaign", "experts", "top_k", "tokens")
_NINE = 9  # tokens that no point has


class ImpossibleError(Exception):
    """An edit that this record has no room for."""


@dataclass
class Copy:
    """A record, its protocol and its statistics, to be edited."""

    rows: list[Row]
    run: Row
    exactness: Row
    sanitizer: Row
    rules: Row
    statistics: Row

    def again(self) -> Copy:
        """A copy of its own."""
        rest = json.loads(json.dumps([self.run, self.exactness, self.sanitizer, self.rules, self.statistics]))
        return Copy([dict(row) for row in self.rows], *rest)

    def count(self) -> None:
        """Let run.json count the batches as they now are."""
        told = (f"{r['campaign']} {r['mode']} {r['reason'] or 'accepted'}" for r in self.rows)
        self.run["batches"] = dict(Counter(told))


def _where(rows: Iterable[Row], **values: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def _only(found: Iterator[Any], what: str) -> Any:
    try:
        return next(found)
    except StopIteration:
        raise ImpossibleError(f"this record has no {what}") from None


def _first(copy: Copy) -> list[Row]:
    """The batches of the first point."""
    return _where(copy.rows, **{name: copy.rows[0][name] for name in _POINT})


def _repetitions(copy: Copy, *modes: str, campaign: str = "operator") -> Iterator[dict[int, list[Row]]]:
    """Every repetition on these clocks: its batches by attempt."""
    found: dict[Any, dict[int, list[Row]]] = {}
    for row in copy.rows:
        if row["mode"] in modes and row["campaign"] == campaign:
            key = (*(row[name] for name in _POINT), row["repetition"])
            found.setdefault(key, {}).setdefault(row["attempt"], []).append(row)
    yield from found.values()


def _accepted(copy: Copy, *modes: str) -> list[Row]:
    """The batches of a repetition that was accepted at once."""
    every = _repetitions(copy, *(modes or ("stream", "host")))
    one: list[Row] = _only((a[0] for a in every if list(a) == [0] and a[0][0]["accepted"]), "such repetition")
    return one


def _rejected(copy: Copy) -> tuple[list[Row], list[Row]]:
    """Both attempts at a repetition that was rejected, then accepted."""
    every = _repetitions(copy, "stream", "host")
    fits = (a for a in every if sorted(a) == [0, 1] and not a[0][0]["accepted"] and a[1][0]["accepted"])
    attempts = _only(fits, "rejected repetition")
    return attempts[0], attempts[1]


def _remove(copy: Copy, rows: Iterable[Row]) -> None:
    gone = {id(row) for row in rows}
    copy.rows[:] = [row for row in copy.rows if id(row) not in gone]


def _again(copy: Copy, rows: list[Row], **values: Any) -> None:
    """Put copies of `rows` with other values behind them."""
    last = id(rows[-1])
    at = next(i for i, row in enumerate(copy.rows) if id(row) == last) + 1
    copy.rows[at:at] = [row | values for row in rows]


def _set(rows: Iterable[Row], **values: Any) -> None:
    for row in rows:
        row.update(values)


def _swap(a: Row, b: Row, *names: str) -> None:
    for name in names:
        a[name], b[name] = b[name], a[name]


def _more_calls(rows: Iterable[Row], change: Callable[[int], int]) -> None:
    for row in rows:
        row["calls"] = change(row["calls"])
        row["time_us"] = row["elapsed_us"] / row["calls"]


def _timed(row: Row, elapsed_us: float) -> None:
    row.update(elapsed_us=elapsed_us, time_us=elapsed_us / row["calls"])


def _point_moved(copy: Copy) -> None:
    check = _check(copy)
    _set([*_first(copy), check], tokens=_NINE)


def _point_deleted(copy: Copy) -> None:
    copy.run["checks"].remove(_check(copy))
    _remove(copy, _first(copy))


def _point_not_measured(copy: Copy) -> None:
    copy.run["not_measured"].append(conform.place(copy.rows[0]))
    _point_deleted(copy)


def _slow_deleted(copy: Copy) -> None:
    rows = _where(_first(copy), mode="graph", accepted=True)
    us = {(r["series"], r["repetition"]): r["time_us"] for r in rows}
    repetitions = sorted({r["repetition"] for r in rows}, key=lambda n: us["canonical", n] / us["native", n])
    worst = repetitions[-(len(repetitions) // 4) :]
    _remove(copy, [r for r in rows if r["repetition"] in worst])


def _turned(copy: Copy) -> None:
    rows = _accepted(copy)
    _set(rows, direction="forward" if rows[0]["direction"] == "reversed" else "reversed")


def _rotation(copy: Copy) -> None:
    rows = _where(_first(copy), mode="graph")
    for row in rows:
        row["repetition"] = {1: 3, 3: 1}.get(row["repetition"], row["repetition"])


def _relabel(copy: Copy, *names: str) -> None:
    rows = _accepted(copy, "graph")
    native, canonical = (_where(rows, series=series)[0] for series in ("native", "canonical"))
    _swap(native, canonical, "series", "arm", "variant", *names)


def _floor_labels(copy: Copy) -> None:
    other = {"native": "native_again", "native_again": "native"}
    for row in copy.rows:
        row["series"] = other.get(row["series"], row["series"])


def _host_for_layer(copy: Copy) -> None:
    rows = _where(copy.rows, campaign="layer", mode="stream")
    _again(copy, rows[:8], mode="host")


def _graph_late(copy: Copy) -> None:
    rows = _accepted(copy, "graph")
    _again(copy, rows, attempt=1)
    _set(rows, accepted=False, reason="late")


def _attempt_beyond(copy: Copy) -> None:
    most = copy.rules["acceptance"]["attempts"]
    every = _repetitions(copy, "stream", campaign="layer")
    attempts = _only((a for a in every if len(a) == most and not a[most - 1][0]["accepted"]), "repetition given up")
    _again(copy, attempts[most - 1], attempt=most)


def _canonical(copy: Copy) -> Row:
    return _where(copy.rows, series="canonical")[0]


def _reported(copy: Copy) -> list[Row]:
    row = _where(copy.rows, role="reported")[0]
    return _where(copy.rows, **{name: row[name] for name in _POINT})


# After each, run.json counts the batches as they then are.
BATCHES: Mapping[str, Edit] = {
    "calls": lambda c: _more_calls(c.rows[:1], lambda n: n + 1),
    "calls_of_a_point": lambda c: _more_calls(_first(c), lambda n: 2 * n),
    "warmups": lambda c: c.rows[0].update(warmups=c.rows[0]["warmups"] + 1),
    "batch_rejected": lambda c: _accepted(c)[0].update(accepted=False, reason="late"),
    "batch_accepted": lambda c: _rejected(c)[0][0].update(accepted=True, reason=""),
    "repetition_rejected": lambda c: _set(_accepted(c), accepted=False, reason="late"),
    "graph_late": _graph_late,
    "throttled_unseen": lambda c: _set(_rejected(c)[0], reason="throttled"),
    "other_process_unseen": lambda c: _set(_rejected(c)[0], reason="other_process"),
    "rejected_accepted": lambda c: _set(_rejected(c)[0], accepted=True, reason=""),
    "rejected_deleted": lambda c: _remove(c, _rejected(c)[0]),
    "retry_deleted": lambda c: _remove(c, _rejected(c)[1]),
    "repetition_deleted": lambda c: _remove(c, _where(_first(c), repetition=3)),
    "last_repetitions_deleted": lambda c: _remove(
        c, [r for r in _first(c) if r["repetition"] > max(q["repetition"] for q in _first(c)) - 5]
    ),
    "slow_repetitions_deleted": _slow_deleted,
    "batch_deleted": lambda c: _remove(c, c.rows[5:6]),
    "series_deleted": lambda c: _remove(c, _where(_first(c), mode="graph", series="sort")),
    "host_clock_deleted": lambda c: _remove(c, _where(_first(c), mode="host")),
    "batch_twice": lambda c: _again(c, c.rows[3:4]),
    "faster_twice": lambda c: _again(
        c, c.rows[2:3], elapsed_us=c.rows[2]["elapsed_us"] / 2, time_us=c.rows[2]["elapsed_us"] / 2 / c.rows[2]["calls"]
    ),
    "repetition_more": lambda c: _again(c, _accepted(c), repetition=1 + max(r["repetition"] for r in _first(c))),
    "attempt_more": lambda c: _again(c, _accepted(c), attempt=1),
    "attempt_beyond": _attempt_beyond,
    "clock_event": lambda c: _set(_accepted(c), clock_events=0x4),
    "other_process": lambda c: _set(_accepted(c), compute_processes=2),
    "clock_event_of_one": lambda c: _accepted(c)[1].update(clock_events=0x20),
    "temperature_of_one": lambda c: c.rows[1].update(temperature_c=c.rows[1]["temperature_c"] + 1),
    "position": lambda c: _swap(c.rows[0], c.rows[1], "position"),
    "direction": _turned,
    "rotation": _rotation,
    "labels": _relabel,
    "labels_and_positions": lambda c: _relabel(c, "position"),
    "floor_labels": _floor_labels,
    "arm": lambda c: _canonical(c).update(arm="native"),
    "floor_arm": lambda c: _where(c.rows, series="native_again")[0].update(arm="sort"),
    "role": lambda c: _set(_reported(c), role="bound"),
    "block_size": lambda c: _set(_first(c), block_size=16),
    "variant": lambda c: _canonical(c).update(variant="tiles_512x4"),
    "point_unknown": lambda c: _again(c, _first(c), tokens=_NINE),
    "point_moved": _point_moved,
    "point_deleted": _point_deleted,
    "point_not_measured": _point_not_measured,
    "clock_unknown": _host_for_layer,
    "series_unknown": lambda c: _again(c, [_canonical(c)], series="canonical_again"),
    "time_nan": lambda c: _timed(c.rows[0], math.nan),
    "time_infinite": lambda c: _timed(c.rows[0], math.inf),
    "time_zero": lambda c: _timed(c.rows[0], 0.0),
    "time_negative": lambda c: _timed(c.rows[0], -c.rows[0]["elapsed_us"]),
    "time_of_calls": lambda c: c.rows[2].update(elapsed_us=0.9 * c.rows[2]["elapsed_us"]),
    "time_a_call": lambda c: c.rows[2].update(time_us=0.9 * c.rows[2]["time_us"]),
    "reason_unknown": lambda c: _set(_rejected(c)[0], reason="slow"),
    "reason_kept": lambda c: _set(_accepted(c), reason="late"),
    "reason_dropped": lambda c: _set(_rejected(c)[0], reason=""),
}


def _check(copy: Copy) -> Row:
    found: Row = _where(copy.run["checks"], **{name: copy.rows[0][name] for name in _POINT})[0]
    return found


def _counted(copy: Copy) -> None:
    kind = sorted(k for k in copy.run["batches"] if k.endswith("accepted"))[0]
    copy.run["batches"][kind] += 1


def _uncounted(copy: Copy) -> None:
    copy.run["batches"] = {k: n for k, n in copy.run["batches"].items() if not k.endswith("late")}


def _other_digest(digest: str) -> str:
    return digest[:-1] + ("0" if digest[-1] != "0" else "1")


def _routing_seed(copy: Copy) -> None:
    copy.rules["seed"] += 1
    copy.run["protocol_sha256"] = conform.protocol_digest(copy.rules)


def _check_variant(copy: Copy) -> None:
    _set([_check(copy), *_where(_first(copy), arm="canonical")], variant="tiles_512x4")


def _check_plans(copy: Copy) -> None:
    plans = _check(copy)["canonical_sha256"]
    plans[1] = _other_digest(plans[1])


def _tool(copy: Copy) -> None:
    copy.sanitizer["tools"][0].update(outcome="found", lines=["ERROR SUMMARY: 3 errors"])


DOCUMENTS: Mapping[str, Edit] = {
    "counts": _counted,
    "rejections_uncounted": _uncounted,
    "protocol_digest": lambda c: c.run.update(protocol_sha256=_other_digest(c.run["protocol_sha256"])),
    "protocol_bootstrap_seed": lambda c: c.rules["bootstrap"].update(seed=c.rules["bootstrap"]["seed"] + 1),
    "protocol_confidence": lambda c: c.rules["bootstrap"].update(confidence=0.9),
    "protocol_margin": lambda c: c.rules["margins"].update(layer=c.rules["margins"]["operator"]),
    "protocol_target": lambda c: c.rules["targets"][0].update(ratio=0.9),
    "protocol_seed": _routing_seed,
    "build": lambda c: c.run["extension"].update(sha256=_other_digest(c.run["extension"]["sha256"])),
    "build_version": lambda c: c.run["extension"].update(vllm="0.23.0"),
    "kernels": lambda c: c.exactness.update(cubin_sha256=_other_digest(c.exactness["cubin_sha256"])),
    "device": lambda c: c.exactness.update(gpu="NVIDIA H100 80GB HBM3"),
    "bits": lambda c: c.exactness.update(differs="random: 168 routes int32, 128 experts, block 8"),
    "sanitizer": _tool,
    "check_deleted": lambda c: c.run["checks"].remove(_check(c)),
    "check_twice": lambda c: c.run["checks"].append(dict(_check(c))),
    "check_wrong": lambda c: _check(c).update(wrong=["sort"]),
    "check_plans": _check_plans,
    "check_variant": _check_variant,
    "check_block_size": lambda c: _check(c).update(block_size=16),
}


def _compared(copy: Copy, **values: Any) -> Row:
    row: Row = _where(copy.statistics["comparisons"], **values)[0]
    return row


def _nudge(row: Row, name: str) -> None:
    row[name] = math.nextafter(row[name], math.inf)


def _bound(copy: Copy) -> Row:
    fits = (row for row in copy.statistics["comparisons"] if row["target"] is not None)
    row: Row = _only(fits, "comparison with a target")
    return row


def _inferior(copy: Copy) -> Row:
    return _compared(copy, verdict="inferior")


def _swap_compared(copy: Copy, one: str, other: str, *names: str) -> None:
    a = _compared(copy, series=one)
    b = _compared(copy, series=other, **{name: a[name] for name in (*_POINT, "mode")})
    _swap(a, b, "series", "arm", *names)


def _add(copy: Copy, row: Row) -> None:
    copy.statistics["comparisons"].append(row)


STATISTICS: Mapping[str, Edit] = {
    "statistics_change": lambda c: _nudge(_compared(c, series="canonical"), "change"),
    "statistics_low": lambda c: _nudge(_compared(c, series="canonical"), "low"),
    "statistics_high": lambda c: _inferior(c).update(high=_inferior(c)["margin"] / 2),
    "statistics_verdict": lambda c: _inferior(c).update(verdict="non-inferior"),
    "statistics_n": lambda c: _bound(c).update(n=_bound(c)["n"] + 1),
    "statistics_planned": lambda c: _bound(c).update(planned=_bound(c)["planned"] - 1),
    "statistics_margin": lambda c: _bound(c).update(margin=0.05),
    "statistics_baseline": lambda c: _bound(c).update(baseline_us=_bound(c)["baseline_us"] * 1.01),
    "statistics_floor": lambda c: _bound(c).update(floor_high=_bound(c)["floor_high"] + 0.1),
    "statistics_target": lambda c: _bound(c).update(target=1.5),
    "statistics_reached": lambda c: _bound(c).update(reached=not _bound(c)["reached"]),
    "statistics_variant": lambda c: _bound(c).update(variant="tiles_512x4"),
    "statistics_block_size": lambda c: _bound(c).update(block_size=16),
    "statistics_nan": lambda c: _bound(c).update(high=math.nan),
    "statistics_kind": lambda c: _bound(c).update(n=float(_bound(c)["n"])),
    "statistics_column": lambda c: _bound(c).update(note=""),
    "statistics_labels": lambda c: _swap_compared(c, "canonical", "sort"),
    "statistics_floor_labels": lambda c: _swap_compared(c, "canonical", "native_again", "variant"),
    "statistics_missing": lambda c: c.statistics["comparisons"].remove(_bound(c)),
    "statistics_more": lambda c: _add(c, _bound(c) | {"tokens": _NINE}),
    "statistics_twice": lambda c: _add(c, dict(_bound(c))),
    "statistics_baseline_row": lambda c: _add(c, _bound(c) | {"series": c.rules["baseline"], "arm": "native"}),
    "statistics_protocol": lambda c: c.statistics.update(
        protocol_sha256=_other_digest(c.statistics["protocol_sha256"])
    ),
}

UNCHANGED = "unchanged"
EDITS: Mapping[str, Edit] = {**BATCHES, **DOCUMENTS, **STATISTICS, UNCHANGED: lambda c: None}
