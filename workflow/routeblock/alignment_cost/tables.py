# SPDX-License-Identifier: Apache-2.0
"""The cost's tables: canonical order against native at every point, and what was checked before and beside timing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from routeblock import tables
from routeblock.alignment_cost.protocol import Arm
from routeblock.alignment_cost.study import STUDY
from routeblock.declared import by_name, find
from routeblock.errors import InputError
from routeblock.tables import Column, Row, Share, Table, numbers
from routeblock.timing import edits_table as edited
from routeblock.timing import statistics
from routeblock.timing.estimate import paired_change
from routeblock.timing.protocol import Bootstrap
from routeblock.timing.record import Record, usable
from routeblock.timing.statistics import Comparison
from routeblock.timing.validation import must_agree

# Of a record without a protocol: seed and size are stated here.
_HOST_BOOTSTRAP = Bootstrap(seed=20261201, resamples=2000, confidence=0.95)
_GROUP = ("campaign", "experts", "top_k", "mode")
_EXACT = ("random", "edges", "larger", "refused", "repeated")
_SHAPE = ("campaign", "role", "experts", "top_k", "tokens", "block_size", "mode")


@dataclass(frozen=True)
class Evidence:
    """What tables are made from. edits: what became of the record's edited copies."""

    comparisons: Sequence[Comparison]
    found: Record
    edits: Sequence[Row] = ()
    host: Sequence[Row] = ()


def _ratio(change: float | None) -> float | None:
    return None if change is None else 1 + change


def cost(given: Evidence) -> list[Row]:
    """What does canonical alignment cost?

    Canonical alignment against native at every operating point and clock: times, ``ratio`` with interval, verdict,
    A/A floor, growth over the smallest M, ``torch.sort`` beside. *non-inferior*: the whole interval lies below 1
    plus the margin; *inferior*: above; *undecided*: neither. Clock ``host`` has no verdict. **Recorded** on an
    H200.
    """
    sorts = {_at(c): c for c in given.comparisons if c.arm == Arm.SORT}
    least: dict[tuple[Any, ...], Comparison] = {}
    rows = []
    for c in (c for c in given.comparisons if c.arm == Arm.CANONICAL):
        first = least.setdefault(tuple(getattr(c, n) for n in _GROUP), c)
        row: Row = {name: getattr(c, name) for name in (*_SHAPE, "variant", "n", "verdict", "target", "reached")}
        row |= {"native_us": c.baseline_us, "canonical_us": c.candidate_us, "margin_percent": 100 * (c.threshold or 0)}
        row |= {"ratio": _ratio(c.change), "low": _ratio(c.low), "high": _ratio(c.high)}
        row |= {"floor": _ratio(c.floor_change), "floor_low": _ratio(c.floor_low), "floor_high": _ratio(c.floor_high)}
        row |= {"native_growth": _growth(c.baseline_us, first.baseline_us)}
        row |= {"canonical_growth": _growth(c.candidate_us, first.candidate_us)}
        sort = sorts[_at(c)]
        row |= {"sort_ratio": _ratio(sort.change), "sort_low": _ratio(sort.low), "sort_high": _ratio(sort.high)}
        rows.append(row | {"sort_verdict": sort.verdict})
    return rows


def _at(c: Comparison) -> tuple[Any, ...]:
    return tuple(getattr(c, n) for n in _SHAPE)


def _growth(now: float | None, first: float | None) -> float | None:
    return None if now is None or first is None else now / first


