# SPDX-License-Identifier: Apache-2.0
"""Raw batches, accepted and rejected, as a parquet table whose bytes depend on the values alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from routeblock.errors import InputError


@dataclass(frozen=True)
class Batch:
    """One timed batch, `time_us` a call. `position` counts from 0 in its repetition.

    `clock_events` is NVML's mask of clock event reasons seen before or after the repetition, `compute_processes` the
    most processes it listed; -1 stands for what could not be read. `reason` is empty when the batch was accepted.
    """

    role: str
    slots: int
    pool: int
    rows: int
    cols: int
    series: str
    side: str
    repetition: int
    attempt: int
    position: int
    direction: str
    time_us: float
    launches: int
    accepted: bool
    reason: str
    clock_events: int
    compute_processes: int
    sm_clock_mhz: int
    temperature_c: int


_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
SCHEMA = pa.schema([pa.field(f.name, _TYPES[str(f.type)], nullable=False) for f in fields(Batch)])


def write(path: Path, batches: Iterable[Batch]) -> None:
    """Write `batches` to a parquet file at `path`."""
    pq.write_table(pa.Table.from_pylist([asdict(b) for b in batches], schema=SCHEMA), path, compression="zstd")


def read(path: Path) -> list[Batch]:
    """The batches of a file. Raises InputError if it is not such a table."""
    try:
        table = pq.read_table(path)
        if not table.schema.equals(SCHEMA):
            raise ValueError(f"columns {', '.join(table.schema.names)}")
    except (OSError, ValueError) as e:
        raise InputError(
            f"no table of batches: {e}",
            where=str(path),
            limit=f"the columns are {', '.join(SCHEMA.names)}",
            way_out="record again: routeblock record-dispatch",
        ) from e
    return [Batch(**row) for row in table.to_pylist()]
