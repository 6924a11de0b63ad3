# SPDX-License-Identifier: Apache-2.0
"""Tables as .parquet, .csv and .md. Parquet and csv hold full values; Markdown rounds for the reader."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from tabulate import tabulate

from routeblock.evidence.files import atomic_file

_ARROW = {"text": pa.string(), "count": pa.int64(), "number": pa.float64(), "flag": pa.bool_()}


@dataclass(frozen=True)
class Column:
    """A column: its name (with the unit where it has one), kind, and how Markdown formats a value."""

    name: str
    kind: Literal["text", "count", "number", "flag"] = "text"
    format: str = ""


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


def _shown(value: Any, column: Column) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(value, column.format)
