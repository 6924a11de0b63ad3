# SPDX-License-Identifier: Apache-2.0
"""A second computation of study B's statistics that shares no code with the first; the two must agree exactly.

Nothing of the computation is shared: it reads the raw batches itself and does its own medians, quantiles, pairing and
counting in plain Python. Only the random draw is NumPy's, because the protocol names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal

Row = dict[str, Any]
_FLOORS = {"sweep": "sweep_floor", "serial_prototype": "sweep_floor", "confirmation": "confirmation_floor"}
# NVML: nvmlClocksEventReasons.
_EVENTS = {
    "sw_power_cap": 1 << 2,
    "hw_slowdown": 1 << 3,
    "sw_thermal_slowdown": 1 << 5,
    "hw_thermal_slowdown": 1 << 6,
    "hw_power_brake": 1 << 7,
}
_SHAPE = ("lane", "device", "family", "slots", "pool", "rows", "cols", "warps", "mode", "scope")
_BATCH = (
    dict.fromkeys(("campaign", "lane", "device", "family", "mode", "scope", "baseline", "series", "arm"), "string")
    | dict.fromkeys(("slots", "pool", "rows", "cols", "warps", "repetition", "position"), "int64")
    | dict.fromkeys(("clock_events", "compute_processes"), "int64")
    | {"direction": "string", "reason": "string", "time_us": "double", "accepted": "bool"}
)
_RATIO = {name: _BATCH[name] for name in ("campaign", *_SHAPE, "repetition", "series")} | {"ratio": "double"}


def _middle(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _quantile(ordered: list[float], fraction: float) -> float:
    """Linear interpolation between order statistics, from whichever neighbour is nearer."""
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    weight = place - below
    left, right = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return right - (right - left) * (1 - weight) if weight >= 0.5 else left + (right - left) * weight


def _estimate(pairs: list[tuple[float, float]], bootstrap: Row) -> Row:
    ratios = [new / old for new, old in pairs]
    generator = numpy.random.Generator(numpy.random.PCG64(bootstrap["seed"]))
    picks = generator.integers(0, len(ratios), size=(bootstrap["resamples"], len(ratios))).tolist()
    medians = sorted(_middle([ratios[i] for i in pick]) for pick in picks)
    tail = (1 - bootstrap["confidence"]) / 2
    return {
        "n": len(ratios),
        "baseline_us": _middle([old for _, old in pairs]),
        "candidate_us": _middle([new for new, _ in pairs]),
        "change": _middle(ratios) - 1,
        "low": _quantile(medians, tail) - 1,
        "high": _quantile(medians, 1 - tail) - 1,
    }


def recompute(rows: list[Row], rules: Row, minimum_effect: float) -> dict[tuple[Any, ...], Row]:
    """Every comparison in raw batch `rows`, by (campaign, series, *shape)."""
    accepted: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    baselines: dict[tuple[Any, ...], str] = {}
    for row in rows:
        stage = (row["campaign"], *(row[name] for name in _SHAPE))
        baselines[stage] = row["baseline"]
        times = accepted.setdefault(stage, {}).setdefault(row["series"], {})
        if row["accepted"]:
            times[row["repetition"]] = row["time_us"]
    found: dict[tuple[Any, ...], Row] = {}
    for stage, series in accepted.items():
        control = series.get(baselines[stage], {})
        for name, times in series.items():
            pairs = [(times[r], control[r]) for r in sorted(times) if r in control]
            if name == baselines[stage]:
                continue
            told: Row = dict.fromkeys(("baseline_us", "candidate_us", "change", "low", "high"))
            told |= {"n": len(pairs), "repetitions": rules["repetitions"], "verdict": "too few accepted"}
            found[stage[0], name, *stage[1:]] = told
            if len(pairs) < rules["repetitions"]:
                continue
            told |= _estimate(pairs, rules["bootstrap"])
            told["verdict"] = "undecided"
            if told["high"] <= -minimum_effect:
                told["verdict"] = "faster"
            elif told["low"] >= minimum_effect:
                told["verdict"] = "slower"
    for key, told in found.items():
        floors = [v for k, v in found.items() if k[0] == _FLOORS.get(key[0]) and k[2:] == key[2:]]
        for part in ("change", "low", "high"):
            told[f"floor_{part}"] = floors[0][part] if floors else None
        ends = [told["low"], told["high"], told["floor_low"], told["floor_high"]]
        told["clear_of_floor"] = None if None in ends else not (ends[0] <= ends[3] and ends[2] <= ends[1])
    return found


def _due(row: Row, rules: Row) -> str:
    """The reason for which the protocol rejects a batch, by what was seen of its device."""
    watched = sum(_EVENTS[name] for name in rules["acceptance"]["throttle_reasons"])
    if row["clock_events"] >= 0 and row["clock_events"] & watched:
        return "throttled"
    return "other_process" if row["compute_processes"] > 1 else ""


def _order(row: Row, rules: Row) -> list[str]:
    """Which series run in the row's repetition, in order, for the two campaigns that the protocol spells out."""
    turn = row["repetition"]
    if row["campaign"] == "confirmation":
        plan = rules["confirmation"]
        pair = [plan["control"], plan["candidate"]]
        return [pair[turn % 2], pair[1 - turn % 2]]
    arms = next(f["arms"] for f in rules["families"] if f["name"] == row["family"])
    order = [arms[(turn + place) % len(arms)] for place in range(len(arms))]
    return order if turn % 2 == 0 else [arms[(turn - 1 - place) % len(arms)] for place in range(len(arms))]


