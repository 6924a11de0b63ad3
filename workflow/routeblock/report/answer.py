# SPDX-License-Identifier: Apache-2.0
"""The answer: four questions, one sentence each, every clause chosen and filled from the rows of the tables.

A clause that the rows do not support is not said: a relation that fails is named, what a lane cannot tell is counted,
and what is missing is called missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from routeblock.errors import InputError
from routeblock.timing.plan import Verdict

Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]
Place = tuple[str, ...]


@dataclass(frozen=True)
class Cited:
    """A value in prose and the table that it was taken from."""

    text: str
    table: str


Part = str | Cited
Clause = list[Part]


@dataclass(frozen=True)
class Sentence:
    """A question and the one sentence that answers it from the tables."""

    question: str
    lead: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The sentence without its citations."""
        return self.lead + "".join(p if isinstance(p, str) else p.text for p in self.parts)


HOLDS, FAILS = "holds", "fails"
# The histories differ; a pair exchanged inside a block changes nothing; over a boundary it carries everything over.
MECHANISM = (1, 4, 5)
MODELLED, COMPUTED, OBSERVED, EXPLORATORY = "modelled", "computed", "observed", "exploratory"
STORED, SILENT = "stored", "not informative"
SHIFTED = "shifted"
COUNTED = ("w13", "final")
ORDERS = {"native": "of the native alignment", "canonical": "in canonical order"}
CAMPAIGNS = {"operator": "the alignment alone", "layer": "the whole layer"}
CPU = "cpu"
MODES = {"graph": "replayed from a graph", "stream": "launched one by one"}
FRESH = ("-fresh", "-stream")  # ends of lanes whose seeds no record had used


def answer(tables: Tables) -> tuple[Sentence, ...]:
    """The four sentences. Raises InputError where two tables contradict each other."""
    questions = (
        ("Does the block that a route lands in decide the bits, and of how many elements?", _mechanism(tables)),
        ("Does history shift what the native alignment gives?", _history(tables)),
        ("Can it be stopped, and what does that cost?", _cure(tables)),
        ("Does a grouped schedule pay, once the grouping is charged?", _schedule(tables)),
    )
    return tuple(Sentence(asked, lead, (*_joined(clauses), ".")) for asked, (lead, clauses) in questions)


def place(row: Row) -> Place:
    """Which study of study A a row belongs to: fixture, lane, launch, source of plans."""
    return tuple(str(row[name]) for name in ("fixture", "lane", "point", "plan_source"))


def kind(row: Row) -> str:
    """Modelled, computed or observed, without what more the arithmetic says."""
    return str(row["arithmetic"]).partition(",")[0]


def _joined(clauses: Iterable[Clause], sign: str = "; ") -> Iterator[Part]:
    for i, clause in enumerate(clauses):
        yield from ([sign] if i else [])
        yield from clause


def _span(values: Iterable[float], form: str = ",d", unit: str = "") -> str:
    """One value, or the least and the greatest."""
    ordered = sorted(values)
    low, high = f"{ordered[0]:{form}}{unit}", f"{ordered[-1]:{form}}{unit}"
    return low if low == high else f"{low} to {high}"


def _plural(span: str) -> str:
    return "" if span == "1" else "s"


# The mechanism


def _mechanism(tables: Tables) -> tuple[str, list[Clause]]:
    rows = tables.get("relations") or ()
    if not rows:
        return "These tables cannot tell: ", [["no study of the route block is among them"]]
    studies: dict[Place, list[Row]] = {}
    for r in rows:
        studies.setdefault(place(r), []).append(r)
    status = {key: {int(r["number"]): r["status"] for r in relations} for key, relations in studies.items()}
    against = [key for key in studies if FAILS in (status[key].get(n) for n in MECHANISM)]
    shown = [key for key in studies if all(status[key].get(n) == HOLDS for n in MECHANISM)]
    kinds = {key: kind(relations[0]) for key, relations in studies.items()}
    if against:
        lead = "Not everywhere: " if shown else "No: "
    elif not shown:
        lead = "These tables cannot tell: "
    else:
        where = "" if any(kinds[key] == OBSERVED for key in shown) else ", on the CPU twin"
        lead = (
            f"What is shown is the effect of injected plans{where}; placement is shown as the cause for these alone. "
            "Of these, yes: "
        )
    exchanged = [*_exchanged(kinds, shown), *_elements(tables, shown, list(studies))]
    clauses = [_drawn(studies), exchanged, *_captured(status), _relations(rows), *_read_back(tables)]
    return lead, [*clauses, _agreement(tables, OBSERVED in kinds.values())]


