# SPDX-License-Identifier: Apache-2.0
"""Raw timing batches, accepted and rejected, as a parquet table that two runs write alike but for what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from routeblock.errors import InputError


@dataclass(frozen=True)
class Batch:
    """One timed batch. `time_us` is the mean of `launches` launches; `position` counts from 0 in its repetition.

    `clock_events` is NVML's mask of clock event reasons seen before or after, `compute_processes` the most processes it
    listed; -1 stands for what could not be read. `reason` is empty when the batch was accepted.
    """

    lane: str
    device: str
    campaign: str
    family: str
    slots: int
    pool: int
    rows: int
    cols: int
    warps: int
    mode: str
    baseline: str
    series: str
    arm: str
    scope: str
    repetition: int
    position: int
    direction: str
    attempt: int
    time_us: float
    launches: int
    warmups: int
    accepted: bool
    reason: str
    clock_events: int
    compute_processes: int
    sm_clock_mhz: int
    temperature_c: int


_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
SCHEMA = pa.schema([pa.field(f.name, _TYPES[str(f.type)], nullable=False) for f in fields(Batch)])


def write(path: Path, batches: Iterable[Batch]) -> None:
    """Write `batches` to a parquet file at `path`; the bytes depend on the values alone."""
    rows = [asdict(b) for b in batches]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, compression="zstd")


def read(paths: Iterable[Path]) -> list[Batch]:
    """The batches of several files. Raises InputError if one is not such a table."""
    found: list[Batch] = []
    for path in paths:
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as e:
            raise _not_batches(path, str(e)) from e
        if not table.schema.equals(SCHEMA):
            raise _not_batches(path, f"columns {', '.join(table.schema.names)}")
        rows: list[dict[str, Any]] = table.to_pylist()
        if bad := [row["time_us"] for row in rows if not (math.isfinite(row["time_us"]) and row["time_us"] > 0)]:
            raise _not_batches(path, f"time_us holds {bad[0]}")
        found.extend(Batch(**row) for row in rows)
    return found


def _not_batches(path: Path, what: str) -> InputError:
    return InputError(
        f"no table of batches: {what}",
        where=str(path),
        limit=f"the columns are {', '.join(SCHEMA.names)}",
        way_out="run the sweep or the confirmation again",
    )
