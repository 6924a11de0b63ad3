# SPDX-License-Identifier: Apache-2.0
"""Times of every side, ratios of ours to each, and the verdict against the best peer, with the A/A floor beside."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from routeblock import stats
from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal
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
    change = protocol.bootstrap.change(new, old)
    return Ratio(change.n, change.baseline, 1 + change.change, 1 + change.low, 1 + change.high)


def write(out: Path, folder: Path, protocol_path: Path, *, code: str) -> list[str]:
    """Write `statistics.json` and its manifest to `out`, from the record in `folder`.

    Returns what the record lacks or does not show, one line each.
    """
    protocol, found = load(protocol_path), record.read(folder)
    told = {
        "protocol_sha256": protocol.digest(),
        "comparisons": [asdict(c) for c in comparisons(found.batches, protocol)],
    }
    path = out / "statistics.json"
    with atomic_file(path) as tmp:
        tmp.write_bytes(canonical_json(told))
    seal(
        out / "statistics.manifest.json",
        rule="dispatch_statistics",
        outputs=[path],
        inputs=[protocol_path, *(folder / name for name in record.FILES)],
        parameters={"protocol_sha256": protocol.digest()},
        code=code,
    )
    return record.problems(found, protocol)


def read(path: Path) -> list[Comparison]:
    """The comparisons of a `statistics.json`. Raises InputError if it is none."""
    try:
        return [
            Comparison(**(c | {"ratios": {n: None if r is None else Ratio(**r) for n, r in c["ratios"].items()}}))
            for c in json.loads(path.read_text(encoding="utf-8"))["comparisons"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(
            f"no statistics: {e}",
            where=str(path),
            limit="a file of `routeblock dispatch-statistics` is needed",
            way_out="run that command",
        ) from e
