# SPDX-License-Identifier: Apache-2.0
"""Changes and intervals of every comparison in the raw batches, with the A/A floor beside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from routeblock import stats
from routeblock.errors import InputError
from routeblock.evidence import statistics as document
from routeblock.evidence.files import atomic_file, write_json
from routeblock.evidence.manifest import seal
from routeblock.grouped_schedule import conform, record
from routeblock.grouped_schedule.batches import Batch
from routeblock.grouped_schedule.campaigns import Campaign
from routeblock.grouped_schedule.protocol import Protocol

FLOOR_OF = {
    Campaign.SWEEP: Campaign.SWEEP_FLOOR,
    Campaign.CONFIRMATION: Campaign.CONFIRMATION_FLOOR,
    Campaign.SERIAL_PROTOTYPE: Campaign.SWEEP_FLOOR,
}
_KEY = (
    "lane",
    "device",
    "campaign",
    "family",
    "slots",
    "pool",
    "rows",
    "cols",
    "warps",
    "mode",
    "scope",
    "baseline",
    "series",
    "arm",
)


@dataclass(frozen=True)
class Comparison:
    """One series against the baseline of its stage: times in microseconds, changes as fractions.

    `n` of `repetitions` pairs were accepted. With fewer than all there is no estimate (None): a median of few is not
    the protocol's. `floor_*` is the same estimate for the baseline against itself at this shape and scope, where it was
    measured; `clear_of_floor` says whether the two intervals lie apart.
    """

    lane: str
    device: str
    campaign: str
    family: str
    slots: int
    pool: int
    rows: int
    cols: int
    warps: int
    mode: str
    scope: str
    baseline: str
    series: str
    arm: str
    n: int
    repetitions: int
    verdict: str
    baseline_us: float | None = None
    candidate_us: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    floor_change: float | None = None
    floor_low: float | None = None
    floor_high: float | None = None
    clear_of_floor: bool | None = None


@dataclass(frozen=True)
class Pairs:
    """One comparison's accepted times: `key` the values of `_KEY`; candidate and baseline in us."""

    key: tuple[Any, ...]
    repetitions: list[int]
    candidate_us: list[float]
    baseline_us: list[float]


def paired(batches: Iterable[Batch]) -> list[Pairs]:
    """Every comparison's pairs, in the order of their first batch. Rejected batches take no part.

    A repetition counts where both sides have an accepted batch; a comparison without any is still there. Raises
    InputError if one has two of a kind.
    """
    times: dict[tuple[Any, ...], dict[int, float]] = {}
    for batch in batches:
        key = tuple(getattr(batch, name) for name in _KEY)
        times.setdefault(key, {})
        if batch.accepted:
            if batch.repetition in times[key]:
                raise InputError(
                    f"repetition {batch.repetition} of {batch.series} was accepted twice",
                    where=f"{batch.lane}/{batch.device} {batch.campaign}",
                    limit="one accepted batch for a repetition, series and scope",
                    way_out="give each record once",
                )
            times[key][batch.repetition] = batch.time_us
    baselines = {k[:-2]: v for k, v in times.items() if k[-2] == k[-3]}
    found = []
    for key, candidate in times.items():
        baseline = baselines.get(key[:-2], {})
        if key[-2] != key[-3]:
            found.append(Pairs(key, *stats.matched(candidate, baseline)))
    return found


def comparisons(pairs: Iterable[Pairs], plan: Protocol, minimum_effect: float) -> list[Comparison]:
    """The estimate of every comparison, with its floor beside."""
    found = []
    for each in pairs:
        who = dict(zip(_KEY, each.key, strict=True)) | {"n": len(each.repetitions), "repetitions": plan.repetitions}
        if len(each.repetitions) < plan.repetitions:
            found.append(Comparison(**who, verdict=str(stats.Verdict.INCOMPLETE)))
            continue
        change = stats.paired_change(each.candidate_us, each.baseline_us, **plan.bootstrap.model_dump())
        verdict = stats.verdict(change.low, change.high, minimum_effect)
        found.append(Comparison(**(who | _named(change)), verdict=str(verdict)))
    return _with_floors(found)


def _named(change: stats.Change) -> dict[str, Any]:
    told = asdict(change)
    return told | {"baseline_us": told.pop("baseline"), "candidate_us": told.pop("candidate")}


def _with_floors(found: list[Comparison]) -> list[Comparison]:
    def shape(c: Comparison, campaign: str) -> tuple[Any, ...]:
        return (c.lane, c.device, campaign, c.family, c.slots, c.pool, c.rows, c.cols, c.warps, c.mode, c.scope)

    floors = {shape(c, c.campaign): c for c in found if c.campaign in FLOOR_OF.values()}
    result = []
    for c in found:
        floor = floors.get(shape(c, FLOOR_OF[Campaign(c.campaign)])) if c.campaign in FLOOR_OF else None
        result.append(_beside(c, floor) if floor else c)
    return result


def _beside(c: Comparison, floor: Comparison) -> Comparison:
    clear = None
    if c.low is not None and c.high is not None and floor.low is not None and floor.high is not None:
        clear = c.low > floor.high or c.high < floor.low
    return replace(c, floor_change=floor.change, floor_low=floor.low, floor_high=floor.high, clear_of_floor=clear)


def write(
    out: Path, folders: Sequence[Path], protocol: Protocol, *, minimum_effect: float, inputs: Sequence[Path]
) -> list[str]:
    """Write `statistics.json`, `ratios.parquet` and their manifest to `out`, from the records in `folders`.

    `inputs` holds the protocol's file. Returns what does not hold, one line each: counts that were not reached, records
    of another protocol, batches or comparisons that are not as it orders.
    """
    records = [record.read(folder) for folder in folders]
    pairs = paired(b for r in records for b in r.batches)
    found = comparisons(pairs, protocol, minimum_effect)
    devices = sorted({(r.run["device"]["lane"], r.run["device"]["device"]) for r in records})
    wrong = record.missing_counts(records, protocol.expected_per_device) + record.other_protocol(records, protocol)
    wrong += [line for r in records for line in conform.deviations(r, protocol)]
    told = {
        "protocol_sha256": protocol.digest(),
        "bootstrap": protocol.bootstrap.model_dump(),
        "minimum_effect": minimum_effect,
        "devices": [f"{lane}/{device}" for lane, device in devices],
        "comparisons": [asdict(c) for c in found],
    }
    path = out / "statistics.json"
    write_json(path, told)
    ratios = out / "ratios.parquet"
    with atomic_file(ratios) as tmp:
        pq.write_table(_ratios(pairs), tmp, compression="zstd")
    seal(
        out / "statistics.manifest.json",
        rule="statistics",
        outputs=[path, ratios],
        inputs=[*inputs, *(folder / name for folder in folders for name in record.FILES)],
        parameters={"minimum_effect": minimum_effect, "protocol_sha256": protocol.digest()},
        modules=[__name__],
    )
    return wrong


def _ratios(pairs: Iterable[Pairs]) -> pa.Table:
    rows = [
        dict(zip(_KEY, each.key, strict=True)) | {"repetition": repetition, "ratio": new / old}
        for each in pairs
        for repetition, new, old in zip(each.repetitions, each.candidate_us, each.baseline_us, strict=True)
    ]
    return pa.Table.from_pylist(rows)


def read(path: Path) -> list[Comparison]:
    """The comparisons of a `statistics.json`. Raises InputError if it is none."""
    return document.read(path, lambda c: Comparison(**c), "statistics")