def _drawn(studies: Iterable[Place]) -> Clause:
    """In how many studies the plans are the fixture's own."""
    every = list(studies)
    number = Cited(f"{sum(key[3] == STORED for key in every)} of {len(every)}", "relations")
    return ["in ", number, " studies the plans were drawn by the fixture's author"]


def _captured(status: Mapping[Place, Mapping[int, str]]) -> list[Clause]:
    """What relations 1 and 5 say of injected plans that the alignment itself gave."""
    captured = [found for key, found in status.items() if key[3] != STORED]
    if not captured:
        return []
    differ, silent = (sum(f.get(n) == s for f in captured) for n, s in ((1, HOLDS), (5, SILENT)))
    number = [Cited(f"{n} of {len(captured)}", "relations") for n in (differ, silent)]
    one, five = (Cited(f"relation {n}", "relations") for n in (1, 5))
    return [
        ["with captured plans ", five, " (the exchange over a boundary) is not informative in ", number[1],
         " studies, and ", one, " (the histories differ) holds in ", number[0]]
    ]  # fmt: skip


def _exchanged(kinds: Mapping[Place, str], shown: Sequence[Place]) -> Clause:
    """In how many studies, lane by lane, the exchange did what the mechanism says."""
    lanes: list[Clause] = []
    for lane in dict.fromkeys(key[1] for key in kinds):
        mine = [key for key in kinds if key[1] == lane]
        said = " and ".join(dict.fromkeys(kinds[key] for key in mine))
        number = f"{len(set(mine) & set(shown))} of {len(mine)}"
        lanes.append([f"{lane} ", Cited(number, "relations"), f" {said}"])
    return [
        "two routes exchanged over a block boundary carried the layer to the other history's bits, and two exchanged "
        "inside a block changed none, in ",
        Cited(f"{len(shown)} of {len(kinds)}", "relations"),
        " studies (",
        *_joined(lanes, ", "),
        ")",
    ]


def _elements(tables: Tables, shown: Sequence[Place], studies: Sequence[Place]) -> Clause:
    """How many elements differ between the histories: where the mechanism shows, else in all studies."""
    rows = [r for r in tables.get("differences") or () if r["quantity"] == "elements that differ"]
    looked_at = shown or studies
    counts = {
        s: [int(r["measured_number"]) for r in rows if r["surface"] == s and place(r) in looked_at] for s in COUNTED
    }
    if any(len(found) != len(looked_at) for found in counts.values()):
        return [", with no count of elements that differ for some of them"]
    if shown and 0 in [n for found in counts.values() for n in found]:
        raise InputError(
            "no element differs where relation 1 is said to hold",
            where="tables relations and differences",
            limit="both are made from the same scores",
            way_out="run make verify, then make repair",
        )
    w13, final = (Cited(_span(counts[s]), "differences") for s in COUNTED)
    return [", where " if shown else ", and ", w13, " elements of W13 and ", final, " of the final output differ"]


