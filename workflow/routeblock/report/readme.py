# SPDX-License-Identifier: Apache-2.0
"""The figures of README.md, written from the tables of a study, so that no number there is typed by hand."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from tabulate import tabulate

from routeblock.errors import InputError
from routeblock.evidence.files import atomic_file

BEGIN, END = "<!-- figures: made by `routeblock workflow readme` -->", "<!-- end of figures -->"
DIFFER = "elements that differ"
_MODES = {"graph": "graph replay", "stream": "launched one by one"}
Rows = list[dict[str, str]]


def _read(folder: Path, name: str) -> Rows:
    path = folder / f"{name}.csv"
    try:
        with path.open(encoding="utf-8", newline="") as f:
            return list(csv.DictReader(f))
    except OSError as e:
        raise InputError(
            f"not readable: {e.strerror}", where=str(path), limit="the study's tables", way_out="run make study"
        ) from e


def _lanes(differences: Rows, relations: Rows) -> str:
    """One line a lane, point and plan source: relations by basis, and elements that differ between the histories."""
    places = list(dict.fromkeys((r["lane"], r["arithmetic"], r["point"], r["plan_source"]) for r in relations))
    rows = []
    for place in places:
        here = _at(place)
        mine = [r for r in relations if here(r)]
        row = [*place, *(_by_basis(mine, basis) for basis in ("computed", "observed", "by construction"))]
        for surface in ("w13", "final"):
            cells = (
                r
                for r in differences
                if here(r) and r["quantity"] == "elements that differ" and r["surface"] == surface
            )
            row.append(next(cells)["measured"])
        rows.append(row)
    headers = [
        "lane",
        "arithmetic",
        "launch",
        "plans",
        "on a twin",
        "on a GPU",
        "by construction",
        "W13 elements that differ",
        "final elements",
    ]
    return str(tabulate(rows, headers, tablefmt="github", disable_numparse=True))


def _by_basis(relations: Rows, basis: str) -> str:
    """What became of the relations on one basis; of too few or too many replicates, that they are exploratory."""
    found = [r["status"] for r in relations if r["basis"] == basis]
    if exploratory := [status.partition(":")[0] for status in found if status.startswith("exploratory")]:
        return exploratory[0]
    counts = [(found.count("holds"), "hold"), (found.count("fails"), "fail"), (found.count("not informative"), "n. i.")]
    return ", ".join(f"{n} {said}" for n, said in counts if n or (found and said != "n. i.")) or "-"


def _at(place: tuple[str, ...]) -> Callable[[dict[str, str]], bool]:
    return lambda r: (r["lane"], r["arithmetic"], r["point"], r["plan_source"]) == place


def _sentences(read: Callable[[str], Rows]) -> str:
    lines = [*_history(read("history"))]
    census = read("census")
    for r in census:
        if r["order"] == "native" and r["history"] == "both":
            of = {(c["order"], c["history"]): c for c in census if (c["lane"], c["point"]) == (r["lane"], r["point"])}
            shared = sum(int(of["native", h]["distinct_plans"]) for h in ("H0", "H1")) - int(r["distinct_plans"])
            made = of["canonical", "both"]["distinct_finals"]
            lines.append(
                f"- Census, {int(r['calls']):,} calls of vLLM's own alignment on one routing ({r['gpu']}, "
                f"`{r['point']}`, {r['processes']} processes, no test): {r['distinct_plans']} plans, {shared} of them "
                f"under both histories, and {r['distinct_finals']} final outputs. Canonical order, made once a process "
                f"on the host and so one plan by construction: {made}."
            )
    elements, differing = (sum(int(r[name]) for r in read("agreement")) for name in ("elements", "differing"))
    lines.append(
        f"- The twin recomputed {elements:,} elements recorded on H200s, over all processes, those that repeat one "
        f"another included; {differing} differ."
    )
    cost = read("alignment_cost")
    bound = [r for r in cost if (r["role"], r["mode"]) == ("bound", "graph")]
    for campaign, what in (
        ("operator", "The alignment itself, canonical against native"),
        ("layer", "The whole layer"),
    ):
        points = [r for r in bound if r["campaign"] == campaign]
        verdicts = sorted({r["verdict"] for r in points})
        lines.append(
            f"- {what} (H200, graph replay, {len(points)} sizes, M={points[0]['tokens']} to {points[-1]['tokens']}): "
            f"{', '.join(verdicts)}; ratios in table `alignment_cost`."
        )
    host = [float(r["ratio"]) for r in cost if (r["campaign"], r["role"], r["mode"]) == ("operator", "bound", "host")]
    lines.append(
        "- Enqueued from Python, without a graph, the canonical alignment as recorded took more host time than the "
        f"native call at {sum(x > 1 for x in host)} of {len(host)} sizes: where the host is the limit, a price. "
        "Its launches were packed after that record (docs/alignment.md)."
    )
    lines += _serving(read("serving"), read("serving_batch"), read("serving_layer"))
    lines.append(_fast_paths(read("peers"), read("batch_bits")))
    study_b = [*_few_slots(read("discovery")), *_counters(read("schedule_counters"), read("beyond_study"))]
    return "\n".join([*lines, "", _bands(read("confirmation"), read("beyond_study")), "", *study_b])


def _serving(served: Rows, alone: Rows, layer: Rows) -> Iterator[str]:
    """vLLM itself: what repeats, what does not, and what canonical order leaves."""
    native, canonical = ([r for r in served if r["alignment"] == name] for name in ("native", "canonical"))
    moving = [r for r in native if int(r["outputs"]) > 1]
    sizes, every = ({int(r["batch"]) for r in rows} for rows in (moving, native))
    others = [100 * float(r["other_tokens_mean"]) / int(r["batch"]) for r in moving]
    shares = f"{min(others):.0f} to {max(others):.0f}%" if others else "none"
    one, most = native[0], max(int(r["outputs"]) for r in canonical)
    said = f"each of {len(canonical)} conditions gave " + ("one output" if most == 1 else f"up to {most} outputs")
    yield (
        "- vLLM 0.24.0 itself, serving (H200, a generated model of random weights, greedy; eager, and CUDA graphs; "
        f"{one['repeats']} repeats of each batch in {one['processes']} processes). Unpatched, batches of "
        f"{_listed(sizes)} do not repeat: {shares} of completions have other tokens, on average. Batches of "
        f"{_listed(every - sizes)} repeat. With canonical alignment {said}."
    )
    largest = max(alone, key=lambda r: int(r["batch"]))
    yield (
        f"- What that leaves, canonical alignment on: served alone, {largest['other_tokens']} of {largest['batch']} "
        "completions have other tokens than in the batch."
    )
    orders = {r["arrivals"] for r in layer}
    yield (
        f"- The engine's first MoE layer under {len(orders)} injected orders of arrival, against the twin: "
        f"{sum(int(r['elements']) for r in layer):,} elements, {sum(int(r['differ']) for r in layer)} differ."
    )


def _listed(sizes: set[int]) -> str:
    return ", ".join(map(str, sorted(sizes))) or "no size"


def _bands(confirmed: Rows, beyond: Rows) -> str:
    """Study B's band32 against job-major, grouping charged: both kinds of shape, since they have two signs."""
    ratio = [r for r in beyond if (r["campaign"], r["schedule"]) == ("l2_ratio", "band32")]
    rows = [
        [kind, r["slots"], r["lane"], r["device"], _MODES[r["mode"]], _change(r)]
        for kind, found in (
            ("the study's", confirmed),
            ("a V100's ratio of weights to L2, with more columns; exploratory, no A/A floor", ratio),
        )
        for r in found
        if r["lane"].startswith("recorded") and r["scope"] == "inclusive"
    ]
    headers = ["shapes of study B", "slots", "lane", "device", "mode", "band32 against job-major, grouping charged"]
    return str(tabulate(rows, headers, tablefmt="github", disable_numparse=True))