def checks(given: Evidence) -> list[Row]:
    """Is canonical alignment exact, and what was checked beside its times?

    What was checked before and beside timing: bits against the CPU reference, refusals, repeated calls, sanitizer
    tools, batches, and whether the build has the rival full-K mode. **Recorded** on an H200; routings and plans are
    computed again here.
    """
    exact, run = given.found.documents["exactness"], given.found.run
    if lacks := [name for name in _EXACT if name not in exact]:
        raise InputError(
            f"no check of {lacks[0]}",
            where=str(given.found.folder / "exactness.json"),
            limit=f"all of {', '.join(_EXACT)} are needed, and a check ends where bits differ",
            way_out="record again: routeblock alignment record",
        )
    bits = "different" if exact["differs"] else "equal"
    used = ", ".join(f"{name} {n}" for name, n in exact["random"]["variants"].items())
    device, extension = run["device"], run["extension"]
    names = f"{device['architecture']}, driver {device['driver']}, CUDA {device['cuda']}, vLLM {extension['vllm']}, "
    names += f"extension {extension['sha256']}, kernels {run['cubin_sha256']}"
    rows = [
        _check("device", None, device["name"], names),
        _check("random routings", exact["random"]["routings"], bits, exact["differs"] or used),
        _check("edges of every variant", exact["edges"]["calls"], bits, exact["differs"]),
        *(_check("many routes", n, bits, f"{n} routes in one call") for n in exact["larger"]["routes"]),
    ]
    rows += [
        _check(f"repeated call, M={tokens}", r["calls"], f"{r['different']} different", r["fingerprint"])
        for tokens, r in sorted(exact["repeated"].items(), key=lambda item: int(item[0]))
    ]
    rows += [_check(f"refused: {what}", 1, "refused", line) for what, line in exact["refused"].items()]
    tools = given.found.documents["sanitizer"]["tools"]
    rows += [_check(t["tool"], None, t["outcome"], " / ".join(x.strip("= ") for x in t["lines"])) for t in tools]
    wrong = [f"{c['campaign']} E={c['experts']} k={c['top_k']} M={c['tokens']}" for c in run["checks"] if c["wrong"]]
    plans = sum(len(c["canonical_sha256"]) for c in run["checks"])
    rows.append(_check("plans at the timed points", plans, "different" if wrong else "equal", ", ".join(wrong)))
    outputs = [c["final_sha256"] for c in run["checks"] if "final_sha256" in c]
    same = sum(o[Arm.CANONICAL] == o[Arm.SORT] for o in outputs)
    rows.append(_check("layer outputs, canonical and sort", len(outputs), f"{same} equal", "bit for bit"))
    for kind, number in sorted(run["batches"].items()):
        campaign, clock, outcome = kind.split(" ")
        rows.append(_check(f"batches: {campaign} {clock}", number, outcome, ""))
    rival = run["extension"]["full_k"]
    rows.append(_check("full_k", None, "in the build" if rival["in_build"] else "not in the build", _read_from(rival)))
    return rows


def _read_from(rival: Row) -> str:
    return ", ".join(f"{what}: {'yes' if rival[what] else 'no'}" for what in ("argument", "variable"))


def mutations(given: Evidence) -> list[Row]:
    """Is an edited record of the cost refused, for the declared reason?

    Edits of the cost's record, declared beforehand with the reasons for which each is to be refused, tried on
    copies of the **recorded** evidence: which check refused each, for which reasons, and whether the unchanged copy
    was accepted. Digests are left aside, since a forger writes them anew.
    """
    return edited.table(given.edits)


def host(given: Evidence) -> list[Row]:
    """What does the host pay to enqueue one alignment, since its launches are packed?

    Host time of a call from Python, canonical over native: the operator on given buffers, and vLLM's wrapper with its
    allocations; native against itself beside. **Recorded** on an H200 by `bench/host_enqueue.py`, after the record of
    the cost; no protocol was committed for it, so it has no verdict.
    """
    rows = []
    for measured in given.host:
        times = {name: np.array(values) for name, values in measured["times_us"].items()}
        row: Row = {"scope": measured["scope"], "tokens": measured["tokens"], "n": times["native"].size}
        row |= {f"{name}_us": float(np.median(times[name])) for name in ("native", "canonical")}
        for prefix, side in (("", "canonical"), ("floor_", "native_again")):
            found = paired_change(times[side].tolist(), times["native"].tolist(), **_HOST_BOOTSTRAP.model_dump())
            row |= {f"{prefix}ratio": 1 + found.change, f"{prefix}low": 1 + found.low, f"{prefix}high": 1 + found.high}
        rows.append(row)
    return rows


def _check(check: str, cases: int | None, outcome: str, detail: str) -> Row:
    return {"check": check, "cases": cases, "outcome": outcome, "detail": detail}


