# SPDX-License-Identifier: Apache-2.0
"""Raw timing batches: a parquet table whose bytes depend on the values alone, and rows with one set of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.parquet import kinds_of, read_parquet, rows_of

Batch = TypeVar("Batch")
Row = dict[str, Any]
_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}


@dataclass(frozen=True)
class BatchTable(Generic[Batch]):
    """The table of one kind of batch, a dataclass of str, int, float and bool.

    names: the recorded columns of a study that are called otherwise here (`side`, `clock`, `calls`). way_out: makes
    the table anew.
    """

    kind: type[Batch]
    names: Mapping[str, str]
    way_out: str

    @cached_property
    def schema(self) -> Any:
        """The columns, in the order of the dataclass; no cell is empty."""
        columns = [pa.field(f.name, _TYPES[str(f.type)], nullable=False) for f in fields(self.kind)]  # type: ignore[arg-type]
        return pa.schema(columns)

    def rows(self, batches: Iterable[Batch]) -> list[Row]:
        """Batches as rows with the names of `timing`."""
        ours = {recorded: name for name, recorded in self.names.items()}
        return [{ours.get(name, name): value for name, value in vars(b).items()} for b in batches]

    def batch(self, row: Row) -> Batch:
        """The batch of a row, which may hold more than the table has columns for."""
        recorded = {f.name: f.name for f in fields(self.kind)}  # type: ignore[arg-type]
        recorded |= {column: name for name, column in self.names.items()}
        return self.kind(**{column: row[name] for column, name in recorded.items()})

    def write(self, path: Path, batches: Iterable[Batch]) -> None:
        """Write `batches` to a parquet file at `path`."""
        rows = [asdict(b) for b in batches]  # type: ignore[call-overload]
        pq.write_table(pa.Table.from_pylist(rows, schema=self.schema), path, compression="zstd")

    def read(self, path: Path) -> list[Batch]:
        """The batches of a file. Raises InputError if it is not such a table."""
        try:
            table = read_parquet(path)
            if kinds_of(table) != [(f.name, f.type) for f in self.schema]:
                raise ValueError(f"columns {', '.join(table.schema.names)}")
            if empty := [name for name in table.column_names if table[name].null_count]:
                raise ValueError(f"empty cells in column {empty[0]}")
            rows = rows_of(table)
        except UNREADABLE as e:
            raise InputError(
                f"no table of batches: {e}",
                where=str(path),
                limit=f"the columns are {', '.join(self.schema.names)}",
                way_out=self.way_out,
            ) from e
        return [self.kind(**row) for row in rows]