def _history(rows: Rows) -> Iterator[str]:
    for r in (r for r in rows if r["outcome"] == "plan"):
        calls = int(r["calls"]) // int(r["pairs"])
        one = int(r["processes_with_one_h0"]) + int(r["processes_with_one_h1"])
        yield (
            f"- History and the native alignment ({r['gpu']}, one boot, one routing): {r['verdict']}, "
            f"p = {float(r['p']):.4f} by a permutation test whose unit is the process. {r['pairs']} processes a "
            f"history, {calls} calls each: {r['distinct_h0']} and {r['distinct_h1']} plans, {r['distinct_both']} in "
            f"common; {one} of {2 * int(r['pairs'])} processes gave one plan throughout. H1 is a composite treatment: "
            "what of it acts is not shown."
        )


def _where(r: dict[str, str]) -> str:
    return f"{r['lane']} {r['device']}, {_MODES[r['mode']]}"


def _change(r: dict[str, str]) -> str:
    change, low, high = (float(r[name]) for name in ("change_percent", "low_percent", "high_percent"))
    return f"{change:+.2f}% [{low:+.2f}, {high:+.2f}], {r['verdict']}"


def _few_slots(rows: Rows) -> Iterator[str]:
    """The sweep at the fewest slots, of independent jobs: a mode a line, for there the mode changes most."""
    mine = [
        r
        for r in rows
        if (r["schedule"], r["scope"], r["baseline"]) == ("band32", "inclusive", "job_major")
        and r["lane"].startswith("recorded")
        and r["change_percent"]
    ]
    few = min((int(r["slots"]) for r in mine), default=0)
    for mode in dict.fromkeys(r["mode"] for r in mine):
        here = [r for r in mine if (r["mode"], int(r["slots"])) == (mode, few)]
        changes = [float(r["change_percent"]) for r in here]
        lanes = ", ".join(dict.fromkeys(r["lane"] for r in here))
        yield (
            f"- Study B's sweep, band32 against job-major, {few} slots, {len(here)} rows of {lanes}, {_MODES[mode]}: "
            f"{min(changes):+.2f}% to {max(changes):+.2f}%."
        )


