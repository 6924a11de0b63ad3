# SPDX-License-Identifier: Apache-2.0
"""Fixtures of study B: job slots with expert ids, activations and weights, all from a seed.

Everything is read from the raw stream of PCG64, which NumPy keeps stable, so a seed gives the same bytes everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_array
from routeblock.grouped_schedule.protocol import Cell
from routeblock.grouped_schedule.schedules import Family
from routeblock.moe import q6k

SENTINEL = -1
MAX_JOBS = 65_535  # grid.y, and 16 bits of a packed order; 0xFFFFFFFF then never names a job
MAX_ROWS = 4 * 65_535  # grid.z of the narrowest band
TOKENS = 2  # of the paired family


@dataclass(frozen=True)
class Fixture:
    """Jobs and data of one cell.

    ids int32 [slots], negative for a sentinel; activations uint8 [slots, cols / 32, 36]; weights uint8
    [pool, rows, cols / 256, 210]; check_rows int32 [slots, n], the rows compared with CPU dequantisation.
    """

    cell: Cell
    seed: int
    ids: NDArray[np.int32]
    activations: NDArray[np.uint8]
    weights: NDArray[np.uint8]
    check_rows: NDArray[np.int32]

    @cached_property
    def weights_digest(self) -> str:
        """SHA-256 of the pool's weights."""
        return sha256_array(self.weights)

    @property
    def active(self) -> NDArray[np.intp]:
        """The job slots that have work, ascending."""
        return np.flatnonzero(self.ids >= 0)

    def record(self) -> dict[str, Any]:
        """Shape, seed, recorded cardinalities and digests, for JSON."""
        groups = Counter(self.ids[self.active].tolist())
        cell = self.cell
        return {
            "family": str(cell.family),
            "slots": cell.slots,
            "pool": cell.pool,
            "rows": cell.rows,
            "cols": cell.cols,
            "seed": self.seed,
            "active_jobs": int(self.active.size),
            "sentinels": cell.slots - int(self.active.size),
            "distinct_experts": len(groups),
            "largest_group": max(groups.values(), default=0),
            "groups_of_two": sum(n == 2 for n in groups.values()),
            "weight_bytes_in_pool": int(self.weights.nbytes),
            "weight_bytes_used": int(len(groups) * self.weights[0].nbytes) if self.weights.shape[0] else 0,
            "ids": self.ids.tolist(),
            "sha256": {
                "ids": sha256_array(self.ids),
                "activations": sha256_array(self.activations),
                "weights": self.weights_digest,
                "check_rows": sha256_array(self.check_rows),
            },
        }


def _stream(seed: int, *tag: int) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence((seed, *tag)))


_IDS, _ACTIVATIONS, _WEIGHTS, _ROWS = range(4)
_FAMILY_TAG = {Family.INDEPENDENT: 0, Family.PAIRED: 1}


def check_jobs(ids: NDArray[np.int32], pool: int, rows: int, cols: int) -> None:
    """Refuse, before any launch, jobs that the kernels cannot run: InputError says which and why."""
    q6k.blocks_per_row(cols)
    problems = (
        (ids.ndim != 1 or ids.dtype != np.int32, f"ids are {ids.dtype} {ids.shape}", "int32 [slots] is needed"),
        (ids.size > MAX_JOBS, f"{ids.size:,} job slots", f"at most {MAX_JOBS:,} fit a launch"),
        (not 0 < pool <= MAX_JOBS, f"a pool of {pool:,} experts", f"1 to {MAX_JOBS:,} are allowed"),
        (not 0 < rows <= MAX_ROWS, f"{rows:,} rows", f"1 to {MAX_ROWS:,} are allowed"),
        (ids.max(initial=-1) >= pool, f"expert id {ids.max(initial=-1)}", f"ids lie below the pool bound {pool}"),
    )
    for wrong, what, limit in problems:
        if wrong:
            raise InputError(what, where="grouped_schedule", limit=limit, way_out="split the jobs or mend the ids")


def weights(seed: int, pool: int, rows: int, cols: int) -> NDArray[np.uint8]:
    """Q6_K weights uint8 [pool, rows, cols / 256, 210]; an expert's do not depend on the pool.

    Raises InputError for a shape that the kernels refuse.
    """
    check_jobs(np.empty(0, np.int32), pool, rows, cols)
    shape = (rows, q6k.blocks_per_row(cols))
    out = np.empty((pool, *shape, q6k.Q6K_BYTES), np.uint8)
    for expert in range(pool):
        out[expert] = q6k.random_q6k(_stream(seed, _WEIGHTS, rows, cols, expert), shape)
    return out


def _draw_ids(cell: Cell, seed: int, sentinels: int) -> NDArray[np.int32]:
    bits = _stream(seed, _IDS, _FAMILY_TAG[cell.family], cell.slots, cell.pool)
    if cell.family is Family.PAIRED:
        top_k, odd = divmod(cell.slots, TOKENS)
        if odd or top_k > cell.pool:
            raise InputError(
                f"{cell.slots} slots for two tokens from a pool of {cell.pool}",
                where="grouped_schedule.fixture",
                limit="each token needs half the slots, all with distinct experts",
                way_out="take an even number of slots and a pool of at least half of it",
            )
        # Distinct experts of a token: the first of a random permutation, by sorting random keys.
        ids = np.concatenate([np.argsort(bits.random_raw(cell.pool), kind="stable")[:top_k] for _ in range(TOKENS)])
    else:
        ids = bits.random_raw(cell.slots) % np.uint64(cell.pool)
    ids = ids.astype(np.int32)
    silent = np.argsort(bits.random_raw(cell.slots), kind="stable")[:sentinels]
    ids[silent] = SENTINEL
    return np.asarray(ids, np.int32)


def make(cell: Cell, seed: int, *, sentinels: int, checked_rows: int, pool_weights: NDArray[np.uint8]) -> Fixture:
    """The fixture of `cell`. `pool_weights` [>= pool, rows, cols / 256, 210] comes from `weights` with the same seed.

    Raises InputError for a shape that the kernels refuse.
    """
    check_jobs(np.empty(0, np.int32), cell.pool, cell.rows, cell.cols)  # before ids are drawn below an empty bound
    ids = _draw_ids(cell, seed, sentinels)
    check_jobs(ids, cell.pool, cell.rows, cell.cols)
    tag = (_FAMILY_TAG[cell.family], cell.slots, cell.pool)
    activations = q6k.random_q8_1(_stream(seed, _ACTIVATIONS, *tag, cell.cols), (cell.slots, cell.cols // 32))
    keys = _stream(seed, _ROWS, *tag, cell.rows).random_raw(cell.slots * cell.rows).reshape(cell.slots, cell.rows)
    check_rows = np.sort(np.argsort(keys, axis=1, kind="stable")[:, :checked_rows], axis=1).astype(np.int32)
    return Fixture(cell, seed, ids, activations, pool_weights[: cell.pool], check_rows)


def make_all(wanted: list[Cell], seed: int, *, sentinels: int, checked_rows: int) -> Iterator[Fixture]:
    """The fixtures of `wanted`, in that order; weights are made once per matrix shape."""
    made: dict[tuple[int, int], NDArray[np.uint8]] = {}
    for cell in wanted:
        key = (cell.rows, cell.cols)
        if key not in made:
            made[key] = weights(seed, max(c.pool for c in wanted if (c.rows, c.cols) == key), *key)
        yield make(cell, seed, sentinels=sentinels, checked_rows=checked_rows, pool_weights=made[key])
