# SPDX-License-Identifier: Apache-2.0
"""A table as the report shows it: a readable share at once, the rest folded, nothing cut without saying so."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.parquet import kinds_of, read_parquet, rows_of
from routeblock.report.catalogue import TABLES, WHOLE, formats, tone
from routeblock.tables import Share, paths

Row = Mapping[str, Any]
DIGEST = re.compile(r"[0-9a-f]{32,64}")
SHOWN_DIGITS = 12
LONG = 60  # characters; a column with longer texts gets room to wrap


@dataclass(frozen=True)
class Table:
    """A table read from its files: columns with their kind in parquet, rows with full values, title and notes."""

    name: str
    title: str
    notes: str
    columns: tuple[str, ...]
    numeric: frozenset[str]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Cell:
    """A value as shown; `whole` where the shown text is shorter than the value."""

    text: str
    whole: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Heading:
    """A column as shown."""

    name: str
    is_number: bool
    is_long: bool


@dataclass(frozen=True)
class View:
    """What is shown of a table; `same` are columns with one value in all rows, `empty` those with none."""

    table: Table
    headings: tuple[Heading, ...]
    first: tuple[tuple[Cell, ...], ...]
    rest: tuple[tuple[Cell, ...], ...]
    same: tuple[tuple[str, Cell], ...]
    empty: tuple[str, ...]
    share: str


def read(folder: Path, name: str) -> Table:
    """Read a table that `routeblock.tables.write` wrote. Raises InputError where it is missing or another file."""
    parquet, _, markdown = paths(folder, name)
    try:
        found = read_parquet(parquet)
        text = markdown.read_text(encoding="utf-8")
        kinds, rows = dict(kinds_of(found)), rows_of(found)
    except UNREADABLE as e:
        raise InputError(
            f"not readable: {str(e).splitlines()[0]}",
            where=str(parquet if not isinstance(e, OSError) else e.filename or parquet),
            limit="the report needs every table of the study",
            way_out=f"build it: .venv/bin/snakemake --cores 2 -- table_{name}",
        ) from e
    title, _, body = text.partition("\n\n")
    notes = "" if body.rstrip().endswith("|") else body.rstrip().rpartition("\n\n")[2]
    numeric = {n for n, t in kinds.items() if pa.types.is_integer(t) or pa.types.is_floating(t)}
    return Table(name, title.removeprefix("# "), notes, tuple(kinds), frozenset(numeric), tuple(rows))


def shown(value: Any, form: str = "", column: str = "") -> Cell:
    """A value for a reader: digests cut to 12 digits, numbers as their column says; the whole value stays at hand."""
    if value is None:
        return Cell("")
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    text = str(value)
    if isinstance(value, str):
        short = DIGEST.sub(lambda found: found[0][:SHOWN_DIGITS] + "…", value)
        return Cell(short, text if short != text else "", tone(column, text))
    rounded = f"{value:,d}" if isinstance(value, int) and not form else format(value, form)
    return Cell(rounded, text if isinstance(value, float) and rounded != text else "")


def view(table: Table) -> View:
    """Lay out a table: the share of the catalogue first, constant and empty columns told once."""
    form = formats(table.name)
    cells = {c: [shown(r[c], form.get(c, ""), c) for r in table.rows] for c in table.columns}
    empty = [c for c in table.columns if table.rows and not any(cell.text for cell in cells[c])]
    several = len(table.rows) > 1
    same = [c for c in table.columns if several and c not in empty and len({str(r[c]) for r in table.rows}) == 1]
    kept = [c for c in table.columns if c not in (*empty, *same)] or list(table.columns)
    first, share = _share(table)
    rows = [tuple(cells[c][i] for c in kept) for i in range(len(table.rows))]
    return View(
        table,
        tuple(Heading(c, c in table.numeric, any(len(x.text) > LONG for x in cells[c])) for c in kept),
        tuple(rows[i] for i in first),
        tuple(row for i, row in enumerate(rows) if i not in set(first)),
        tuple((c, cells[c][0]) for c in same if c not in kept),
        tuple(c for c in empty if c not in kept),
        share,
    )


def _share(table: Table) -> tuple[list[int], str]:
    """Which rows come first, and in words which they are; all of them without words."""
    every = range(len(table.rows))
    if len(table.rows) <= WHOLE:
        return list(every), ""
    share = TABLES[table.name].share if table.name in TABLES else Share()
    wanted = _matching(table.rows, share.where)
    if not wanted:
        share, wanted = Share(), list(every)
    rows = wanted[: share.rows]
    which = ", ".join(f"{column} {value}" for column, value in share.where)
    much = "all" if len(rows) == len(wanted) else "the first"
    return rows, f"{much} with {which}" if which else "the first in the table"


def _matching(rows: Sequence[Row], where: Sequence[tuple[str, str]]) -> list[int]:
    return [i for i, row in enumerate(rows) if all(str(row.get(c)) == v for c, v in where)]
