# SPDX-License-Identifier: Apache-2.0
"""Comparisons with intervals and verdicts, from raw batches and the pairs that a study declares."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.files import atomic_file, write_json
from routeblock.evidence.manifest import seal
from routeblock.timing.batches import Row
from routeblock.timing.check import findings
from routeblock.timing.estimate import Change, paired_change
from routeblock.timing.plan import Key, Pair, Rule, Verdict
from routeblock.timing.protocol import Bootstrap
from routeblock.timing.record import Study, usable

STATISTICS, RATIOS = "statistics.json", "ratios.parquet"


@dataclass(frozen=True)
class Comparison:
    """A candidate against its baseline: microseconds a call, changes as fractions; None without enough pairs.

    columns: what the study calls it; they are read like attributes. n: pairs of accepted batches, of `planned`.
    floor_*: the same estimate of the baseline against itself, where it was measured; clear_of_floor: the two intervals
    lie apart. best: this baseline is the fastest of its contest; None as long as one of them lacks repetitions.
    reached: the target holds, where there is one.
    """

    columns: Mapping[str, Any]
    n: int
    planned: int
    verdict: str | None
    threshold: float | None
    target: float | None
    baseline_us: float | None = None
    candidate_us: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    floor_change: float | None = None
    floor_low: float | None = None
    floor_high: float | None = None
    clear_of_floor: bool | None = None
    best: bool | None = None
    reached: bool | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "columns" or name not in self.columns:
            raise AttributeError(name)
        return self.columns[name]

    def row(self) -> Row:
        """For JSON: the columns, then the numbers."""
        document = asdict(self)
        columns: Row = document.pop("columns")
        return columns | document


Times = dict[tuple[Key, str, str], dict[int, float]]
_NUMBERS = tuple(f.name for f in fields(Comparison) if f.name != "columns")


def accepted_times(rows: Iterable[Row], key: Sequence[str]) -> Times:
    """Accepted times a call by stage, clock and series. Raises InputError if a repetition was accepted twice."""
    found: Times = {}
    for row in rows:
        if row["accepted"]:
            place = (tuple(row[name] for name in key), row.get("clock", ""), row["series"])
            times = found.setdefault(place, {})
            if row["repetition"] in times:
                raise InputError(
                    f"repetition {row['repetition']} of {row['series']} was accepted twice",
                    where=" ".join(map(str, (*place[0], place[1]))).rstrip(),
                    limit="one accepted batch for a repetition, series and clock",
                    way_out="give each record once, as it was written",
                )
            times[row["repetition"]] = row["time_us"]
    return found


def _matched(pair: Pair, times: Times) -> tuple[list[int], list[float], list[float]]:
    """The repetitions in which both sides have a time, ascending, and the times of candidate and baseline."""
    new, old = (times.get((pair.stage, pair.clock, name), {}) for name in (pair.candidate, pair.baseline))
    common = sorted(new.keys() & old.keys())
    return common, [new[r] for r in common], [old[r] for r in common]


def comparisons(rows: Iterable[Row], key: Sequence[str], pairs: Sequence[Pair], draw: Bootstrap) -> list[Comparison]:
    """The comparison of every pair, in order; those without an accepted batch too."""
    times = accepted_times(rows, key)
    found = [_compare(pair, times, draw) for pair in pairs]
    places = {(p.stage, p.clock, p.candidate, p.baseline): c for p, c in zip(pairs, found, strict=True)}
    result = []
    for pair, compared in zip(pairs, found, strict=True):
        stage, candidate, baseline = pair.floor or ((), "", "")
        floor = places.get((stage, pair.clock, candidate, baseline))
        result.append(_beside(compared, floor, pair.rule) if floor else compared)
    return _contested(pairs, result)


def _compare(pair: Pair, times: Times, draw: Bootstrap) -> Comparison:
    common, new, old = _matched(pair, times)
    change = None
    if len(common) >= pair.estimate_from:
        change = paired_change(new, old, **draw.model_dump())
    verdict = judge(pair, change)
    compared = Comparison(pair.columns, len(common), pair.planned, verdict, pair.threshold, pair.target)
    if change is None:
        return compared
    numbers = asdict(change)
    named = {"baseline_us": numbers.pop("baseline"), "candidate_us": numbers.pop("candidate")}
    reached = None
    if pair.target is not None and pair.contest is None:
        reached = 1 + change.change <= pair.target
    return replace(compared, **numbers, **named, reached=reached)


def judge(pair: Pair, change: Change | None) -> str | None:
    """The verdict on a pair by its rule; None where the rule gives none."""
    enough = change is not None and change.n >= pair.verdict_from
    if pair.rule is Rule.NONE:
        return None
    if not enough or change is None:
        return str(Verdict.UNDECIDED if pair.rule is Rule.MARGIN else Verdict.INCOMPLETE)
    if pair.rule is Rule.BEST:
        return ""
    assert pair.threshold is not None
    below, above = (Verdict.NON_INFERIOR, Verdict.INFERIOR), (Verdict.FASTER, Verdict.SLOWER)
    if pair.rule is Rule.MARGIN:
        good, bad, words = change.high <= pair.threshold, change.low > pair.threshold, below
    else:
        good, bad, words = change.high <= -pair.threshold, change.low >= pair.threshold, above
    return str(words[0] if good else words[1] if bad else Verdict.UNDECIDED)


def _beside(compared: Comparison, floor: Comparison, rule: Rule) -> Comparison:
    (low, high), (least, most) = (compared.low, compared.high), (floor.low, floor.high)
    clear = None
    if rule is Rule.EFFECT and low is not None and high is not None and least is not None and most is not None:
        clear = low > most or high < least
    return replace(
        compared, floor_change=floor.change, floor_low=floor.low, floor_high=floor.high, clear_of_floor=clear
    )


def _contested(pairs: Sequence[Pair], found: list[Comparison]) -> list[Comparison]:
    """Name the best baseline of every contest in which none lacks its repetitions."""
    contests: dict[Key, list[int]] = {}
    for i, pair in enumerate(pairs):
        if pair.contest is not None:
            contests.setdefault(pair.contest, []).append(i)
    for mine in contests.values():
        medians = {i: us for i in mine if (us := found[i].baseline_us) is not None}
        if len(medians) < len(mine):
            continue
        best = min(mine, key=lambda i: medians[i])
        for i in mine:
            target, high = pairs[i].target, found[i].high
            reached = i == best and target is not None and high is not None and 1 + high <= target
            found[i] = replace(found[i], best=i == best, reached=reached if i == best and target is not None else None)
    return found


def write(
    out: Path,
    study: Study,
    folders: Sequence[Path],
    protocol_path: Path,
    *,
    rule: str,
    module: str = "",
    parameters: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write `statistics.json`, `ratios.parquet` and their manifest to `out`, from the records in `folders`.

    module: whose code made them, if not the study's and this one. Returns the findings of the protocol check and the
    comparisons with too few accepted batches, one line each.
    """
    protocol = study.load(protocol_path)
    rows: list[Row] = []
    pairs: list[Pair] = []
    wrong: list[str] = []
    for folder in folders:
        record = study.read(folder)
        with usable(folder):
            rows += study.table.rows(record.batches)
            pairs += study.pairs(protocol, record)
            wrong += [
                f"{folder}: {finding}" if len(folders) > 1 else str(finding)
                for finding in findings(study, record, protocol)
            ]
    with usable(folders[0]):  # a time of 0, say
        found = comparisons(rows, study.key, pairs, protocol.bootstrap)
    wrong += [
        f"{' '.join(map(str, c.columns.values()))}: {c.n} of {c.planned} repetitions, {c.verdict}"
        for c in found
        if c.verdict == Verdict.INCOMPLETE
    ]
    document = {"protocol_sha256": protocol.digest(), **(parameters or {}), "comparisons": [c.row() for c in found]}
    write_json(out / STATISTICS, document)
    with atomic_file(out / RATIOS) as tmp:
        pq.write_table(ratios(rows, study.key, pairs), tmp, compression="zstd")
    seal(
        out / "statistics.manifest.json",
        rule=rule,
        outputs=[out / STATISTICS, out / RATIOS],
        inputs=[protocol_path, *(folder / name for folder in folders for name in study.files)],
        parameters={"protocol_sha256": protocol.digest(), **(parameters or {})},
        modules=[module] if module else [study.module, __name__],
    )
    return wrong


def ratios(rows: Iterable[Row], key: Sequence[str], pairs: Iterable[Pair]) -> pa.Table:
    """Every paired ratio: the columns of its comparison, repetition, ratio."""
    times = accepted_times(rows, key)
    found = [
        {**pair.columns, "repetition": repetition, "ratio": new / old}
        for pair in pairs
        for repetition, new, old in zip(*_matched(pair, times), strict=True)
    ]
    return pa.Table.from_pylist(found)


def read(path: Path) -> list[Comparison]:
    """The comparisons of a `statistics.json`. Raises InputError if it is not one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))["comparisons"]
        return [
            Comparison(
                {name: value for name, value in row.items() if name not in _NUMBERS},
                **{name: row[name] for name in _NUMBERS},
            )
            for row in document
        ]
    except UNREADABLE as e:
        raise InputError(
            f"no statistics: {e}",
            where=str(path),
            limit="the statistics.json of a study's records is needed",
            way_out="run its statistics command on the record",
        ) from e