def _relations(rows: Sequence[Row]) -> Clause:
    found = Counter(str(r["status"]) for r in rows)
    # What a modelled lane computes is called modelled.
    bases = Counter(kind(r) if r["basis"] == COMPUTED else str(r["basis"]) for r in rows if r["status"] == HOLDS)
    exploratory = sum(n for status, n in found.items() if status.startswith(EXPLORATORY))
    fails, unknown = found[FAILS], len(rows) - found[HOLDS] - found[FAILS] - exploratory
    failing = ", ".join(f"{r['number']} on {' '.join(place(r)[1:])}" for r in rows if r["status"] == FAILS)
    named: Clause = [" (", Cited(failing, "relations"), ")"] if failing else []
    uncounted: Clause = []
    if exploratory:
        uncounted = [", and ", Cited(str(exploratory), "relations"), " exploratory and not counted"]
    return [
        "of ",
        Cited(str(len(rows)), "relations"),
        " relations ",
        Cited(str(bases[MODELLED]), "relations"),
        " hold as modelled, ",
        Cited(str(bases[COMPUTED]), "relations"),
        " as computed, ",
        Cited(str(bases[OBSERVED]), "relations"),
        " as observed, ",
        Cited(str(bases["by construction"]), "relations"),
        " by construction alone, ",
        Cited(str(fails), "relations"),
        f" {'fails' if fails == 1 else 'fail'}",
        *named,
        " and ",
        Cited(str(unknown), "relations"),
        f" {'is' if unknown == 1 else 'are'} not informative",
        *uncounted,
    ]


def _read_back(tables: Tables) -> list[Clause]:
    """In how many studies the plan of the kernels is the one asked for and not one read back."""
    rows = tables.get("studies") or ()
    asked = [r for r in rows if int(r["plans_read_back"]) < int(r["runs"])]
    if not asked:
        return []
    number = Cited(f"{len(asked)} of {len(rows)}", "studies")
    return [["in ", number, " studies the plan is the one asked for, not one read back from the kernels"]]


def _agreement(tables: Tables, observed: bool) -> Clause:
    rows = tables.get("agreement") or ()
    if not rows:
        return ["the twin was not held against a GPU" if observed else "nothing of this was observed on a GPU"]
    elements, differing = (sum(int(r[name]) for r in rows) for name in ("elements", "differing"))
    if differing:
        number = Cited(f"{differing:,d} of {elements:,d}", "agreement")
        return ["the twin differs from the GPU in ", number, " elements, so it does not stand for it"]
    return ["the twin gives each of ", Cited(f"{elements:,d}", "agreement"), " elements from a GPU bit for bit"]


# History

_COMPOSITE: Clause = ["H1 is a composite treatment, and which part of it acts is not shown"]


def _history(tables: Tables) -> tuple[str, list[Clause]]:
    rows = [r for r in tables.get("history") or () if r["outcome"] == "plan"]
    if not rows:
        return "Not observed on a GPU here: ", [["no test of history is among these tables"]]
    shifted = all(r["verdict"] == SHIFTED for r in rows)
    lead = "Yes, on one machine and one routing: " if shifted else "Not shown: "
    return lead, [*(_shift(r) for r in rows), *(_repeats(r) for r in rows), *_conditions(tables), _COMPOSITE]


def _shift(row: Row) -> Clause:
    def cited(text: str) -> Cited:
        return Cited(text, "history")

    return [
        f"{row['gpu']}: plans under the two histories are ",
        cited(f"{float(row['statistic']):.2f}"),
        " apart in total variation, labels exchanged between neighbouring processes put them ",
        cited(f"{float(row['null_median']):.2f}"),
        " apart (",
        cited(f"p = {float(row['p']):.4f}"),
        ", alpha ",
        cited(f"{float(row['alpha']):g}"),
        ", fixed before), with ",
        cited(f"{row['distinct_h0']} and {row['distinct_h1']}"),
        " distinct plans and ",
        cited(str(row["distinct_both"])),
        " in common",
    ]


def _repeats(row: Row) -> Clause:
    same = sum(int(row[f"processes_with_one_{h}"]) for h in ("h0", "h1"))
    number = Cited(f"{same} of {2 * int(row['pairs'])}", "history")
    return ["the native alignment gave one plan throughout in ", number, " processes"]


def _conditions(tables: Tables) -> list[Clause]:
    rows = tables.get("repetition") or ()
    if not rows:
        return []
    repeats = [str(r["condition"]) for r in rows if r["repeats"]]
    number = Cited(f"{len(repeats)} of {len(rows)}", "repetition")
    return [["it repeated itself under ", number, " conditions that were looked at"]]


# The cure and its cost


