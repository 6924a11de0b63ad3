# SPDX-License-Identifier: Apache-2.0
"""Study B's tables: confirmation, discovery (the complete matrix), cardinalities, positions, further campaigns."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from routeblock import tables
from routeblock.errors import InputError
from routeblock.evidence.chain import seal
from routeblock.grouped_schedule import record, statistics
from routeblock.grouped_schedule.arms import Scope
from routeblock.grouped_schedule.campaigns import Campaign
from routeblock.grouped_schedule.record import Recorded
from routeblock.grouped_schedule.statistics import Comparison
from routeblock.tables import Column

Row = dict[str, Any]

_WHERE = (Column("lane"), Column("device"))
_SHAPE = (Column("family"), Column("slots", "count"), Column("pool", "count"))
_ESTIMATE = (
    Column("n", "count"),
    Column("baseline_us", "number", ".2f"),
    Column("candidate_us", "number", ".2f"),
    Column("change_percent", "number", "+.2f"),
    Column("low_percent", "number", "+.2f"),
    Column("high_percent", "number", "+.2f"),
    Column("verdict"),
    Column("floor_percent", "number", "+.2f"),
    Column("floor_low_percent", "number", "+.2f"),
    Column("floor_high_percent", "number", "+.2f"),
)
_GPUS = (0, 1)


def _published(parts: Iterable[str]) -> tuple[Column, ...]:
    return tuple(Column(f"v100_gpu{g}_{part}", "number", "+.2f") for g in _GPUS for part in parts)


def _estimate(c: Comparison) -> Row:
    row: Row = {name: getattr(c, name) for name in ("lane", "device", "family", "slots", "pool", "rows", "cols")}
    row |= {"warps": c.warps, "mode": c.mode, "scope": c.scope, "campaign": c.campaign}
    row |= {"schedule": c.arm, "baseline": c.baseline, "n": c.n, "verdict": c.verdict}
    row |= {"baseline_us": c.baseline_us, "candidate_us": c.candidate_us}
    fractions: Row = {"change": c.change, "low": c.low, "high": c.high}
    fractions |= {"floor": c.floor_change, "floor_low": c.floor_low, "floor_high": c.floor_high}
    return row | {f"{k}_percent": None if v is None else 100 * v for k, v in fractions.items()}


def _of(comparisons: Iterable[Comparison], *campaigns: Campaign) -> list[Comparison]:
    return [c for c in comparisons if c.campaign in campaigns]


def confirmation(comparisons: Sequence[Comparison], _: Sequence[Recorded], published: Row) -> list[Row]:
    """The fixed candidate against the control, both scopes, with both V100s beside the inclusive one."""
    told = {(p["gpu"], p["slots"], p["pool"]): p for p in published["confirmation"]}
    rows = []
    for c in _of(comparisons, Campaign.CONFIRMATION):
        row = _estimate(c)
        for gpu in _GPUS:
            if c.scope == Scope.INCLUSIVE and (p := told.get((gpu, c.slots, c.pool))):
                row |= {f"v100_gpu{gpu}_{part}": p[part] for part in ("change", "low", "high")}
        rows.append(row)
    return rows


def discovery(comparisons: Sequence[Comparison], _: Sequence[Recorded], published: Row) -> list[Row]:
    """Every schedule at every shape, both scopes; band32 inclusive beside what was published."""
    told = {(p["family"], p["slots"], p["pool"]): p["change"] for p in published["discovery_band32_inclusive"]}
    rows = []
    for c in _of(comparisons, Campaign.SWEEP):
        row = _estimate(c)
        if c.arm == "band32" and c.scope == Scope.INCLUSIVE and (p := told.get((c.family, c.slots, c.pool))):
            row |= {f"v100_gpu{gpu}_change": p[gpu] for gpu in _GPUS}
        rows.append(row)
    return rows


def beyond(comparisons: Sequence[Comparison], _: Sequence[Recorded], __: Row) -> list[Row]:
    """What the source did not publish: serial prototype, L2 ratio, cold L2, warps in a block, single launches, A/A."""
    published = (Campaign.SWEEP, Campaign.CONFIRMATION)
    return [_estimate(c) for c in comparisons if c.campaign not in published]


def cardinalities(_: Sequence[Comparison], records: Sequence[Recorded], __: Row) -> list[Row]:
    """Each fixture once: a pool bound is not a number of distinct experts."""
    seen: dict[str, Row] = {}
    for fixture in (f for r in records for f in r.fixtures):
        row = {k: v for k, v in fixture.items() if k not in ("ids", "sha256")}
        row |= {f"sha256_{k}": v for k, v in fixture["sha256"].items()}
        seen.setdefault(json.dumps(row, sort_keys=True), row)
    return list(seen.values())


def positions(_: Sequence[Comparison], records: Sequence[Recorded], __: Row) -> list[Row]:
    """How often each series ran at each position and in each direction; every accepted batch counts once."""
    counts: dict[tuple[str, ...], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for b in (b for r in records for b in r.batches):
        if b.accepted and b.campaign in (Campaign.SWEEP, Campaign.CONFIRMATION):
            key = (b.lane, b.device, b.campaign, b.family, b.series)
            counts[key][f"position_{b.position}"] += 1
            counts[key][b.direction] += 1
    names = ("lane", "device", "campaign", "family", "series")
    return [dict(zip(names, key, strict=True)) | dict(found) for key, found in sorted(counts.items())]


_SCHEDULE = (Column("scope"), Column("schedule"), Column("baseline"))
_FIXTURE_COUNTS = (
    "rows",
    "cols",
    "seed",
    "active_jobs",
    "sentinels",
    "distinct_experts",
    "largest_group",
    "groups_of_two",
    "weight_bytes_in_pool",
    "weight_bytes_used",
)
_SCOPES_NOTE = (
    "Two scopes (inclusive of grouping; compute only) are an inference: they fit every published count. "
    "Changes are medians of paired ratios, intervals percentile bootstraps of that median; they describe these "
    "fixtures on this device and say nothing of other workloads, hosts or requests. "
)
_FLOOR_NOTE = "Floor: the baseline against itself, timed the same way."
_CPU_NOTE = " Lane cpu: real times of this CPU; they say nothing of a GPU."

Maker = Callable[[Sequence[Comparison], Sequence[Recorded], Row], list[Row]]

TABLES: dict[str, tuple[Maker, tuple[Column, ...], str, str]] = {
    "confirmation": (
        confirmation,
        (*_WHERE, *_SHAPE, *_SCHEDULE, *_ESTIMATE, *_published(("change", "low", "high"))),
        "Confirmation: the schedule fixed in advance against the control",
        _SCOPES_NOTE + _FLOOR_NOTE + _CPU_NOTE,
    ),
    "discovery": (
        discovery,
        (*_WHERE, *_SHAPE, *_SCHEDULE, *_ESTIMATE, *_published(("change",))),
        "Discovery: every schedule at every shape",
        _SCOPES_NOTE + _FLOOR_NOTE + _CPU_NOTE,
    ),
    "beyond_study": (
        beyond,
        (
            *_WHERE,
            Column("campaign"),
            *_SHAPE,
            *(Column(n, "count") for n in ("rows", "cols", "warps")),
            Column("mode"),
            *_SCHEDULE,
            *_ESTIMATE,
        ),
        "Beyond the published study",
        "The serial prototype, shapes that keep a V100's ratio of weights to L2, a cold L2, other numbers of warps in "
        "a block, launches one by one, and the A/A floors themselves." + _CPU_NOTE,
    ),
    "cardinalities": (
        cardinalities,
        (
            *_SHAPE,
            *(Column(n, "count") for n in _FIXTURE_COUNTS),
            *(Column(f"sha256_{n}") for n in ("ids", "activations", "weights", "check_rows")),
        ),
        "Fixtures: recorded cardinalities and digests",
        "A pool bound is not a number of distinct experts. Sentinels have no work.",
    ),
    "positions": (
        positions,
        (
            *_WHERE,
            Column("campaign"),
            Column("family"),
            Column("series"),
            *(Column(f"position_{p}", "count") for p in range(7)),
            Column("forward", "count"),
            Column("reversed", "count"),
        ),
        "Positions: accepted batches of each series by position in the repetition",
        "Rotation and reversal are not fully balanced over positions.",
    ),
}


def write(
    name: str, out: Path, statistics_file: Path, folders: Sequence[Path], published: Path, *, code: str
) -> list[Path]:
    """Write the table `name` of `TABLES` to `out`, sealed by `{name}.manifest.json`.

    Raises InputError for an unknown name or inputs that are not what they should be.
    """
    if name not in TABLES:
        raise InputError(
            f"no table is called {name!r}",
            where="tables",
            limit=f"known tables are {', '.join(TABLES)}",
            way_out="name one of them",
        )
    maker, columns, title, notes = TABLES[name]
    records = [record.read(folder) for folder in folders]
    told = json.loads(published.read_text(encoding="utf-8"))
    rows = maker(statistics.read(statistics_file), records, told)
    if any(key.startswith("v100") for row in rows for key in row):
        notes += f" v100_*: {told['source']}, in percent."
    files = tables.write(out, name, columns, rows, title=title, notes=notes)
    seal(
        out / f"{name}.manifest.json",
        rule=f"table_{name}",
        outputs=files,
        inputs=[statistics_file, published, *(folder / f for folder in folders for f in record.FILES)],
        parameters={},
        code=code,
    )
    return files