def _unruly(rows: list[Row], rules: Row) -> list[str]:
    """Batches that were accepted, rejected, labelled or placed otherwise than the protocol has it."""
    wrong = []
    for index, row in enumerate(rows):
        who = f"{row['lane']}/{row['device']} {row['campaign']} batch {index} ({row['series']})"
        due = "incorrect" if row["reason"] == "incorrect" else _due(row, rules)
        if row["reason"] != due or row["accepted"] != (not due):
            wrong.append(f"{who}: accepted {row['accepted']}, reason {row['reason']!r}; by the protocol {due!r}")
        if not (row["time_us"] > 0 and math.isfinite(row["time_us"])):
            wrong.append(f"{who}: time_us is {row['time_us']!r}")
        if row["direction"] != ("forward", "reversed")[row["repetition"] % 2]:
            wrong.append(f"{who}: repetition {row['repetition']} ran {row['direction']}")
        if row["series"].split("/")[0] != row["arm"]:
            wrong.append(f"{who}: its arm is {row['arm']}")
        if row["campaign"] in ("sweep", "confirmation"):
            order = _order(row, rules)
            if row["position"] >= len(order) or order[row["position"]] != row["series"]:
                wrong.append(f"{who}: not at position {row['position']} of repetition {row['repetition']}")
    return wrong


def _ratios(rows: list[Row], ratios: list[Row]) -> list[str]:
    """What of the table of ratios does not follow from the raw batches."""
    place = ("campaign", *_SHAPE, "repetition")
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    control: dict[tuple[Any, ...], str] = {}
    for row in rows:
        if row["accepted"]:
            where = tuple(row[name] for name in place)
            times.setdefault(where, {})[row["series"]] = row["time_us"]
            control[where] = row["baseline"]
    ours = {
        (where, name): us / mine[control[where]]
        for where, mine in times.items()
        for name, us in mine.items()
        if name != control[where] and control[where] in mine
    }
    theirs = {(tuple(row[name] for name in place), row["series"]): row["ratio"] for row in ratios}
    wrong = [
        f"{key}: ratio {theirs.get(key)}, recomputed {ours.get(key)}"
        for key in ours.keys() | theirs.keys()
        if ours.get(key) != theirs.get(key)
    ]
    return sorted(wrong) + ([] if len(theirs) == len(ratios) else ["a ratio is listed twice"])