def _cure(tables: Tables) -> tuple[str, list[Clause]]:
    census = [r for r in tables.get("census") or () if r["history"] == "both"]
    bound = [r for r in tables.get("alignment_cost") or () if r["role"] == "bound"]
    timed = [r for r in bound if r["mode"] == "graph"]
    finals = {order: [int(r["distinct_finals"]) for r in census if r["order"] == order] for order in ORDERS}
    if not all(finals.values()):
        lead = "Not observed on a GPU here: "
    elif max(finals["canonical"]) > 1:
        lead = "Canonical order does not stop it: "
    elif max(finals["native"]) == 1:
        lead = "There was nothing to stop: "
    elif not timed:
        lead = "Canonical order stops it, at a cost not measured here: "
    elif all(r["verdict"] == Verdict.NON_INFERIOR for r in timed):
        lead = "Canonical order stops it, within the margins fixed in advance: "
    else:
        lead = "Canonical order stops it, but not everywhere within the margins fixed in advance: "
    return lead, [_outputs(census), _cost(timed), *_host([r for r in bound if r["mode"] == "host"])]


def _outputs(census: Sequence[Row]) -> Clause:
    clauses: list[Clause] = []
    for order, said in ORDERS.items():
        rows = [r for r in census if r["order"] == order]
        if not rows:
            clauses.append([f"no call {said} was counted"])
            continue
        plans, finals = (_span(int(r[name]) for r in rows) for name in ("distinct_plans", "distinct_finals"))
        calls = f"{sum(int(r['calls']) for r in rows):,d}"
        points = len({str(r["point"]) for r in rows})
        where: Clause = [" at each of ", Cited(str(points), "census"), " launches"] if points > 1 else []
        gave: Clause = [
            Cited(calls, "census"),
            f" calls {said} gave ",
            Cited(plans, "census"),
            f" plan{_plural(plans)}{' (by construction)' if order == 'canonical' else ''} and ",
        ]
        clauses.append([*gave, Cited(finals, "census"), f" final output{_plural(finals)}", *where])
    gpus = ", ".join(dict.fromkeys(str(r["gpu"]) for r in census))
    where_counted: Clause = [f"on one routing ({gpus}) "] if gpus else []
    return [*where_counted, *_joined(clauses, ", and ")]


def _cost(timed: Sequence[Row]) -> Clause:
    clauses: list[Clause] = []
    for campaign, said in CAMPAIGNS.items():
        rows = [r for r in timed if r["campaign"] == campaign]
        ratios = [float(r["ratio"]) for r in rows if r["ratio"] is not None]
        if not ratios:
            clauses.append([f"{said} was not timed"])
            continue
        verdicts = Counter(str(r["verdict"]) for r in rows)
        counted = ", ".join(f"{verdict} at {n} of {len(rows)} sizes" for verdict, n in sorted(verdicts.items()))
        clauses.append([f"{said} is ", Cited(counted, "alignment_cost")])
    where: Clause = [", with the ratios in the table alone"] if any(r["ratio"] is not None for r in timed) else []
    return ["replayed from a graph, ", *_joined(clauses, ", and "), *where]


def _host(rows: Sequence[Row]) -> list[Clause]:
    ratios = [float(r["ratio"]) for r in rows if r["campaign"] == "operator" and r["ratio"] is not None]
    if not ratios:
        return []
    more = Cited(f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}", "alignment_cost")
    said = "enqueued from Python without a graph, the alignment as recorded took more host time than the native at "
    return [[said, more, " sizes"]]


# Study B


