# SPDX-License-Identifier: Apache-2.0
"""The recount: every comparison computed again, from plain rows, by code that shares nothing with `statistics`.

Medians are the standard library's, resamples SciPy's; both computations must give exactly equal numbers. The random
generator is NumPy's in both, because the protocol names it. This module imports nothing of the package.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import numpy
import scipy.stats

Row = dict[str, Any]
_ESTIMATE = ("baseline_us", "candidate_us", "change", "low", "high")


def _accepted(rows: list[Row], key: tuple[str, ...]) -> dict[Any, dict[int, float]]:
    """Accepted times a call by stage, clock and series, then by repetition."""
    found: dict[Any, dict[int, float]] = {}
    for row in rows:
        if row["accepted"]:
            time = row["elapsed_us"] / row["calls"] if "elapsed_us" in row else row["time_us"]
            place = (tuple(row[name] for name in key), row.get("clock", ""), row["series"])
            found.setdefault(place, {})[row["repetition"]] = time
    return found


def _quantile(ordered: list[float], fraction: float) -> float:
    """Linear interpolation between order statistics, from whichever neighbour is nearer."""
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    weight = place - below
    left, right = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return right - (right - left) * (1 - weight) if weight >= 0.5 else left + (right - left) * weight


def _interval(ratios: list[float], bootstrap: Row) -> tuple[float, float]:
    if len(ratios) == 1:  # nothing to draw from
        return ratios[0], ratios[0]
    generator = numpy.random.Generator(numpy.random.PCG64(bootstrap["seed"]))
    found = scipy.stats.bootstrap(
        (ratios,), numpy.median, n_resamples=bootstrap["resamples"], method="percentile", rng=generator
    )
    medians = sorted(found.bootstrap_distribution.tolist())
    tail = (1 - bootstrap["confidence"]) / 2
    return _quantile(medians, tail), _quantile(medians, 1 - tail)


def _estimate(new: dict[int, float], old: dict[int, float], least: int, bootstrap: Row) -> Row:
    both = sorted(set(new) & set(old))
    estimate: Row = dict.fromkeys(_ESTIMATE) | {"n": len(both)}
    if len(both) < least:
        return estimate
    ratios = [new[r] / old[r] for r in both]
    low, high = _interval(ratios, bootstrap)
    return estimate | {
        "baseline_us": median(old[r] for r in both),
        "candidate_us": median(new[r] for r in both),
        "change": median(ratios) - 1,
        "low": low - 1,
        "high": high - 1,
    }


def _verdict(rule: str, estimate: Row, least: int, threshold: float | None) -> str | None:
    few = estimate["n"] < least or estimate["low"] is None
    if rule == "none":
        return None
    if rule == "best":
        return "too few accepted" if few else ""
    low, high = estimate["low"], estimate["high"]
    if rule == "margin":
        if few or (low <= threshold < high):
            return "undecided"
        return "non-inferior" if high <= threshold else "inferior"
    if few:
        return "too few accepted"
    if high <= -(threshold or 0):
        return "faster"
    return "slower" if low >= (threshold or 0) else "undecided"


def recount(rows: list[Row], key: tuple[str, ...], pairs: list[Row], bootstrap: Row) -> list[Row]:
    """The comparison of each of `pairs`, which are `plan.Pair` as plain mappings, from batch `rows`.

    `key` names the columns of a stage; `bootstrap` holds seed, resamples and confidence.
    """
    times = _accepted(rows, key)
    found: list[Row] = []
    by_place: dict[Any, Row] = {}
    for pair in pairs:
        stage, clock = pair["stage"], pair["clock"]
        new, old = (times.get((stage, clock, pair[side]), {}) for side in ("candidate", "baseline"))
        estimate = _estimate(new, old, pair["estimate_from"], bootstrap)
        estimate["verdict"] = _verdict(str(pair["rule"]), estimate, pair["verdict_from"], pair["threshold"])
        found.append(estimate)
        by_place[stage, clock, pair["candidate"], pair["baseline"]] = estimate
    result = []
    for pair, estimate in zip(pairs, found, strict=True):
        floor: Row | None = None
        if pair["floor"]:
            stage, candidate, baseline = pair["floor"]
            floor = by_place.get((stage, pair["clock"], candidate, baseline))
        row = {**pair["columns"], **estimate, "planned": pair["planned"], "threshold": pair["threshold"]}
        row |= {f"floor_{name}": floor[name] if floor else None for name in ("change", "low", "high")}
        ends = [row[name] for name in ("low", "high", "floor_low", "floor_high")]
        apart = None if None in ends or str(pair["rule"]) != "effect" else ends[1] < ends[2] or ends[3] < ends[0]
        row["clear_of_floor"] = apart
        row["target"], row["best"], row["reached"] = pair["target"], None, None
        if pair["target"] is not None and pair["contest"] is None and estimate["change"] is not None:
            row["reached"] = estimate["change"] + 1 <= pair["target"]
        result.append(row)
    _contests(pairs, result)
    return result


def paired_ratios(rows: list[Row], key: tuple[str, ...], pairs: list[Row]) -> list[Row]:
    """Every ratio of a repetition that both series of a pair have, in order."""
    times = _accepted(rows, key)
    found = []
    for pair in pairs:
        new, old = (times.get((pair["stage"], pair["clock"], pair[side]), {}) for side in ("candidate", "baseline"))
        found += [{**pair["columns"], "repetition": r, "ratio": new[r] / old[r]} for r in sorted(new) if r in old]
    return found


def _contests(pairs: list[Row], rows: list[Row]) -> None:
    """Where every baseline of a contest has its repetitions, the fastest is the one to beat."""
    for contest in {pair["contest"] for pair in pairs if pair["contest"] is not None}:
        mine = [(pair, row) for pair, row in zip(pairs, rows, strict=True) if pair["contest"] == contest]
        if any(row["baseline_us"] is None for _, row in mine):
            continue
        fastest = sorted(row["baseline_us"] for _, row in mine)[0]
        first = True
        for pair, row in mine:
            row["best"] = first and row["baseline_us"] == fastest
            if row["best"]:
                first = False
                row["reached"] = None if pair["target"] is None else row["high"] + 1 <= pair["target"]
