# SPDX-License-Identifier: Apache-2.0
"""Jobs and data of a shape, all from the protocol's seed and the raw stream of PCG64: the same bytes everywhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.evidence.digest import sha256_array
from routeblock.grouped_schedule import fixture as study
from routeblock.grouped_schedule.protocol import Cell
from routeblock.grouped_schedule.schedules import Family
from routeblock.moe import q6k
from routeblock.q6k_dispatch.protocol import Role, Shape

STUDY_SEED, STUDY_SENTINELS = 20250607, 1  # of study B's sweep: fixtures/protocols/grouped_schedule.json
_IDS, _ACTIVATIONS, _WEIGHTS = range(3)


@dataclass(frozen=True)
class Jobs:
    """ids int32 [slots], negative for a sentinel; x float32 [tokens, cols], the token of slot s being s // top_k."""

    shape: Shape
    ids: NDArray[np.int32]
    x: NDArray[np.float32]

    @property
    def active(self) -> NDArray[np.intp]:
        return np.flatnonzero(self.ids >= 0)

    def sampled(self, count: int) -> list[int]:
        """`count` active slots, spread evenly."""
        active = self.active
        return [int(active[i]) for i in np.linspace(0, active.size - 1, min(count, active.size)).astype(int)]

    def facts(self) -> dict[str, Any]:
        """Cardinalities and digests, for JSON."""
        groups = Counter(self.ids[self.active].tolist())
        blocks = self.shape.rows * self.shape.cols // q6k.Q6K_WEIGHTS
        return {
            "active": int(self.active.size),
            "distinct_experts": len(groups),
            "largest_group": max(groups.values(), default=0),
            "weight_bytes": len(groups) * blocks * q6k.Q6K_BYTES,
            "ids_sha256": sha256_array(self.ids),
            "x_sha256": sha256_array(self.x),
        }


def _stream(seed: int, *tag: int) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence((seed, *tag)))


def make(shape: Shape, seed: int) -> Jobs:
    """The jobs of `shape`."""
    tag = (list(Role).index(shape.role), shape.slots, shape.pool)
    if shape.role is Role.STUDY:
        cell = Cell(Family.INDEPENDENT, shape.slots, shape.pool, shape.rows, shape.cols)
        nothing = np.empty((shape.pool, 0), np.uint8)  # its ids are wanted, not its weights
        ids = study.make(cell, STUDY_SEED, sentinels=STUDY_SENTINELS, checked_rows=1, pool_weights=nothing).ids
    else:
        bits = _stream(seed, _IDS, *tag)
        tokens = range(shape.slots // shape.top_k)
        # Distinct experts of a token: the first of a random permutation, by sorting random keys.
        drawn = [np.argsort(bits.random_raw(shape.pool), kind="stable")[: shape.top_k] for _ in tokens]
        ids = np.concatenate(drawn).astype(np.int32)
    return Jobs(shape, ids, activations(seed, tag, shape.slots // shape.top_k, shape.cols))


def activations(seed: int, tag: tuple[int, ...], tokens: int, cols: int) -> NDArray[np.float32]:
    """float32 [tokens, cols], uniform in [-1, 1)."""
    raw = _stream(seed, _ACTIVATIONS, *tag, cols).random_raw(tokens * cols)
    return np.asarray((raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - 1, np.float32).reshape(
        tokens, cols
    )


def expert_weights(seed: int, rows: int, cols: int, expert: int) -> NDArray[np.uint8]:
    """Q6_K weights of one expert, uint8 [rows, cols / 256, 210]; they do not depend on the pool."""
    return q6k.random_q6k(_stream(seed, _WEIGHTS, rows, cols, expert), (rows, q6k.blocks_per_row(cols)))


def weights(seed: int, pool: int, rows: int, cols: int) -> NDArray[np.uint8]:
    """Q6_K weights of a pool, uint8 [pool, rows, cols / 256, 210]."""
    out = np.empty((pool, rows, q6k.blocks_per_row(cols), q6k.Q6K_BYTES), np.uint8)
    for expert in range(pool):
        out[expert] = expert_weights(seed, rows, cols, expert)
    return out