def _schedule(tables: Tables) -> tuple[str, list[Clause]]:
    rows = [r for r in tables.get("confirmation") or () if r["scope"] == "inclusive" and r["lane"] != CPU]
    if not rows:
        return "Not measured on a GPU here: ", [["no confirmation on a GPU is among these tables"]]
    verdicts = Counter(str(r["verdict"]) for r in rows)
    pairs = " and ".join(dict.fromkeys(f"{r['schedule']} against {r['baseline']}" for r in rows))
    # Records differ in device, seed and mode: each is counted for itself.
    records: dict[tuple[str, str], list[Row]] = {}
    for r in rows:
        records.setdefault((str(r["lane"]), str(r["mode"])), []).append(r)
    each = [_record(lane, mode, mine) for (lane, mode), mine in records.items()]
    clause: Clause = [f"{pairs} at the study's own shapes is ", *_joined(each, ", ")]
    noisy = sum(r["clear_of_floor"] is False for r in rows)
    floor: list[Clause] = [[Cited(str(noisy), "confirmation"), " of these not clear of the A/A floor"]] if noisy else []
    ratio = _ratio_rows(tables)
    faster = Counter(str(r["verdict"]) for r in ratio)[Verdict.FASTER]
    lead = _ALONE.get(_only(verdicts), "It depends: ")
    if faster and _only(verdicts) == Verdict.SLOWER:
        lead = "It depends on the shape: "
    said = [*floor, *_fresh(rows), *_told(rows), *_few_slots(tables), *_other_ratio(ratio, faster), *_counted(tables)]
    return lead, [clause, *said]


def _record(lane: str, mode: str, rows: Sequence[Row]) -> Clause:
    """The verdicts of one record, how it was timed and by how much times changed."""
    counts = Counter(str(r["verdict"]) for r in rows)
    told: list[Clause] = [[f"{v} in ", Cited(f"{n} of {len(rows)}", "confirmation")] for v, n in sorted(counts.items())]
    devices = " and ".join(dict.fromkeys(str(r["device"]) for r in rows))
    changes = [float(r["change_percent"]) for r in rows if r["change_percent"] is not None]
    span: Part = Cited(_span(changes, "+.2f", "%"), "confirmation") if changes else "no estimate of a change"
    return [*_joined(told, " and "), f" on {lane} {devices}, {MODES.get(mode, mode)} (", span, ")"]


def _few_slots(tables: Tables) -> list[Clause]:
    """At the fewest slots the mode changes more than the schedule does: each value with its own."""
    found: dict[tuple[str, str, str], list[float]] = {}
    wanted = ("band32", "inclusive", "job_major")
    rows = [
        (name, r)
        for name, campaigns in (("discovery", (None,)), ("beyond_study", ("stream",)))
        for r in tables.get(name) or ()
        if (r["schedule"], r["scope"], r.get("baseline")) == wanted
        and r["lane"] != CPU
        and r.get("campaign") in campaigns
        and r["change_percent"] is not None
    ]
    few = min((int(r["slots"]) for _, r in rows), default=0)
    for name, r in rows:
        if int(r["slots"]) == few:
            found.setdefault((str(r["mode"]), str(r["lane"]), name), []).append(float(r["change_percent"]))
    if len({mode for mode, *_ in found}) <= 1:
        return []
    each: list[Clause] = [
        [f"{MODES.get(mode, mode)} ", Cited(_span(changes, "+.2f", "%"), name), f" on {lane}"]
        for (mode, lane, name), changes in found.items()
    ]
    slots = Cited(str(few), rows[0][0])
    return [["at ", slots, " slots (independent jobs) the change depends on the mode: ", *_joined(each, ", ")]]


def _fresh(rows: Sequence[Row]) -> list[Clause]:
    """Which of the records are of data that no record used before."""
    lanes = list(dict.fromkeys(str(r["lane"]) for r in rows if str(r["lane"]).endswith(FRESH)))
    if not lanes:
        return [["none of it is on data that no record had used"]]
    return [[f"the seeds of {' and '.join(lanes)} had been used by no record"]]


def _ratio_rows(tables: Tables) -> list[Row]:
    return [
        r
        for r in tables.get("beyond_study") or ()
        if (r["campaign"], r["schedule"], r["scope"]) == ("l2_ratio", "band32", "inclusive") and r["lane"] != CPU
    ]


def _other_ratio(rows: Sequence[Row], faster: int) -> list[Clause]:
    changes = [float(r["change_percent"]) for r in rows if r["change_percent"] is not None]
    if not changes:
        return []
    number, span = (Cited(x, "beyond_study") for x in (f"{faster} of {len(rows)}", _span(changes, "+.2f", "%")))
    return [
        ["where the weights keep the ratio to L2 that they had on a V100, with more columns, it is faster in ", number,
         " cases, with changes of ", span, ", without an A/A floor"]
    ]  # fmt: skip


