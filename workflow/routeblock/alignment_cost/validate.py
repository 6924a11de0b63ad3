# SPDX-License-Identifier: Apache-2.0
"""A second computation of the cost's statistics and verdicts; the two must agree exactly.

Nothing of the measurement or of the first computation is shared: protocol, seal and raw batches are read as plain JSON
and parquet; medians, quantiles, pairing, order and verdicts are done again in plain Python. Only the random draw is
NumPy's, because the protocol names it.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal

Row = dict[str, Any]
Key = tuple[Any, ...]
_SEALS = ("record_alignment.manifest.json", "recorded_alignment.manifest.json")  # of a GPU, of a committed record
_BATCHES = "batches.parquet"
_CLOCKS = {"operator": ("graph", "stream", "host"), "layer": ("graph", "stream")}


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


def _points(rules: Row) -> list[Row]:
    return [
        {"campaign": campaign, "tokens": tokens} | {k: group[k] for k in ("role", "experts", "top_k", "repetitions")}
        for campaign in _CLOCKS
        for group in rules[campaign]["points"]
        for tokens in group["tokens"]
    ]


def _verdict(told: Row, margin: float, least: float) -> str:
    if told["n"] == 0 or told["n"] < least:
        return "undecided"
    if told["high"] <= margin:
        return "non-inferior"
    return "inferior" if told["low"] > margin else "undecided"


def recompute(rows: list[Row], rules: Row) -> dict[Key, Row]:
    """Every comparison that the protocol asks for, by (campaign, experts, top_k, tokens, mode, series)."""
    times: dict[Key, dict[int, float]] = {}
    for row in rows:
        if row["accepted"]:
            key = tuple(row[name] for name in ("campaign", "experts", "top_k", "tokens", "mode", "series"))
            times.setdefault(key, {})[row["repetition"]] = row["elapsed_us"] / row["calls"]
    found: dict[Key, Row] = {}
    for point in _points(rules):
        for clock in _CLOCKS[point["campaign"]]:
            shape = (point["campaign"], point["experts"], point["top_k"], point["tokens"], clock)
            old = times.get((*shape, rules["baseline"]), {})
            floor = _estimate(times.get((*shape, rules["floor"]), {}), old, rules["bootstrap"])
            for series in rules["series"]:
                if series["name"] == rules["baseline"]:
                    continue
                told = _estimate(times.get((*shape, series["name"]), {}), old, rules["bootstrap"])
                margin = rules["margins"][point["campaign"]]
                targets = [
                    t["ratio"]
                    for t in rules["targets"]
                    if (t["campaign"], t["role"], t["mode"], t["series"])
                    == (point["campaign"], point["role"], clock, series["name"])
                    and point["tokens"] <= t["up_to_tokens"]
                ]
                told |= {f"floor_{name}": floor[name] for name in ("change", "low", "high")}
                told |= {"role": point["role"], "arm": series["arm"], "planned": point["repetitions"], "margin": margin}
                least = rules["minimum_pairs"] * point["repetitions"]
                told["verdict"] = None if clock == "host" else _verdict(told, margin, least)
                told["target"] = targets[0] if targets else None
                told["reached"] = None
                if targets and told["n"]:
                    told["reached"] = told["change"] + 1 <= targets[0]
                found[(*shape, series["name"])] = told
    return found


def unsealed(folder: Path) -> list[str]:
    """The files of a record that are not what its manifest sealed."""
    wrong = []
    manifest = next((folder / name for name in _SEALS if (folder / name).is_file()), folder / _SEALS[0])
    for entry in json.loads(manifest.read_text(encoding="utf-8"))["outputs"]:
        path = folder / entry["path"]
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "nothing"
        if digest != entry["sha256"]:
            wrong.append(f"{path}: edited: SHA-256 {digest[:16]}, sealed with {entry['sha256'][:16]}")
    return wrong


def misplaced(rows: list[Row], rules: Row) -> list[str]:
    """Batches that do not stand where the protocol's order puts their series, or do not fit themselves."""
    wrong = []
    names, arms = [s["name"] for s in rules["series"]], {s["name"]: s["arm"] for s in rules["series"]}
    seen: set[Key] = set()
    for row in rows:
        where = " ".join(str(row[n]) for n in ("campaign", "experts", "top_k", "tokens", "mode"))
        where += f", repetition {row['repetition']}, attempt {row['attempt']}, position {row['position']}"
        turn = row["repetition"] // 2 % len(names)
        order = names[turn:] + names[:turn]
        if row["repetition"] % 2:
            order.reverse()
        due = order[row["position"]] if 0 <= row["position"] < len(order) else None
        if row["series"] != due:
            wrong.append(f"{where}: series {row['series']}, where the order has {due}")
        elif row["arm"] != arms[due]:
            wrong.append(f"{where}: arm {row['arm']} under the label {due}, which is {arms[due]}")
        if row["time_us"] != row["elapsed_us"] / row["calls"] or not row["elapsed_us"] > 0:
            wrong.append(f"{where}: {row['time_us']} us a call are not {row['elapsed_us']} us by {row['calls']}")
        if row["accepted"] != (row["reason"] == "") or row["reason"] not in {"", *rules["acceptance"]["reject"]}:
            wrong.append(f"{where}: accepted {row['accepted']} with reason {row['reason']!r}")
        key = (where, row["accepted"])
        if key in seen:
            wrong.append(f"{where}: there twice")
        seen.add(key)
    return wrong


def disagreements(statistics: Path, folder: Path, protocol: Path) -> tuple[int, list[str]]:
    """How many comparisons were recomputed, and whatever is not exactly equal or not in place, one line each."""
    try:
        told = json.loads(statistics.read_text(encoding="utf-8"))["comparisons"]
        rules = json.loads(protocol.read_text(encoding="utf-8"))
        rows = pyarrow.parquet.read_table(folder / _BATCHES).to_pylist()
        wrong = unsealed(folder)
    except (OSError, ValueError, KeyError) as e:
        raise InputError(
            f"cannot be read: {e}",
            where=str(folder),
            limit="a sealed record, its statistics and the protocol are needed",
            way_out="run alignment-statistics on the record first",
        ) from e
    wrong += misplaced(rows, rules)
    ours = recompute(rows, rules)
    theirs = {tuple(c[n] for n in ("campaign", "experts", "top_k", "tokens", "mode", "series")): c for c in told}
    if len(theirs) != len(told):
        wrong.append(f"{len(told) - len(theirs)} comparisons are there twice")
    for key in sorted(ours.keys() ^ theirs.keys(), key=str):
        wrong.append(f"{key}: only in {'the protocol' if key in ours else 'the statistics'}")
    for key in ours.keys() & theirs.keys():
        wrong += [
            f"{' '.join(map(str, key))}: {name} is {theirs[key].get(name)!r}, recomputed {value!r}"
            for name, value in ours[key].items()
            if name not in theirs[key] or theirs[key][name] != value
        ]
    return len(ours), wrong


def write(out: Path, statistics: Path, folder: Path, protocol: Path, *, code: str) -> tuple[int, list[str]]:
    """Write `validation.json` and its manifest to `out`; returns what `disagreements` does."""
    number, wrong = disagreements(statistics, folder, protocol)
    path = out / "validation.json"
    with atomic_file(path) as tmp:
        tmp.write_bytes(canonical_json({"comparisons": number, "disagreements": wrong}))
    seal(
        out / "validation.manifest.json",
        rule="validate_alignment",
        outputs=[path],
        inputs=[statistics, protocol, folder / _BATCHES],
        parameters={},
        code=code,
    )
    return number, wrong
