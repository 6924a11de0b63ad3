# SPDX-License-Identifier: Apache-2.0
"""The figures of README.md, written from the tables of a study, so that no number there is typed by hand."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from tabulate import tabulate

from routeblock.errors import InputError
from routeblock.evidence.files import atomic_file

BEGIN, END = "<!-- figures: made by `routeblock readme` -->", "<!-- end of figures -->"
DIFFER = "elements that differ"
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
        "computed",
        "observed",
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
    return ", ".join(f"{n} {said}" for n, said in counts if n or (found and said == "hold")) or "-"


def _at(place: tuple[str, ...]) -> Callable[[dict[str, str]], bool]:
    return lambda r: (r["lane"], r["arithmetic"], r["point"], r["plan_source"]) == place


def _sentences(census: Rows, agreement: Rows, cost: Rows, confirmation: Rows, peers: Rows, bits: Rows) -> str:
    lines = []
    for r in census:
        if r["order"] == "native" and r["history"] == "both":
            same = next(
                c for c in census if (c["point"], c["order"], c["history"]) == (r["point"], "canonical", "both")
            )
            lines.append(
                f"- {int(r['calls']):,} calls of vLLM's own alignment on one routing ({r['gpu']}, `{r['point']}`) gave"
                f" {r['distinct_plans']} plans and {r['distinct_finals']} final outputs; canonical order "
                f"{same['distinct_plans']} and {same['distinct_finals']}."
            )
    elements, differing = (sum(int(r[name]) for r in agreement) for name in ("elements", "differing"))
    lines.append(f"- The twin recomputed {elements:,} elements recorded on H200s; {differing} differ.")
    bound = [r for r in cost if (r["role"], r["mode"]) == ("bound", "graph")]
    for campaign, what in (("operator", "The alignment itself, canonical over native"), ("layer", "The whole layer")):
        points = [r for r in bound if r["campaign"] == campaign]
        ratios = [float(r["ratio"]) for r in points]
        verdicts = sorted({r["verdict"] for r in points})
        lines.append(
            f"- {what} (H200, graph replay, {len(points)} sizes, M={points[0]['tokens']} to {points[-1]['tokens']}): "
            f"{min(ratios):.2f} to {max(ratios):.2f} of the time; verdicts: {', '.join(verdicts)}."
        )
    host = [float(r["ratio"]) for r in cost if (r["campaign"], r["role"], r["mode"]) == ("operator", "bound", "host")]
    lines.append(
        f"- Enqueueing the canonical alignment from Python, without a graph: {min(host):.1f} to {max(host):.1f} of the "
        "native call's host time. Where the host is the limit, that is a price."
    )
    for r in confirmation:
        if r["lane"].startswith("recorded") and r["scope"] == "inclusive":
            change, low, high = (float(r[name]) for name in ("change_percent", "low_percent", "high_percent"))
            lines.append(
                f"- Study B, band32 against job-major, {r['slots']} slots, H200 {r['device']}: {change:+.2f}% "
                f"[{low:+.2f}, {high:+.2f}]: {r['verdict']}."
            )
    return "\n".join([*lines, _fast_paths(peers, bits)])


def _fast_paths(peers: Rows, bits: Rows) -> str:
    bound = [r for r in peers if r["reached"]]
    reached = sum(r["reached"] == "True" for r in bound)
    ratios, limits = ([float(r[name]) for r in bound] for name in ("ratio", "of_limit"))
    same = {r["side"] for r in bits} - {r["side"] for r in bits if r["same_as_alone"] != "True"}
    kept = "the same" if {"auto", "dp4a", "tensor"} <= same else "not the same"
    return (
        f"- Q6_K expert jobs by the fast paths (H200, graph replay, inclusive): {min(ratios):.2f} to {max(ratios):.2f} "
        f"of the best peer's time at {reached} of {len(bound)} shapes; a token's bits are {kept} in every batch and on "
        "either path. Reading the weights once, or launching, whichever is longer, takes "
        f"{min(limits):.2f} to {max(limits):.2f} of their time."
    )


def figures(tables: Path) -> str:
    """The block of README.md, from the tables in a folder."""
    differences, relations = (_read(tables, name) for name in ("differences", "relations"))
    names = ("census", "agreement", "alignment_cost", "confirmation", "peers", "batch_bits")
    return f"{_lanes(differences, relations)}\n\n{_sentences(*(_read(tables, name) for name in names))}"


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
