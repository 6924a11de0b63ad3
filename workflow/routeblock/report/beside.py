# SPDX-License-Identifier: Apache-2.0
"""Published beside measured: the rows of several tables, turned so that one line is one published number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from routeblock.report.answer import Tables, kind, place
from routeblock.report.catalogue import tone
from routeblock.report.table_view import Cell, Heading, shown

Row = Mapping[str, Any]
GPUS = (0, 1)


@dataclass(frozen=True)
class Comparison:
    """A small table with a published column: where its values are from, and what a reader must know."""

    anchor: str
    title: str
    note: str
    source: str
    headings: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]


def comparisons(tables: Tables) -> list[Comparison]:
    """Every comparison that the tables allow, in the order of the report."""
    made = (_geometry(tables), _differences(tables), _confirmation(tables), _discovery(tables), _counts(tables))
    return [c for c in made if c.rows]


def _headings(*names: str, numbers: Iterable[str] = ()) -> tuple[Heading, ...]:
    return tuple(Heading(name, name in numbers, False) for name in names)


def _geometry(tables: Tables) -> Comparison:
    rows = tables.get("geometry") or ()
    found = Counter((str(r["fixture"]), str(r["status"])) for r in rows)
    lines = [
        (Cell(fixture), Cell(status, tone=tone("status", status)), Cell(str(n)))
        for (fixture, status), n in found.items()
    ]
    return Comparison(
        "geometry",
        "Geometry of study A",
        "Facts of the published fixture, found by code on ours. Facts not published are this fixture's own choices.",
        "geometry",
        _headings("fixture", "how it compares", "facts", numbers=("facts",)),
        tuple(lines),
    )


def _differences(tables: Tables) -> Comparison:
    rows = tables.get("differences") or ()
    studies = list(dict.fromkeys(place(r) for r in rows))
    fixtures = {key[0] for key in studies}
    kinds = {place(r): kind(r) for r in rows}
    lines: dict[tuple[str, ...], dict[tuple[str, ...], Row]] = {}
    for r in rows:
        # A digest is of one arm; the other quantities are of the histories, whichever cell stands for them.
        arm = str(r["arms"] or "") if r["quantity"] == "SHA-256" else ""
        lines.setdefault((str(r["quantity"]), str(r["surface"] or ""), arm, str(r["published"])), {})[place(r)] = r
    made = []
    for (quantity, surface, arm, published), by_study in lines.items():
        said = Counter(str(r["comparison"]) for r in by_study.values())
        cells = [Cell(" ".join(filter(None, (quantity, arm)))), Cell(surface), shown(published)]
        for key in studies:
            measured = shown(by_study[key]["measured"]) if key in by_study else Cell("")
            word = str(by_study[key]["comparison"]) if key in by_study and len(said) > 1 else ""
            cells.append(Cell(measured.text, measured.whole, tone("comparison", word)))
        alike = next(iter(said)) if len(said) == 1 else ", ".join(f"{word}: {n}" for word, n in said.items())
        made.append((*cells, Cell(alike, tone=tone("comparison", alike))))
    names = [" ".join([*(key if len(fixtures) > 1 else key[1:]), f"({kinds[key]})"]) for key in studies]
    return Comparison(
        "differences",
        "Study A: bits",
        "Published on an RTX 3090 with a real checkpoint; ours is a synthetic layer of the same geometry unless the "
        "fixture is called checkpoint. Relations can hold on another fixture; counts and digests of another checkpoint "
        "cannot be compared.",
        "differences",
        _headings("quantity", "surface", "published", *names, "how it compares"),
        tuple(made),
    )


def _interval(row: Row, names: Sequence[str], verdict: str = "") -> Cell:
    change, low, high = (row.get(name) for name in names)
    if change is None:
        return Cell(verdict)
    text = f"{change:+.2f}%"
    text += "" if low is None or high is None else f" [{low:+.2f}, {high:+.2f}]"
    return Cell(f"{text} {verdict}".strip())


def _by_device(rows: Sequence[Row], keys: Sequence[str], published: Sequence[str]) -> tuple[list[str], list[Any]]:
    """One line a shape: the published columns of both V100s, then each device of ours."""
    devices = list(dict.fromkeys((str(r["lane"]), str(r["device"])) for r in rows))
    shapes: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = {}
    for r in rows:
        shapes.setdefault(tuple(r[k] for k in keys), {})[str(r["lane"]), str(r["device"])] = r
    lines = []
    for shape, found in shapes.items():
        told_of = [row for row in found.values() if row.get("v100_gpu0_change") is not None]
        some = next(iter(told_of or found.values()))
        told = [_interval(some, [f"v100_gpu{g}_{part}" for part in published]) for g in GPUS]
        own = [
            _interval(found[d], ("change_percent", "low_percent", "high_percent"), str(found[d]["verdict"]))
            if d in found
            else Cell("")
            for d in devices
        ]
        lines.append((*(Cell(str(v)) for v in shape), *told, *own))
    return [" ".join(d) for d in devices], lines


V100 = tuple(f"V100 GPU{g}, published" for g in GPUS)


def _confirmation(tables: Tables) -> Comparison:
    rows = [r for r in tables.get("confirmation") or () if r["scope"] == "inclusive"]
    devices, lines = _by_device(rows, ("slots", "pool"), ("change", "low", "high"))
    return Comparison(
        "confirmation",
        "Study B: confirmation, grouping charged",
        "Change of time of band32 against the control with its interval. Other GPUs, other sizes of cache, and our own "
        "dot product: the published sign need not return. Lane cpu says nothing of a GPU.",
        "confirmation",
        _headings("slots", "pool", *V100, *devices, numbers=("slots", "pool")),
        tuple(lines),
    )


def _discovery(tables: Tables) -> Comparison:
    rows = [r for r in tables.get("discovery") or () if (r["schedule"], r["scope"]) == ("band32", "inclusive")]
    devices, lines = _by_device(rows, ("family", "slots", "pool"), ("change",) * 1 + ("", ""))
    return Comparison(
        "discovery",
        "Study B: discovery, band32, grouping charged",
        "In the family paired the baseline is our reconstruction of an incumbent that is not public: those rows are no "
        "test of the published ones.",
        "discovery",
        _headings("family", "slots", "pool", *V100, *devices, numbers=("slots", "pool")),
        tuple(lines),
    )


def _counts(tables: Tables) -> Comparison:
    rows = [r for r in tables.get("counts") or () if r.get("published_batches") is not None]
    lines = [
        (
            Cell(f"{r['lane']} {r['device']}"),
            Cell(str(r["campaign"])),
            shown(r["published_comparisons"]),
            shown(r["equal"]),
            shown(r["different"]),
            shown(r["published_batches"]),
            shown(r["accepted"]),
        )
        for r in rows
    ]
    names = ("devices", "campaign", "comparisons, published", "equal", "different", "batches, published", "accepted")
    return Comparison(
        "counts",
        "Study B: counts",
        "Totals of two devices, as published; they stand only where two devices ran.",
        "counts",
        _headings(*names, numbers=names[2:]),
        tuple(lines),
    )
