# SPDX-License-Identifier: Apache-2.0
"""Times of every side, ratios of ours to each, and the verdict against the best peer, with the A/A floor beside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from routeblock import stats
from routeblock.errors import InputError
from routeblock.evidence import statistics as document
from routeblock.q6k_dispatch import record
from routeblock.q6k_dispatch.batches import Batch
from routeblock.q6k_dispatch.protocol import Protocol, Shape, load, shapes


@dataclass(frozen=True)
class Ratio:
    """The candidate's time over another series': median over repetitions, and its interval."""

    n: int
    other_us: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """One shape: the candidate's median, the ratio to every other series (None: too few accepted), and the verdict.

    best: the peer with the least median. reached: whether the threshold holds against it; None where it does not bind,
    or without enough accepted repetitions.
    """

    role: str
    slots: int
    pool: int
    rows: int
    cols: int
    n: int
    candidate_us: float | None
    ratios: dict[str, Ratio | None]
    best: str | None
    reached: bool | None


Times = dict[str, dict[int, float]]


def times(batches: Iterable[Batch]) -> dict[tuple[str, int, int, int, int], Times]:
    """Accepted times by shape, series and repetition. Raises InputError if a repetition was accepted twice."""
    found: dict[tuple[str, int, int, int, int], Times] = {}
    for b in batches:
        if b.accepted:
            of_series = found.setdefault((b.role, b.slots, b.pool, b.rows, b.cols), {}).setdefault(b.series, {})
            if b.repetition in of_series:
                raise InputError(
                    f"repetition {b.repetition} of {b.series} was accepted twice",
                    where=f"{b.role} {b.slots}/{b.pool} {b.rows}x{b.cols}",
                    limit="one accepted batch for a repetition and series",
                    way_out="use the record as it was written",
                )
            of_series[b.repetition] = b.time_us
    return found


def comparisons(batches: Iterable[Batch], protocol: Protocol) -> list[Comparison]:
    """Every shape of the protocol, in its order."""
    found = times(batches)
    return [_compare(shape, found.get(_key(shape), {}), protocol) for shape in shapes(protocol)]


def _key(shape: Shape) -> tuple[str, int, int, int, int]:
    return (str(shape.role), shape.slots, shape.pool, shape.rows, shape.cols)


def _compare(shape: Shape, found: Times, protocol: Protocol) -> Comparison:
    ours = found.get(protocol.candidate, {})
    others = [s.name for s in protocol.series if s.name != protocol.candidate]
    ratios = {name: _ratio(ours, found.get(name, {}), protocol) for name in others}
    peers = {name: r for name in protocol.peers if (r := ratios[name]) is not None}
    best = min(peers, key=lambda name: peers[name].other_us) if peers else None
    binds = shape.role in protocol.threshold.roles and best is not None
    return Comparison(
        *_key(shape),
        len(ours),
        float(np.median(list(ours.values()))) if ours else None,
        ratios,
        best,
        peers[best].high <= protocol.threshold.ratio if binds and best else None,
    )


def _ratio(ours: dict[int, float], theirs: dict[int, float], protocol: Protocol) -> Ratio | None:
    common, new, old = stats.matched(ours, theirs)
    if len(common) < protocol.repetitions:
        return None
    change = stats.paired_change(new, old, **protocol.bootstrap.model_dump())
    return Ratio(change.n, change.baseline, 1 + change.change, 1 + change.low, 1 + change.high)


def write(out: Path, folder: Path, protocol_path: Path) -> list[str]:
    """Write `statistics.json` and its manifest to `out`, from the record in `folder`.

    Returns what the record lacks or does not show, one line each.
    """
    protocol, found = load(protocol_path), record.read(folder)
    document.write(
        out,
        comparisons(found.batches, protocol),
        protocol.digest(),
        rule="dispatch_statistics",
        inputs=[protocol_path, *(folder / name for name in record.FILES)],
        modules=[__name__],
    )
    return record.problems(found, protocol)


def read(path: Path) -> list[Comparison]:
    """The comparisons of a `statistics.json`. Raises InputError if it is none."""
    return document.read(path, _comparison, "dispatch-statistics")


def _comparison(told: dict[str, Any]) -> Comparison:
    ratios = {name: None if r is None else Ratio(**r) for name, r in told["ratios"].items()}
    return Comparison(**(told | {"ratios": ratios}))
