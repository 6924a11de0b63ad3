# SPDX-License-Identifier: Apache-2.0
"""Tables as .parquet, .csv and .md. Parquet and csv hold full values; Markdown rounds for the reader."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from tabulate import tabulate

from routeblock.errors import InputError
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal

Table = TypeVar("Table")
_ARROW = {"text": pa.string(), "count": pa.int64(), "number": pa.float64(), "flag": pa.bool_()}


@dataclass(frozen=True)
class Column:
    """A column: its name (with the unit where it has one), kind, and how Markdown formats a value."""

    name: str
    kind: Literal["text", "count", "number", "flag"] = "text"
    format: str = ""


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


def find(name: str, known: Mapping[str, Table]) -> Table:
    """What stands under this name in a study's tables. Raises InputError if there is none."""
    if name not in known:
        raise InputError(
            f"no table is called {name!r}",
            where="tables",
            limit=f"known tables are {', '.join(known)}",
            way_out="name one of them",
        )
    return known[name]


def write_sealed(
    folder: Path,
    name: str,
    columns: Sequence[Column],
    rows: Iterable[Mapping[str, Any]],
    *,
    title: str,
    notes: str,
    inputs: Iterable[Path],
    code: str,
) -> list[Path]:
    """As `write`, and seal the files by `{name}.manifest.json`."""
    files = write(folder, name, columns, rows, title=title, notes=notes)
    manifest = folder / f"{name}.manifest.json"
    seal(manifest, rule=f"table_{name}", outputs=files, inputs=inputs, parameters={}, code=code)
    return files


def _shown(value: Any, column: Column) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(value, column.format)
