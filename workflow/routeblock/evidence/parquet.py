# SPDX-License-Identifier: Apache-2.0
"""Parquet tables from elsewhere: a few bytes can stand for any number of cells, so the cells are counted first.

Texts stay in their dictionaries until they are asked for: repeated, they would take their length each time. pyarrow is
imported when a table is read: a machine that only records may lack it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

FREE_BYTES, EXPANSION = 64 << 20, 32  # of memory: a fixed number, and so many for each byte of the file
CELL_BYTES = 48  # a number as an object of Python, its place in a row, and the row's share


def read_parquet(path: Path) -> pa.Table:
    """A flat table. Raises OSError, or ValueError for anything else, and for one of too many cells for its file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = path.stat().st_size
    try:
        with pq.ParquetFile(path) as file:
            told, schema = file.metadata, file.schema_arrow
            groups, columns = range(told.num_row_groups), range(told.num_columns)
            if any(file.schema.column(c).max_repetition_level for c in columns):
                raise ValueError("columns of lists")
            chunks = [told.row_group(g).column(c) for g in groups for c in columns]
            cells = max(told.num_rows * told.num_columns, sum(chunk.num_values for chunk in chunks))
            taken = cells * CELL_BYTES + sum(chunk.total_uncompressed_size for chunk in chunks)
            if min(cells, taken) < 0 or taken > FREE_BYTES + EXPANSION * size:
                raise ValueError(f"{cells} cells in {size} bytes")
        texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        with pq.ParquetFile(path, read_dictionary=texts) as file:
            return file.read()
    except pa.ArrowException as e:
        raise ValueError(str(e).splitlines()[0] if str(e) else type(e).__name__) from e


def kinds_of(table: pa.Table) -> list[tuple[str, pa.DataType]]:
    """Names and types of the columns; a column of texts is called one, however it is kept."""
    import pyarrow as pa

    return [(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in table.schema]


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """The rows as mappings. Equal texts of a column are one object. Raises ValueError if two columns have one name."""
    names = table.column_names
    if len(set(names)) < len(names):
        raise ValueError("two columns of one name")
    columns = [[value for chunk in column.chunks for value in _values(chunk)] for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(chunk: Any) -> list[Any]:
    if not hasattr(chunk, "dictionary"):
        return list(chunk.to_pylist())
    texts = chunk.dictionary.to_pylist()
    return [None if i is None else texts[i] for i in chunk.indices.to_pylist()]
