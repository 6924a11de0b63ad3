# SPDX-License-Identifier: Apache-2.0
"""Completions as a parquet table: every token id and every bit of every log probability that the engine gave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.evidence.files import atomic_file

TABLE = "completions.parquet"


@dataclass(frozen=True)
class Served:
    """One prompt served once. alone: as a batch of its own; batch is then the batch whose prompts were served so.

    tokens: int32, logprobs: float32, little-endian, one a token.
    """

    mode: str
    alignment: str
    process: int
    alone: bool
    batch: int
    repeat: int
    prompt: int
    tokens: bytes
    logprobs: bytes

    @property
    def ids(self) -> NDArray[np.int32]:
        """The token ids."""
        return np.frombuffer(self.tokens, "<i4")

    @property
    def condition(self) -> tuple[str, str]:
        """Mode and alignment."""
        return self.mode, self.alignment


SCHEMA = pa.schema(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in (
            ("mode", pa.string()),
            ("alignment", pa.string()),
            ("process", pa.int64()),
            ("alone", pa.bool_()),
            ("batch", pa.int64()),
            ("repeat", pa.int64()),
            ("prompt", pa.int64()),
            ("tokens", pa.binary()),
            ("logprobs", pa.binary()),
        )
    ]
)


def write(path: Path, served: Iterable[Served]) -> None:
    """Write the table; equal rows give equal bytes, and equal completions are stored once."""
    rows = [vars(s) for s in served]
    with atomic_file(path) as tmp:
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        pq.write_table(table, tmp, compression="zstd", compression_level=19, use_dictionary=True)


def read(path: Path) -> list[Served]:
    """The rows of a table. Raises InputError if it is not one."""
    try:
        table = pq.read_table(path)
        if not table.schema.equals(SCHEMA):
            raise ValueError(f"columns {', '.join(table.schema.names)}")
        return [Served(**row) for row in table.to_pylist()]
    except (OSError, ValueError, TypeError) as e:
        raise InputError(
            f"no table of completions: {e}",
            where=str(path),
            limit=f"the columns are {', '.join(SCHEMA.names)}",
            way_out="restore the file, or record again: routeblock serving record",
        ) from e


def first_difference(one: Sequence[int] | NDArray[np.int32], other: Sequence[int] | NDArray[np.int32]) -> int | None:
    """The position of the first token that differs; None where none does."""
    away = np.flatnonzero(np.asarray(one) != np.asarray(other))
    return int(away[0]) if away.size else None
