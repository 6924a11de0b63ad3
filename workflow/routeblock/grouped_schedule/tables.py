# SPDX-License-Identifier: Apache-2.0
"""Study B's tables: what was compared, timed and rejected on which device, and the changes beside published ones."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from routeblock import tables
from routeblock.cuda.telemetry import named_events
from routeblock.declared import by_name, find
from routeblock.errors import InputError
from routeblock.evidence.archive import CONTENTS
from routeblock.grouped_schedule import counters as counting
from routeblock.grouped_schedule.batches import Batch
from routeblock.grouped_schedule.campaigns import Campaign, Mode
from routeblock.grouped_schedule.schedules import Scope
from routeblock.grouped_schedule.study import STUDY
from routeblock.tables import Column, Row, Share, Table, numbers
from routeblock.timing import edits_table as edited
from routeblock.timing import statistics
from routeblock.timing.record import Record, usable
from routeblock.timing.statistics import Comparison
from routeblock.timing.validation import must_agree


@dataclass(frozen=True)
class Evidence:
    """What tables are made from; `sanitizers` are the contents of `sanitizer.json` files, `edits` what became of the
    edited copies of a record, `counters` what ncu counted."""

    comparisons: Sequence[Comparison]
    records: Sequence[Record]
    published: Row
    sanitizers: Sequence[Row] = ()
    edits: Sequence[Row] = ()
    counters: Row | None = None

    @property
    def batches(self) -> Iterable[Batch]:
        """Every batch, accepted or not."""
        return (b for r in self.records for b in r.batches)


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
    Column("clear_of_floor", "flag"),
)
_GPUS = (0, 1)
RECONSTRUCTED = "paired_incumbent"
_TIMES = ("control_us", "candidate_us")
_CHANGES = ("change", "low", "high")


def _published(parts: Iterable[str]) -> tuple[Column, ...]:
    return tuple(Column(f"v100_gpu{g}_{p}", "number", ".2f" if p in _TIMES else "+.2f") for g in _GPUS for p in parts)


def _estimate(c: Comparison) -> Row:
    row: Row = {name: getattr(c, name) for name in ("lane", "device", "family", "slots", "pool", "rows", "cols")}
    row |= {"warps": c.warps, "mode": c.mode, "scope": c.scope, "campaign": c.campaign}
    row |= {"schedule": c.arm, "baseline": c.baseline, "n": c.n, "verdict": c.verdict}
    row |= {"baseline_us": c.baseline_us, "candidate_us": c.candidate_us, "clear_of_floor": c.clear_of_floor}
    fractions: Row = {"change": c.change, "low": c.low, "high": c.high}
    fractions |= {"floor": c.floor_change, "floor_low": c.floor_low, "floor_high": c.floor_high}
    return row | {f"{k}_percent": None if v is None else 100 * v for k, v in fractions.items()}


def _of(comparisons: Iterable[Comparison], *campaigns: Campaign) -> list[Comparison]:
    return [c for c in comparisons if c.campaign in campaigns]


def _comparable(c: Comparison) -> bool:
    """Whether published values are of the same scope and mode: grouping charged, launched one by one."""
    return bool(c.scope == Scope.INCLUSIVE and c.mode == Mode.STREAM)


def confirmation(given: Evidence) -> list[Row]:
    """Does the schedule fixed in advance pay, once grouping is charged?

    The schedule fixed in advance against the control, in both scopes: times, change with interval, verdict, the A/A
    floor and, where launches were timed one by one as the source did, the published values (``v100_*``). *faster*,
    *slower*: the whole interval lies beyond the minimum effect; *undecided*: it does not. **Observed** on lane ``cpu``,
    **recorded** on ``recorded-h200`` and its further recordings, of which ``-fresh`` is on a seed that none had used.
    """
    told = {(p["gpu"], p["slots"], p["pool"]): p for p in given.published["confirmation"]}
    rows = []
    for c in _of(given.comparisons, Campaign.CONFIRMATION):
        row = _estimate(c)
        for gpu in _GPUS:
            if _comparable(c) and (p := told.get((gpu, c.slots, c.pool))):
                row |= {f"v100_gpu{gpu}_{part}": p[part] for part in (*_TIMES, *_CHANGES)}
        rows.append(row)
    return rows


def discovery(given: Evidence) -> list[Row]:
    """Which schedule pays at which shape?

    Every schedule at every shape in both scopes: times, change with interval, verdict and A/A floor; published
    changes of ``band32`` beside (``v100_*``) where launches were timed one by one. Verdicts as in table
    ``confirmation``; ``n`` below the protocol's repetitions gives no estimate. **Observed** on lane ``cpu``,
    **recorded** on ``recorded-h200``.
    """
    told = {(p["family"], p["slots"], p["pool"]): p["change"] for p in given.published["discovery_band32_inclusive"]}
    rows = []
    for c in _of(given.comparisons, Campaign.SWEEP):
        row = _estimate(c)
        if c.baseline == RECONSTRUCTED:
            row["note"] = "against a reconstruction that plain job_major beats: no evidence of the published regression"
        if c.arm == "band32" and _comparable(c) and (p := told.get((c.family, c.slots, c.pool))):
            row |= {f"v100_gpu{gpu}_change": p[gpu] for gpu in _GPUS}
        rows.append(row)
    return rows


def beyond(given: Evidence) -> list[Row]:
    """What about a cold L2, other warps, single launches and the A/A floors?

    What the source did not publish: the serial prototype, shapes that keep a V100's ratio of weights to L2, a cold
    L2, other numbers of warps, single launches, and the A/A floors themselves. Verdicts as in table
    ``confirmation``. **Observed** on lane ``cpu``, **recorded** on ``recorded-h200``.
    """
    published = (Campaign.SWEEP, Campaign.CONFIRMATION)
    return [_estimate(c) for c in given.comparisons if c.campaign not in published]


def schedule_counters(given: Evidence) -> list[Row]:
    """What does a call of each schedule read, where weights fit in L2 and where they do not?

    What a call of study B's schedules reads and waits for, beside ``job_major`` on the same shape. **Recorded** on one
    H200 by ncu; the schedules' outputs have the bits of the timed records: others are refused with an InputError.
    """
    document = given.counters
    if document is None:
        return []
    known = {
        (c["slots"], c["pool"], c["rows"], c["cols"]): c["sha256"]
        for r in given.records
        for c in r.documents["comparisons"]
        if c["family"] == "independent" and c["campaign"] in (Campaign.SWEEP, Campaign.L2_RATIO) and c["holds"]
    }
    control: dict[tuple[str, int], Row] = {}
    rows = []
    for told in document["rows"]:
        shape = tuple(told[name] for name in ("slots", "pool", "rows", "cols"))
        if known.get(shape) != told["sha256"]:
            raise InputError(
                f"{told['arm']} at {shape} wrote bits that no record of study B holds",
                where="counters.json",
                limit="what is counted is the work that is timed",
                way_out="count again (routeblock study-b record-counters)",
            )
        base = control.setdefault((told["kind"], told["slots"]), told)
        calls = document["calls"]
        row = {name: told[name] for name in ("kind", "slots", "pool", "cols")} | {"schedule": told["arm"]}
        row |= {f"{name}_mb": told[f"{name}_bytes"] / calls / 1e6 for name in ("dram_read", "l2")}
        row |= {name: told[name] for name in ("l2_hit_percent", "issue_percent", "dram_percent", "l2_percent")}
        row |= {"instructions_m": told["instructions"] / calls / 1e6, "replay_us": told["replay_us"]}
        row |= {
            f"{name}_change_percent": 100 * (told[key] / base[key] - 1)
            for name, key in (("time", "replay_us"), ("dram_read", "dram_read_bytes"))
        }
        rows.append(row)
    return rows


def cardinalities(given: Evidence) -> list[Row]:
    """How many distinct experts, jobs and bytes does each fixture have?

    Each fixture of study B once: slots, active jobs, sentinels, distinct experts, weight bytes, and the digests of
    its parts. A pool bound is not a number of distinct experts. **Computed** from the seeds of the protocol.
    """
    seen: dict[str, Row] = {}
    for fixture in (f for r in given.records for f in r.documents["fixtures"]):
        row = {k: v for k, v in fixture.items() if k not in ("ids", "sha256")}
        row |= {f"sha256_{k}": v for k, v in fixture["sha256"].items()}
        seen.setdefault(json.dumps(row, sort_keys=True), row)
    return list(seen.values())


def positions(given: Evidence) -> list[Row]:
    """How often did each series run at each position?

    How often each series ran at each position of a repetition and in each direction, over accepted batches.
    Rotation and reversal are not fully balanced. **Observed** on lane ``cpu``, **recorded** on ``recorded-h200``.
    """
    counts: dict[tuple[str, ...], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for b in given.batches:
        if b.accepted and b.campaign in (Campaign.SWEEP, Campaign.CONFIRMATION):
            key = (b.lane, b.device, b.campaign, b.family, b.series)
            counts[key][f"position_{b.position}"] += 1
            counts[key][b.direction] += 1
    names = ("lane", "device", "campaign", "family", "series")
    return [dict(zip(names, key, strict=True)) | dict(found) for key, found in sorted(counts.items())]


def counts(given: Evidence) -> list[Row]:
    """How many outputs were compared and how many batches timed?

    Outputs held bit for bit against the control's (``equal``, ``different``) and batches timed (``accepted``,
    ``rejected``), by device and campaign; totals only where several devices ran, published ones beside.
    **Observed** on lane ``cpu``, **recorded** on ``recorded-h200``.
    """
    found: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    launched: dict[tuple[str, str], Row] = {}
    for b in given.batches:
        found[b.lane, b.device, b.campaign]["accepted" if b.accepted else "rejected"] += 1
        launched[b.lane, b.campaign] = {
            "launches": b.launches,
            "warmups": b.warmups,
            "scopes_a_launch": len(Scope) if b.mode == Mode.CALL else 1,
        }
    for c in (c for r in given.records for c in r.documents["comparisons"]):
        found[c["lane"], c["device"], c["campaign"]]["equal" if c["holds"] else "different"] += 1
    names = ("equal", "different", "accepted", "rejected")

    def row(lane: str, device: str, campaign: str, n: Counter[str]) -> Row:
        where = {"lane": lane, "device": device, "campaign": campaign} | {name: n[name] for name in names}
        return where | launched.get((lane, campaign), {})

    rows = [row(*key, n) for key, n in found.items()]
    for lane in dict.fromkeys(lane for lane, _, _ in found):
        devices = sorted({d for on, d, _ in found if on == lane})
        for campaign in dict.fromkeys(c for on, _, c in found if on == lane and len(devices) > 1):
            total = sum((found[lane, d, campaign] for d in devices), Counter[str]())
            rows.append(row(lane, " + ".join(devices), campaign, total))
            if len(devices) == given.published["counts"]["devices"]:
                for what in ("comparisons", "batches"):
                    rows[-1][f"published_{what}"] = given.published["counts"].get(f"{campaign}_{what}")
    return rows


def rejections(given: Evidence) -> list[Row]:
    """Which batches were rejected, and why?

    Where batches were rejected and why: the reason, clock events by name, clocks beside those of accepted batches.
    Only rules of the committed protocol reject; rejected batches stay in the raw data. **Observed** on lane
    ``cpu``, **recorded** on ``recorded-h200``.
    """
    names = ("lane", "device", "campaign", "family", "slots", "pool", "cols", "mode")
    groups: dict[tuple[Any, ...], list[Batch]] = defaultdict(list)
    for b in given.batches:
        groups[tuple(getattr(b, name) for name in names)].append(b)
    rows = []
    for key, mine in groups.items():
        accepted = [b for b in mine if b.accepted]
        for reason in sorted({b.reason for b in mine if b.reason}):
            out = [b for b in mine if b.reason == reason]
            row = dict(zip(names, key, strict=True)) | {"reason": reason, "rejected": len(out)}
            row["accepted"] = len(accepted)
            row["clock_events"] = "; ".join(sorted({named_events(b.clock_events) for b in out}))
            row["rejected_sm_mhz"] = median(b.sm_clock_mhz for b in out)
            row["rejected_lowest_sm_mhz"] = min(b.sm_clock_mhz for b in out)
            row["accepted_sm_mhz"] = median(b.sm_clock_mhz for b in accepted) if accepted else None
            row["accepted_lowest_sm_mhz"] = min((b.sm_clock_mhz for b in accepted), default=None)
            rows.append(row)
    return rows


def devices(given: Evidence) -> list[Row]:
    """What was measured on which device, for how long, in how much memory?

    What each record of study B was measured on, how long it took and what memory it needed. Empty: not recorded, or
    a CPU. **Observed** on lane ``cpu``, **recorded** on ``recorded-h200``.
    """
    rows = []
    for r in given.records:
        told, used = r.run["device"], r.run.get("telemetry", {})
        row = {name: told.get(name) for name in ("lane", "device", "name", "architecture", "driver", "threads")}
        row |= {"campaigns": ", ".join(dict.fromkeys(b.campaign for b in r.batches))}
        row |= {"cubin_sha256": told.get("cubin_sha256"), "protocol_sha256": r.run["protocol_sha256"]}
        row |= {name: used.get(name) for name in ("seconds", "cpu_seconds", "load_before")}
        for place in ("host", "device"):
            size = used.get(f"{place}_peak_bytes")
            row[f"{place}_peak_mib"] = None if size is None else size / 2**20
        rows.append(row)
    return rows


def sanitizer(given: Evidence) -> list[Row]:
    """What did compute-sanitizer find?

    What compute-sanitizer said of each binary of study B over hostile jobs. *clean*: the tool ran and reported
    nothing. *refused*: the machine does not let the tool run, which proves nothing. **Recorded** on the GPUs named.
    """
    return [
        {"device": told["device"], "cubin_sha256": told["cubin_sha256"]}
        | {name: report[name] for name in ("tool", "outcome", "exit_code")}
        | {"lines": " / ".join(line.strip("= ") for line in report["lines"])}
        for told in given.sanitizers
        for report in told["tools"]
    ]


def mutations(given: Evidence) -> list[Row]:
    """Is an edited record of study B refused, for the declared reason?

    Edits of a record of study B, declared beforehand with the reasons for which each is to be refused, tried on
    copies of the **recorded** evidence: which check refused each, for which reasons, and whether the unchanged copy
    was accepted. Digests are left aside, since a forger writes them anew.
    """
    return edited.table(given.edits)


_SCHEDULE = (Column("mode"), Column("scope"), Column("schedule"), Column("baseline"))
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
_FLOOR_NOTE = (
    "Verdict: faster or slower where the whole interval lies beyond the minimum effect of config.yaml, else undecided, "
    "also where all of it lies within. Floor: the baseline against itself, timed the same way; where an interval is "
    "not clear of it, a verdict is no more than this noise. n: pairs of accepted batches; with fewer than the "
    "protocol's repetitions there is no estimate."
)
_INCUMBENT_NOTE = (
    " paired_incumbent is our reconstruction (the original is not public): changes against it are no test of the "
    "published paired ones."
)
_CPU_NOTE = " Lane cpu: real times of this CPU; they say nothing of a GPU."

TABLES = by_name(
    Table(
        "confirmation",
        confirmation,
        (*_WHERE, *_SHAPE, *_SCHEDULE, *_ESTIMATE, *_published((*_TIMES, *_CHANGES))),
        "Confirmation: the schedule fixed in advance against the control",
        _SCOPES_NOTE + _FLOOR_NOTE + _CPU_NOTE,
        share=Share((("scope", "inclusive"),), 12),
    ),
    Table(
        "discovery",
        discovery,
        (*_WHERE, *_SHAPE, *_SCHEDULE, *_ESTIMATE, *_published(("change",)), Column("note")),
        "Discovery: every schedule at every shape",
        _SCOPES_NOTE + _FLOOR_NOTE + _INCUMBENT_NOTE + _CPU_NOTE,
        share=Share((("schedule", "band32"), ("scope", "inclusive")), 40),
    ),
    Table(
        "beyond_study",
        beyond,
        (
            *_WHERE,
            Column("campaign"),
            *_SHAPE,
            *(Column(n, "count") for n in ("rows", "cols", "warps")),
            *_SCHEDULE,
            *_ESTIMATE,
        ),
        "Beyond the published study",
        "The serial prototype, shapes that keep a V100's ratio of weights to L2, a cold L2, other numbers of warps in "
        "a block, launches one by one, and the A/A floors themselves. Launched one by one, short kernels show the "
        f"host. Only sweep, prototype and confirmation have a floor: elsewhere its columns are empty. {_FLOOR_NOTE}"
        + _CPU_NOTE,
    ),
    Table(
        "schedule_counters",
        schedule_counters,
        (
            Column("kind"),
            *(Column(n, "count") for n in ("slots", "pool", "cols")),
            Column("schedule"),
            *numbers(("dram_read_mb", "dram_read_change_percent", "l2_mb"), ".1f"),
            *numbers(("l2_hit_percent", "issue_percent", "dram_percent", "l2_percent"), ".1f"),
            *numbers(("instructions_m", "replay_us"), ".1f"),
            *numbers(("time_change_percent",), "+.1f"),
        ),
        "Counters: what a call of each schedule reads, at both kinds of shape",
        "By ncu on one H200, of the products alone, over an order made before; a call is one of a graph's. kind study: "
        "weights fit in L2; l2_ratio: the columns keep a V100's ratio of weights to L2. Changes are against job_major "
        "on the same shape. replay_us: the same graph without the profiler, whose percentages are of its own, longer "
        "time; clocks were not checked. Every schedule wrote the bits that the timed records hold.",
    ),
    Table(
        "counts",
        counts,
        (
            *_WHERE,
            Column("campaign"),
            *(Column(n, "count") for n in ("equal", "different", "accepted", "rejected")),
            *(Column(n, "count") for n in ("launches", "warmups", "scopes_a_launch")),
            *(Column(f"published_{n}", "count") for n in ("comparisons", "batches")),
        ),
        "Counts: outputs compared and batches timed",
        "equal, different: outputs held bit for bit against the control's, and checked rows against the CPU. accepted, "
        "rejected: batches. launches, warmups: of one batch. Lane cpu launches once after one warm-up a shape, and one "
        "launch is clocked for both scopes; a GPU launches 16 times after three warm-ups, anew for each scope. Totals "
        "stand only where several devices ran; published ones are of two V100s.",
    ),
    Table(
        "rejections",
        rejections,
        (
            *_WHERE,
            Column("campaign"),
            *_SHAPE,
            Column("cols", "count"),
            Column("mode"),
            Column("reason"),
            Column("clock_events"),
            Column("rejected", "count"),
            Column("accepted", "count"),
            Column("rejected_sm_mhz", "number", ".0f"),
            Column("rejected_lowest_sm_mhz", "number", ".0f"),
            Column("accepted_sm_mhz", "number", ".0f"),
            Column("accepted_lowest_sm_mhz", "number", ".0f"),
        ),
        "Rejected batches and why",
        "Every attempt counts; shapes without a rejected batch are left out. A clock event is what NVML reported just "
        "before or after a batch; clocks were read after the batch, medians and lowest. NVML may report no event while "
        "a clock is still low: such a batch is accepted. Rejected batches stay in the raw data.",
    ),
    Table(
        "positions",
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
    Table(
        "cardinalities",
        cardinalities,
        (
            *_SHAPE,
            *(Column(n, "count") for n in _FIXTURE_COUNTS),
            *(Column(f"sha256_{n}") for n in ("ids", "activations", "weights", "check_rows")),
        ),
        "Fixtures: recorded cardinalities and digests",
        "A pool bound is not a number of distinct experts. Sentinels have no work.",
    ),
    Table(
        "devices",
        devices,
        (
            *_WHERE,
            Column("campaigns"),
            Column("name"),
            Column("architecture"),
            Column("driver"),
            Column("threads", "count"),
            Column("seconds", "number", ".1f"),
            Column("cpu_seconds", "number", ".1f"),
            Column("load_before", "number", ".1f"),
            Column("host_peak_mib", "number", ".0f"),
            Column("device_peak_mib", "number", ".0f"),
            Column("cubin_sha256"),
            Column("protocol_sha256"),
        ),
        "Devices: what was measured where, its time and memory",
        "Seconds run from the first fixture to the last batch, rests before retries included. load_before: processes "
        "that ran on the host in the minute before; with other work there, times of lane cpu say little. Host memory: "
        "the process's peak. Device memory: the most in use on the whole device at the end of a stage, CUDA's context "
        "included. Empty: not recorded, or a CPU.",
    ),
    Table(
        "sanitizer",
        sanitizer,
        (
            Column("device"),
            Column("cubin_sha256"),
            Column("tool"),
            Column("outcome"),
            Column("exit_code", "count"),
            Column("lines"),
        ),
        "compute-sanitizer over hostile jobs",
        "clean: the tool ran and reported nothing. Every kernel ran ids beyond the pool, negative ids, no active job, "
        "rows that no band divides and an odd number of column blocks, with 1 to 8 warps; differences are outputs that "
        "are not the CPU's bits. "
        "refused: the machine does not let the tool run, which proves nothing. No row: no GPU is among the lanes.",
    ),
    Table(
        "grouped_mutations",
        mutations,
        edited.COLUMNS,
        "Edited copies of a record of study B, and why each is refused",
        edited.NOTES,
    ),
)


def write(
    name: str,
    out: Path,
    statistics_file: Path,
    folders: Sequence[Path],
    published: Path,
    validation: Path,
    *,
    sanitizers: Sequence[Path] = (),
    mutations_file: Path | None = None,
    others: Sequence[Path] = (),
    counters: Path | None = None,
) -> list[Path]:
    """Write the table `name` of `TABLES` to `out`, sealed by `{name}.manifest.json`.

    Raises InputError for an unknown name or inputs that are not what they should be.
    """
    table = find(name, TABLES, "table")
    judged = [(statistics_file, validation)]
    judged += [(made, made.parents[1] / "validation" / "validation.json") for made in others]
    for _, found in judged:
        must_agree(found)
    folders = [*folders, *(run.parent for made in others for run in sorted(made.parents[1].glob("gpu*/*/run.json")))]
    records = [STUDY.read(folder) for folder in folders]
    told = json.loads(published.read_text(encoding="utf-8"))
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sanitizers]
    edits = edited.read(mutations_file) if mutations_file else []
    comparisons = [c for made, _ in judged for c in statistics.read(made)]
    counted = counting.read(counters) if counters else None
    given = Evidence(comparisons, records, told, reports, edits, counted)
    with usable(folders[0] if folders else statistics_file):
        rows = table.rows(given)
    has_published = any(key.startswith("v100") for row in rows for key in row)
    note = f" v100_*: {told['source']}; *_us in microseconds, the others in percent." if has_published else ""
    inputs = [
        *(*(path for pair in judged for path in pair), published, *sanitizers),
        *([mutations_file] if mutations_file else []),
        *([counters / counting.RUN, counters / CONTENTS] if counters else []),
        *(folder / f for folder in folders for f in STUDY.files),
    ]
    return tables.write_sealed(out, table, rows, inputs=inputs, note=note)