def _counted(tables: Tables) -> list[Clause]:
    """What the counters say of the two kinds of shape, and what they leave open."""
    rows = [r for r in tables.get("schedule_counters") or () if r["schedule"] == "band32"]
    if not rows:
        return [["no counter was read, so the cause is inferred"]]
    kinds = {kind: [r for r in rows if r["kind"] == kind] for kind in ("study", "l2_ratio")}
    reads = Cited(_span((float(r["dram_read_mb"]) for r in kinds["study"]), ".1f", " MB"), "schedule_counters")
    fall = [Cited(f"{float(r['dram_read_change_percent']):+.0f}%", "schedule_counters") for r in kinds["l2_ratio"]]
    slots = [Cited(str(r["slots"]), "schedule_counters") for r in kinds["l2_ratio"]]
    each: list[Clause] = [[change, " at ", n, " slots"] for change, n in zip(fall, slots, strict=True)]
    saved = [Cited(f"{float(r['dram_read_change_percent']):+.0f}%", "schedule_counters") for r in kinds["study"]]
    at: list[Clause] = [
        [change, " at ", Cited(str(r["slots"]), "schedule_counters"), " slots"]
        for change, r in zip(saved, kinds["study"], strict=True)
    ]
    return [
        ["counters: at the study's shapes a call of it reads ", reads, " from DRAM (", *_joined(at, ", "),
         " against the control); at the other ratio its DRAM reads change by ", *_joined(each, ", "),
         *_adverse(tables), ", so what makes it faster there was not isolated"]
    ]  # fmt: skip


def _adverse(tables: Tables) -> Clause:
    """Schedules that read less at the other ratio and whose own replay, one and without interval, was no faster."""
    timed = [
        r
        for r in tables.get("beyond_study") or ()
        if (r["campaign"], r["scope"]) == ("l2_ratio", "inclusive") and r["lane"] != CPU
    ]
    found: Clause = []
    for r in tables.get("schedule_counters") or ():
        read, spent = float(r["dram_read_change_percent"]), float(r["time_change_percent"])
        if r["kind"] != "l2_ratio" or read >= 0 or spent < 0:
            continue
        found += [
            f", yet {r['schedule']} at ",
            Cited(str(r["slots"]), "schedule_counters"),
            " slots took ",
            Cited(f"{spent:+.1f}%", "schedule_counters"),
            " in the one replay beside its counters, which has no interval, with ",
            Cited(f"{read:+.0f}%", "schedule_counters"),
            " reads",
        ]
        for x in (x for x in timed if (x["schedule"], int(x["slots"])) == (r["schedule"], int(r["slots"]))):
            change, low, high = (float(x[name]) for name in ("change_percent", "low_percent", "high_percent"))
            interval = Cited(f"{change:+.2f}% [{low:+.2f}, {high:+.2f}]", "beyond_study")
            found += [f", where {x['lane']} {x['device']} was timed at ", interval]
    return found


_ALONE = {
    Verdict.FASTER: "Yes, in these cases: ",
    Verdict.SLOWER: "No, not in these cases: ",
    Verdict.UNDECIDED: "Undecided: ",
    Verdict.INCOMPLETE: "Not answered: ",
}


def _only(found: Counter[str]) -> Any:
    return next(iter(found)) if len(found) == 1 else None


def _told(rows: Sequence[Row]) -> list[Clause]:
    """What was published, as it stands beside the measured values."""
    names = ("v100_gpu0_change", "v100_gpu1_change")
    beside = [r for r in rows if any(r.get(name) is not None for name in names)]
    told = [float(r[name]) for r in beside for name in names if r.get(name) is not None]
    if not told:
        return []
    ours = [float(r["change_percent"]) for r in beside if r["change_percent"] is not None]
    here: Clause = ["launched one by one, as the published study was timed, it is "] if ours else []
    here += [Cited(_span(ours, "+.2f", "%"), "confirmation"), ", and "] if ours else []
    return [[*here, "published for two V100s: ", Cited(_span(told, "+.2f", "%"), "confirmation")]]