TABLES = by_name(
    Table(
        "alignment_cost",
        cost,
        (
            Column("campaign"),
            Column("role"),
            *(Column(n, "count") for n in ("experts", "top_k", "tokens", "block_size")),
            Column("mode"),
            Column("variant"),
            Column("n", "count"),
            *numbers(("native_us", "canonical_us"), ".2f"),
            *numbers(("ratio", "low", "high"), ".4f"),
            *numbers(("margin_percent",), "g"),
            Column("verdict"),
            *numbers(("target",), "g"),
            Column("reached", "flag"),
            *numbers(("floor", "floor_low", "floor_high"), ".4f"),
            *numbers(("native_growth", "canonical_growth"), ".2f"),
            *numbers(("sort_ratio", "sort_low", "sort_high"), ".3f"),
            Column("sort_verdict"),
        ),
        "What canonical alignment costs",
        "Microseconds are of one call, medians. ratio: canonical to native, median over repetitions, with its "
        "bootstrap interval; verdict: the whole interval against the margin. floor: native against itself in the same "
        "place; by graph the two captures differ by more than the interval shows, so a ratio within the floor's "
        "distance from 1 says nothing. target: the largest ratio allowed, where the protocol binds. growth: time over "
        "that of the smallest M. graph: replay of one graph. stream: one by one into a full queue, the device's clock. "
        "host: the same calls on the host's clock, no verdict: here canonical calls cost more; that it is because they "
        "are enqueued from Python is an inference. margin_percent: fixed in advance for each campaign (operator: the "
        "alignment alone; layer: with both GEMMs). A shape is E experts and top-k k; a verdict of one says nothing of "
        "others.",
        share=Share((("role", "bound"), ("mode", "graph")), 32),
    ),
    Table(
        "alignment_checks",
        checks,
        (Column("check"), Column("cases", "count"), Column("outcome"), Column("detail")),
        "Canonical alignment: what was checked on the GPU",
        "equal: every bit of every buffer is the CPU reference's. Cases of many routes are routes. late: the host did "
        "not fill the queue in time; timed again. Sanitizer tools ran over all variants at hostile sizes. full_k: the "
        "batch-invariant mode of the packed GEMM, the rival cure.",
    ),
    Table(
        "host_enqueue",
        host,
        (
            Column("scope"),
            *(Column(n, "count") for n in ("tokens", "n")),
            *numbers(("native_us", "canonical_us"), ".2f"),
            *numbers(("ratio", "low", "high", "floor_ratio", "floor_low", "floor_high"), ".3f"),
        ),
        "Host time to enqueue one alignment",
        "Medians over n repetitions of 50 calls behind a kernel that keeps the GPU busy. ratio: canonical to native, "
        "median of the repetitions' ratios with its bootstrap interval; floor: native against itself. E=128, k=8.",
        share=Share(rows=28),
    ),
    Table(
        "alignment_mutations",
        mutations,
        edited.COLUMNS,
        "Edited copies of the record, and why each is refused",
        edited.NOTES,
    ),
)


def write(
    name: str,
    out: Path,
    statistics_file: Path,
    folder: Path,
    validation: Path,
    mutations_file: Path | None = None,
    host_file: Path | None = None,
) -> list[Path]:
    """Write the table `name` of `TABLES` to `out`, sealed by `{name}.manifest.json`.

    Raises InputError for an unknown name or inputs that are not what they should be.
    """
    table = find(name, TABLES, "table")
    must_agree(validation)
    edits = edited.read(mutations_file) if mutations_file else []
    timed: list[Row] = []
    if host_file:
        with usable(host_file):
            timed = json.loads(host_file.read_bytes())["rows"]
    given = Evidence(statistics.read(statistics_file), STUDY.read(folder), edits, timed)
    with usable(folder):
        rows = table.rows(given)
    inputs = [statistics_file, *(file for file in (mutations_file, host_file) if file), validation]
    return tables.write_sealed(out, table, rows, inputs=[*inputs, *(folder / f for f in STUDY.files)])
