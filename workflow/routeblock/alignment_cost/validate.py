# SPDX-License-Identifier: Apache-2.0
"""A second computation of the cost's statistics and verdicts; the two must agree exactly.

Nothing of the measurement or of the first computation is shared: protocol, seal and raw batches are read as plain JSON
and parquet, and walked by `conform`; medians, quantiles, pairing and verdicts are done again in plain Python. Only the
random draw is NumPy's, because the protocol names it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet

from routeblock.alignment_cost import conform
from routeblock.alignment_cost.reasons import Finding, Reason
from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal

Row = dict[str, Any]
Key = tuple[Any, ...]
_SEALS = ("record_alignment.manifest.json", "recorded_alignment.manifest.json")  # of a GPU, of a committed record
_BATCHES = "batches.parquet"
_DOCUMENTS = ("run.json", "exactness.json", "sanitizer.json")
_STATISTICS = "statistics.json"
_KEY = ("campaign", "experts", "top_k", "tokens", "mode", "series")
_COLUMNS = (
    dict.fromkeys(("campaign", "role", "mode", "series", "arm", "variant", "direction", "reason"), "string")
    | dict.fromkeys(("experts", "top_k", "tokens", "block_size", "repetition", "attempt", "position"), "int64")
    | dict.fromkeys(("calls", "warmups", "clock_events", "compute_processes", "sm_clock_mhz"), "int64")
    | dict.fromkeys(("elapsed_us", "time_us"), "double")
    | {"temperature_c": "int64", "accepted": "bool"}
)


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


def _estimate(new: dict[int, float], old: dict[int, float], bootstrap: Row) -> Row:
    both = sorted(set(new) & set(old))
    told: Row = dict.fromkeys(("baseline_us", "candidate_us", "change", "low", "high")) | {"n": len(both)}
    if not both:
        return told
    ratios = [new[r] / old[r] for r in both]
    generator = numpy.random.Generator(numpy.random.PCG64(bootstrap["seed"]))
    picks = generator.integers(0, len(ratios), size=(bootstrap["resamples"], len(ratios))).tolist()
    medians = sorted(_middle([ratios[i] for i in pick]) for pick in picks)
    tail = (1 - bootstrap["confidence"]) / 2
    return told | {
        "baseline_us": _middle([old[r] for r in both]),
        "candidate_us": _middle([new[r] for r in both]),
        "change": _middle(ratios) - 1,
        "low": _quantile(medians, tail) - 1,
        "high": _quantile(medians, 1 - tail) - 1,
    }


def _verdict(told: Row, margin: float, least: float) -> str:
    if told["n"] == 0 or told["n"] < least:
        return "undecided"
    if told["high"] <= margin:
        return "non-inferior"
    return "inferior" if told["low"] > margin else "undecided"


def recompute(rows: list[Row], rules: Row) -> dict[Key, Row]:
    """Every comparison that the protocol asks for, by (campaign, experts, top_k, tokens, mode, series).

    `rows` are batches that conform to the protocol, or those of some of its points.
    """
    times: dict[Key, dict[int, float]] = {}
    variants: dict[Key, str] = {}
    for row in rows:
        if row["accepted"]:
            key = tuple(row[name] for name in _KEY)
            times.setdefault(key, {})[row["repetition"]] = row["elapsed_us"] / row["calls"]
            variants[key] = row["variant"]
    found: dict[Key, Row] = {}
    for point in conform.planned(rules):
        for clock in point.calls:
            old = times.get((*point.key, clock, rules["baseline"]), {})
            told = {
                name: _estimate(times.get((*point.key, clock, name), {}), old, rules["bootstrap"])
                for name in (series["name"] for series in rules["series"])
                if name != rules["baseline"]
            }
            for series in rules["series"]:
                if series["name"] != rules["baseline"]:
                    key = (*point.key, clock, series["name"])
                    floor = told[rules["floor"]]
                    labels = dict(zip(_KEY, key, strict=True)) | {"arm": series["arm"]}
                    labels |= {"variant": variants.get(key, ""), "block_size": point.block_size, "role": point.role}
                    found[key] = labels | told[series["name"]] | _judged(point, clock, series, told, floor, rules)
    return found


def _judged(point: conform.Planned, clock: str, series: Row, every: dict[str, Row], floor: Row, rules: Row) -> Row:
    told = every[series["name"]]
    margin = float(rules["margins"][point.campaign])
    kind = (point.campaign, point.role, clock, series["name"])
    targets = [
        float(t["ratio"])
        for t in rules["targets"]
        if (t["campaign"], t["role"], t["mode"], t["series"]) == kind and point.tokens <= t["up_to_tokens"]
    ]
    least = rules["minimum_pairs"] * point.repetitions
    return {f"floor_{name}": floor[name] for name in ("change", "low", "high")} | {
        "planned": point.repetitions,
        "margin": margin,
        "verdict": None if clock == "host" else _verdict(told, margin, least),
        "target": targets[0] if targets else None,
        "reached": told["change"] + 1 <= targets[0] if targets and told["n"] else None,
    }


def compare(told: Row, ours: dict[Key, Row], rules: Row) -> list[Finding]:
    """Where `told`, the contents of a statistics.json, is not exactly what was recomputed."""
    wrong = []
    if told["protocol_sha256"] != conform.protocol_digest(rules):
        wrong.append(Finding(_STATISTICS, Reason.PROTOCOL, f"carries protocol {told['protocol_sha256'][:12]}"))
    theirs: dict[Key, Row] = {}
    for row in told["comparisons"]:
        key = tuple(row[name] for name in _KEY)
        if key in theirs:
            wrong.append(Finding(_named(key), Reason.COMPARISON_TWICE, "there twice"))
        elif key not in ours:
            wrong.append(Finding(_named(key), Reason.COMPARISON_UNKNOWN, "not in the protocol"))
        theirs[key] = row
    for key, mine in ours.items():
        if key not in theirs:
            wrong.append(Finding(_named(key), Reason.COMPARISON_MISSING, "only in the protocol"))
            continue
        for name in sorted(mine.keys() | theirs[key].keys()):
            pair = [repr(side[name]) if name in side else "not there" for side in (theirs[key], mine)]
            if pair[0] != pair[1]:  # as written: 40 is not 40.0
                wrong.append(Finding(_named(key), Reason.VALUE, f"{name} is {pair[0]}, recomputed {pair[1]}"))
    return wrong


def _named(key: Key) -> str:
    return " ".join(map(str, key))


def unsealed(folder: Path) -> list[Finding]:
    """The files of a record that are not what its manifest sealed."""
    wrong = []
    manifest = next((folder / name for name in _SEALS if (folder / name).is_file()), folder / _SEALS[0])
    sealed = {entry["path"]: entry["sha256"] for entry in json.loads(manifest.read_text(encoding="utf-8"))["outputs"]}
    for name in sorted({*sealed, _BATCHES, *_DOCUMENTS}):
        path = folder / name
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "nothing"
        if digest != sealed.get(name):
            told = f"edited: SHA-256 {digest[:16]}, sealed with {sealed.get(name, 'nothing')[:16]}"
            wrong.append(Finding(str(path), Reason.SEAL, told))
    return wrong


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(
        f"lacks {error}" if isinstance(error, KeyError) else f"cannot be used: {error}",
        where=str(path),
        limit="a sealed record, its statistics and the protocol are needed",
        way_out="run alignment-statistics on the record, and name the committed protocol",
    )


def _json(path: Path) -> Row:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(told, dict):
            raise ValueError("no mapping")
        return told
    except (OSError, ValueError, RecursionError) as e:
        raise _unreadable(path, e) from e


def _rows(path: Path) -> list[Row]:
    try:
        table = pyarrow.parquet.read_table(path)
        kinds = {field.name: str(field.type) for field in table.schema}
        if other := sorted({name for name, _ in kinds.items() ^ _COLUMNS.items()}):
            raise ValueError(f"columns are not those of batches, {other[0]} first")
        if empty := [name for name in table.column_names if table[name].null_count]:
            raise ValueError(f"empty cells in column {empty[0]}")
        rows: list[Row] = table.to_pylist()
        return rows
    except (OSError, ValueError) as e:
        raise _unreadable(path, e) from e


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """What a document has not the form for is told of `path`."""
    try:
        yield
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise e if isinstance(e, InputError) else _unreadable(path, e) from e


def disagreements(statistics: Path, folder: Path, protocol: Path) -> tuple[int, list[Finding]]:
    """How many comparisons were recomputed, and whatever is not exactly equal or not as the protocol has it.

    Nothing is recomputed from batches that leave the protocol otherwise than by points that were not measured. Raises
    InputError if a file is missing or malformed.
    """
    told, rules = _json(statistics), _json(protocol)
    run, exact, tools = (_json(folder / name) for name in _DOCUMENTS)
    rows = _rows(folder / _BATCHES)
    with _about(protocol):
        conform.protocol_digest(rules)
    with _about(folder):
        wrong = unsealed(folder) + conform.deviations(rows, run, exact, tools, rules)
    ours: dict[Key, Row] = {}
    if {finding.reason for finding in wrong} <= {Reason.POINT_MISSING, Reason.SEAL}:
        with _about(protocol):
            ours = recompute(rows, rules)
        with _about(statistics):
            wrong += compare(told, ours, rules)
    return len(ours), wrong


def write(out: Path, statistics: Path, folder: Path, protocol: Path) -> tuple[int, list[Finding]]:
    """Write `validation.json` and its manifest to `out`; returns what `disagreements` does."""
    number, wrong = disagreements(statistics, folder, protocol)
    told = [{"where": f.where, "reason": str(f.reason), "detail": f.detail} for f in wrong]
    path = out / "validation.json"
    with atomic_file(path) as tmp:
        tmp.write_bytes(canonical_json({"comparisons": number, "disagreements": told}))
    seal(
        out / "validation.manifest.json",
        rule="validate_alignment",
        outputs=[path],
        inputs=[statistics, protocol, *(folder / name for name in (_BATCHES, *_DOCUMENTS))],
        parameters={},
        modules=[__name__],
    )
    return number, wrong