def _counters(rows: Rows, timed: Rows) -> Iterator[str]:
    for kind, said in (("study", "at the study's shapes"), ("l2_ratio", "at a V100's ratio")):
        mine = [r for r in rows if (r["kind"], r["schedule"]) == (kind, "band32")]
        read = ", ".join(f"{float(r['dram_read_mb']):.1f} MB at {r['slots']} slots" for r in mine)
        change = ", ".join(f"{float(r['dram_read_change_percent']):+.0f}%" for r in mine)
        if mine:
            yield f"- Counters {said}: a call of band32 reads {read} from DRAM ({change} against job-major)."
    for r in rows:
        fall, spent = float(r["dram_read_change_percent"]), float(r["time_change_percent"])
        if r["kind"] == "l2_ratio" and fall < 0 <= spent:
            at = ("l2_ratio", "inclusive", r["schedule"], r["slots"])
            names = ("campaign", "scope", "schedule", "slots")
            of = [t for t in timed if tuple(t[n] for n in names) == at and t["lane"] != "cpu"]
            yield (
                f"- Against it: {r['schedule']} at {r['slots']} slots read {fall:+.0f}%, and its one replay beside "
                f"the counters, which has no interval, took {spent:+.1f}%. Timed: "
                f"{'; '.join(f'{_where(t)}: {_change(t)}' for t in of)}."
            )


def _fast_paths(peers: Rows, bits: Rows) -> str:
    bound = [r for r in peers if r["reached"]]
    reached = sum(r["reached"] == "True" for r in bound)
    ratios, limits = ([float(r[name]) for r in bound] for name in ("ratio", "of_limit"))
    same = {r["side"] for r in bits} - {r["side"] for r in bits if r["same_as_alone"] != "True"}
    most = max(int(r["tokens"]) for r in bits)
    kept = "the same" if {"auto", "dp4a", "tensor"} <= same else "not the same"
    return (
        f"- Q6_K expert jobs by the fast paths (H200, inclusive, graph replay; llama.cpp by the host's clock): "
        f"{min(ratios):.2f} to {max(ratios):.2f} of the better of two peers at {reached} of {len(bound)} shapes; one "
        f"token's bits are {kept} in batches of 1 to {most} and on either path. Our kernel that reads the weights "
        "once, or a launch, whichever is longer, takes "
        f"{min(limits):.2f} to {max(limits):.2f} of their time."
    )


def figures(tables: Path) -> str:
    """The block of README.md, from the tables in a folder."""
    differences, relations = (_read(tables, name) for name in ("differences", "relations"))
    return f"{_lanes(differences, relations)}\n\n{_sentences(lambda name: _read(tables, name))}"


def update(readme: Path, tables: Path, *, check: bool) -> bool:
    """Write the block into a README between its marks, or only compare; returns whether it was the same already."""
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise InputError(
            "no place for figures", where=str(readme), limit=f"one {BEGIN} and one {END}", way_out="add them"
        )
    head, rest = text.split(BEGIN)
    wanted = f"{head}{BEGIN}\n\n{figures(tables)}\n\n{END}{rest.split(END)[1]}"
    if wanted != text and not check:
        with atomic_file(readme) as temporary:
            temporary.write_text(wanted, encoding="utf-8")
    return wanted == text
