# SPDX-License-Identifier: Apache-2.0
"""Tables as .parquet, .csv and .md. Parquet and csv hold full values; Markdown rounds for the reader."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from tabulate import tabulate

from routeblock.declared import Declared
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal

Row = dict[str, Any]
Evidence = TypeVar("Evidence")
_ARROW = {"text": pa.string(), "count": pa.int64(), "number": pa.float64(), "flag": pa.bool_()}


@dataclass(frozen=True)
class Column:
    """A column: its name (with the unit where it has one), kind, and how Markdown formats a value."""

    name: str
    kind: Literal["text", "count", "number", "flag"] = "text"
    format: str = ""


@dataclass(frozen=True)
class Share:
    """The rows of a long table that the report shows at once: those with these values, at most so many."""

    where: tuple[tuple[str, str], ...] = ()
    rows: int = 12


@dataclass(frozen=True)
class Table(Declared, Generic[Evidence]):
    """A table of a study, declared once; the docstring of `rows` is its question and caption."""

    rows: Callable[[Evidence], list[Row]]
    columns: tuple[Column, ...]
    title: str
    notes: str = ""
    share: Share = Share()
    absent: tuple[str, str] = ("it was not asked for", "make report")
    """Why a study may lack it, and what makes it."""

    @property
    def made_by(self) -> Callable[[Evidence], list[Row]]:
        """The function that gives its rows."""
        return self.rows


def numbers(names: Iterable[str], form: str) -> tuple[Column, ...]:
    """Columns of numbers that Markdown formats alike."""
    return tuple(Column(name, "number", form) for name in names)


def paths(folder: Path, name: str) -> list[Path]:
    """The three files of a table."""
    return [folder / f"{name}.{suffix}" for suffix in ("parquet", "csv", "md")]


def write(
    folder: Path,
    name: str,
    columns: Sequence[Column],
    rows: Iterable[Mapping[str, Any]],
    *,
    title: str,
    notes: str = "",
) -> list[Path]:
    """Write the table `name` to `folder` and return its files. A key that a row lacks is an empty cell.

    The bytes depend on the values alone: no time, no host, no library metadata beyond parquet's writer version.
    """
    table = [{c.name: row.get(c.name) for c in columns} for row in rows]
    parquet, plain, markdown = paths(folder, name)
    schema = pa.schema([pa.field(c.name, _ARROW[c.kind]) for c in columns])
    with atomic_file(parquet) as tmp:
        pq.write_table(pa.Table.from_pylist(table, schema=schema), tmp, compression="zstd")
    with atomic_file(plain) as tmp, tmp.open("w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, [c.name for c in columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    cells = [[_shown(row[c.name], c) for c in columns] for row in table]
    align = ["left" if c.kind == "text" else "right" for c in columns]
    body = tabulate(cells, [c.name for c in columns], tablefmt="github", colalign=align, disable_numparse=True)
    with atomic_file(markdown) as tmp:
        tmp.write_text("\n\n".join(part for part in (f"# {title}", body, notes) if part) + "\n", encoding="utf-8")
    return [parquet, plain, markdown]


def write_sealed(
    folder: Path,
    table: Table[Any],
    rows: Iterable[Mapping[str, Any]],
    *,
    inputs: Iterable[Path],
    note: str = "",
    modules: Sequence[str] = (),
) -> list[Path]:
    """Write a table of these rows, with `note` after its own notes, and seal it by `{name}.manifest.json`.

    modules: those beside the table's own whose `SOURCES` it is made from.
    """
    files = write(folder, table.name, table.columns, rows, title=table.title, notes=table.notes + note)
    manifest = folder / f"{table.name}.manifest.json"
    seal(
        manifest,
        rule=f"table_{table.name}",
        outputs=files,
        inputs=inputs,
        parameters={},
        modules=[table.module, *modules],
    )
    return files


def _shown(value: Any, column: Column) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(value, column.format)
