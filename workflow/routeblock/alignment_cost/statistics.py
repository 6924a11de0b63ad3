# SPDX-License-Identifier: Apache-2.0
"""Changes, intervals and verdicts of every series against the baseline, with the A/A floor beside."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock import stats
from routeblock.alignment_cost import record
from routeblock.alignment_cost.batches import Batch
from routeblock.alignment_cost.measure import CLOCKS, planned
from routeblock.alignment_cost.protocol import Campaign, Mode, Point, Protocol, load
from routeblock.errors import InputError
from routeblock.evidence import statistics as document


@dataclass(frozen=True)
class Comparison:
    """One series against the baseline at one point, by one clock: microseconds a call, changes as fractions.

    n: accepted repetitions; the times, the change and its interval are None without any. `floor_*`: the baseline
    against itself. verdict: None on the host's clock. target: the largest ratio allowed, where the protocol has one.
    """

    campaign: str
    role: str
    experts: int
    top_k: int
    tokens: int
    block_size: int
    mode: str
    series: str
    arm: str
    variant: str
    n: int
    planned: int
    baseline_us: float | None
    candidate_us: float | None
    change: float | None
    low: float | None
    high: float | None
    floor_change: float | None
    floor_low: float | None
    floor_high: float | None
    margin: float
    verdict: str | None
    target: float | None
    reached: bool | None


def comparisons(batches: Iterable[Batch], protocol: Protocol) -> list[Comparison]:
    """Every comparison of the protocol, in its order; those without an accepted batch too."""
    times: dict[tuple[Any, ...], dict[int, float]] = {}
    variants: dict[tuple[Any, ...], str] = {}
    for b in batches:
        if b.accepted:
            key = (b.campaign, b.experts, b.top_k, b.tokens, b.mode, b.series)
            if b.repetition in times.setdefault(key, {}):
                raise InputError(
                    f"repetition {b.repetition} of {b.series} was accepted twice",
                    where=f"{b.campaign} E={b.experts} k={b.top_k} M={b.tokens} {b.mode}",
                    limit="one accepted batch for a repetition, series and clock",
                    way_out="use the record as it was written",
                )
            times[key][b.repetition] = b.time_us
            variants[key] = b.variant
    found = []
    for point in planned(protocol):
        for mode in clocks(point):
            shape = (str(point.campaign), point.experts, point.top_k, point.tokens, str(mode))
            baseline = times.get((*shape, protocol.baseline), {})
            changes = {s.name: _change(times.get((*shape, s.name), {}), baseline, protocol) for s in protocol.series}
            for series in protocol.series:
                if series.name != protocol.baseline:
                    variant = variants.get((*shape, series.name), "")
                    found.append(_comparison(point, mode, series.name, str(series.arm), variant, changes, protocol))
    return found


def clocks(point: Point) -> list[Mode]:
    """The clocks of a point: the host's only for the operator."""
    every = [clock for both in CLOCKS.values() for clock in both]
    return [c for c in every if c is not Mode.HOST or point.campaign is Campaign.OPERATOR]


def _change(candidate: dict[int, float], baseline: dict[int, float], protocol: Protocol) -> stats.Change | None:
    common, new, old = stats.matched(candidate, baseline)
    return stats.paired_change(new, old, **protocol.bootstrap.model_dump()) if common else None


def _comparison(
    point: Point,
    mode: Mode,
    name: str,
    arm: str,
    variant: str,
    changes: dict[str, stats.Change | None],
    protocol: Protocol,
) -> Comparison:
    change, floor = changes[name], changes[protocol.floor]
    n = change.n if change else 0
    margin = protocol.margins.layer if point.campaign is Campaign.LAYER else protocol.margins.operator
    verdict = None
    if mode is not Mode.HOST:
        enough = change is not None and n >= math.ceil(protocol.minimum_pairs * point.repetitions)
        verdict = str(
            stats.non_inferiority(change.low, change.high, margin)
            if enough and change
            else stats.NonInferiority.UNDECIDED
        )
    target = _target(point, mode, name, protocol)
    return Comparison(
        str(point.campaign),
        str(point.role),
        point.experts,
        point.top_k,
        point.tokens,
        point.block_size,
        str(mode),
        name,
        arm,
        variant,
        n,
        point.repetitions,
        change.baseline if change else None,
        change.candidate if change else None,
        change.change if change else None,
        change.low if change else None,
        change.high if change else None,
        floor.change if floor else None,
        floor.low if floor else None,
        floor.high if floor else None,
        margin,
        verdict,
        target,
        None if target is None or change is None else 1 + change.change <= target,
    )


def _target(point: Point, mode: Mode, series: str, protocol: Protocol) -> float | None:
    for t in protocol.targets:
        fits = (t.campaign, t.role, t.mode, t.series) == (point.campaign, point.role, mode, series)
        if fits and point.tokens <= t.up_to_tokens:
            return t.ratio
    return None


def write(out: Path, folder: Path, protocol_path: Path) -> list[str]:
    """Write `statistics.json` and its manifest to `out`, from the record in `folder`.

    Returns what the record lacks or does not show, one line each.
    """
    protocol, found = load(protocol_path), record.read(folder)
    document.write(
        out,
        comparisons(found.batches, protocol),
        protocol.digest(),
        rule="alignment_statistics",
        inputs=[protocol_path, *(folder / name for name in record.FILES)],
        modules=[__name__],
    )
    return record.problems(found, protocol)


def read(path: Path) -> list[Comparison]:
    """The comparisons of a `statistics.json`. Raises InputError if it is none."""
    return document.read(path, lambda c: Comparison(**c), "alignment-statistics")