def _counts(batches: Mapping[Path, list[Row]], expected: Row) -> list[str]:
    seen: dict[tuple[str, str], int] = {}
    devices = set()
    for folder, rows in batches.items():
        run, comparisons = folder / "run.json", folder / "comparisons.json"
        told, compared = _json(run), _json(comparisons)
        with _about(run):
            name = f"{told['device']['lane']}/{told['device']['device']}"
        devices.add(name)
        for row in rows:
            key = (name, f"{row['campaign']}_batches")
            seen[key] = seen.get(key, 0) + bool(row["accepted"])
        with _about(comparisons):
            for row in compared:
                key = (name, f"{row['campaign']}_comparisons")
                seen[key] = seen.get(key, 0) + bool(row["holds"])
    return [
        f"{name}: {what} {seen.get((name, what), 0)}, expected {number}"
        for name in sorted(devices)
        for what, number in sorted(expected.items())
        if seen.get((name, what), 0) != number
    ]


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(
        f"lacks {error}" if isinstance(error, KeyError) else f"cannot be used: {error}",
        where=str(path),
        limit="records of a sweep or confirmation, their statistics and the protocol are needed",
        way_out="run statistics on the records, and name the committed protocol",
    )


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """What a file has not the form for is told of `path`."""
    try:
        yield
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError, StopIteration) as e:
        raise e if isinstance(e, InputError) else _unreadable(path, e) from e


def _json(path: Path) -> Any:
    with _about(path):
        return json.loads(path.read_text(encoding="utf-8"))


def _rows(path: Path, kinds: Mapping[str, str]) -> list[Row]:
    with _about(path):
        table = pyarrow.parquet.read_table(path)
        if not table.num_rows:  # of no rows the table of ratios has no columns
            return []
        there = {field.name: str(field.type) for field in table.schema}
        for name, kind in kinds.items():
            if there.get(name) != kind:
                raise ValueError(f"column {name} is {there.get(name, 'not there')}, not {kind}")
            if table[name].null_count:
                raise ValueError(f"empty cells in column {name}")
        rows: list[Row] = table.to_pylist()
        return rows


def disagreements(statistics: Path, folders: Sequence[Path], protocol: Path) -> tuple[int, list[str]]:
    """How many comparisons were recomputed, and every value that is not exactly equal, one line each.

    Raises InputError if a file is missing or malformed.
    """
    told, rules = _json(statistics), _json(protocol)
    ratios = statistics.with_name("ratios.parquet")
    batches = {folder: _rows(folder / "batches.parquet", _BATCH) for folder in folders}
    for folder, own in batches.items():
        if any(row["time_us"] == 0 for row in own):
            raise _unreadable(folder / "batches.parquet", ValueError("a time of 0"))
    rows = [row for own in batches.values() for row in own]
    with _about(statistics):
        least = float(told["minimum_effect"])
        theirs = {(c["campaign"], c["series"], *(c[name] for name in _SHAPE)): c for c in told["comparisons"]}
    with _about(protocol):
        ours = recompute(rows, rules, least)
        wrong = _counts(batches, rules["expected_per_device"])
        wrong += _unruly(rows, rules)
    wrong += _ratios(rows, _rows(ratios, _RATIO))
    if len(theirs) != len(told["comparisons"]):
        wrong.append("a comparison is listed twice")
    labels = {
        (r["campaign"], r["series"], *(r[n] for n in _SHAPE)): {n: r[n] for n in ("arm", "baseline")} for r in rows
    }
    for key in sorted(ours.keys() ^ theirs.keys(), key=str):
        wrong.append(f"{key}: only in {'the raw batches' if key in ours else 'the statistics'}")
    for key in ours.keys() & theirs.keys():
        wrong += [
            f"{key}: {name} is {theirs[key].get(name)!r}, recomputed {value!r}"
            for name, value in (ours[key] | labels[key]).items()
            if theirs[key].get(name) != value
        ]
    return len(ours), wrong


def write(out: Path, statistics: Path, folders: Sequence[Path], protocol: Path) -> tuple[int, list[str]]:
    """Write `validation.json` and its manifest to `out`; returns what `disagreements` does."""
    number, wrong = disagreements(statistics, folders, protocol)
    path = out / "validation.json"
    with atomic_file(path) as tmp:
        tmp.write_bytes(canonical_json({"comparisons": number, "disagreements": wrong}))
    inputs = [
        statistics,
        statistics.with_name("ratios.parquet"),
        protocol,
        *(f / n for f in folders for n in ("batches.parquet", "comparisons.json", "run.json")),
    ]
    seal(
        out / "validation.manifest.json",
        rule="validate_timings",
        outputs=[path],
        inputs=inputs,
        parameters={},
        modules=[__name__],
    )
    return number, wrong
