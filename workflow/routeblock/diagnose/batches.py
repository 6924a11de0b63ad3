# SPDX-License-Identifier: Apache-2.0
"""Does a token's arithmetic change with the batch that it is in? Canonical order, batches that are prefixes of one.

A token's class at a batch size: for each of its routes, thread_k and where K is cut in each run of 64 columns, in both
GEMMs, in elements of K, so that classes of different thread sizes compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.classes import cut_of
from routeblock.diagnose.engine import Engine
from routeblock.diagnose.layer import GEMMS, Layer
from routeblock.moe.launches import Launch

COLUMNS = 64  # every thread_n is a multiple
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Change:
    """A batch size from which on a token's class is another one, with the block size and launches there."""

    tokens: int
    number: int
    block_size: int
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class Sweep:
    """A token's classes over batch sizes: the number of each in order of first sight, and where they change."""

    sizes: tuple[int, ...]
    numbers: tuple[int, ...]
    changes: tuple[Change, ...]

    @property
    def classes(self) -> int:
        """How many different classes there are."""
        return len(set(self.numbers))


def route_cuts(layer: Layer, gemm: str, blocks: int, of_block: Ints, launch: Launch, full_k: bool) -> Ints:
    """Where K is cut for routes in some blocks: int64 [routes, 2, N / 64], the first cut in elements of K (0: none) and
    the distance to the next (0: there is none).
    """
    cut = cut_of(layer, gemm, blocks, launch, full_k)
    tile = of_block[:, None] * cut.n_tiles + np.arange(cut.n_tiles)
    first = cut.iters - (tile - cut.direct_tiles) * cut.k_tiles % cut.iters
    whole = (tile < cut.direct_tiles) | (first >= cut.k_tiles)
    first = np.where(whole, 0, first)
    step = np.where(whole | (first + cut.iters >= cut.k_tiles), 0, cut.iters)
    both = np.stack([first, step], axis=1) * launch.thread_k
    return np.repeat(both, launch.thread_n // COLUMNS, axis=2)


def sweep(
    engine: Engine,
    ids: NDArray[np.int32],
    token: int,
    sizes: Sequence[int],
    *,
    full_k: bool = False,
    launches: Callable[[int], dict[str, Launch] | None] | None = None,
) -> Sweep | None:
    """The classes of one token in batches of the first `sizes` tokens of ids [tokens, top_k]; each size must hold it.

    launches: the launches at a number of tokens, if not the engine's. None if a launch cannot be said.
    """
    ask = launches or engine.launches_at
    layer = engine.layer
    one_hot = np.zeros((ids.shape[0], layer.experts), np.int64)
    np.add.at(one_hot, (np.repeat(np.arange(ids.shape[0]), ids.shape[1]), ids.ravel()), 1)
    running = np.cumsum(one_hot, axis=0)
    slots = ids[token].astype(np.int64)
    before = running[token][slots] - one_hot[token][slots]  # routes of earlier tokens in the slot's expert
    known: dict[bytes, int] = {}
    numbers: list[int] = []
    changes: list[Change] = []
    for size in sizes:
        found = ask(size)
        if found is None:
            return None
        block = engine.block_size_at(size)
        key = [np.array([found[gemm].thread_k for gemm in GEMMS]).tobytes()]
        for _, local in engine.ranks() if not full_k else ():  # with full K there is no cut anywhere
            mine = (slots >= local.start) & (slots < local.stop)
            if not mine.any():
                continue
            per_expert = -(-running[size - 1][local] // block)
            starts = np.cumsum(per_expert) - per_expert
            of_block = starts[slots[mine] - local.start] + before[mine] // block
            for gemm in GEMMS:
                cuts = route_cuts(layer, gemm, int(per_expert.sum()), of_block, found[gemm], False)
                key.append(cuts.tobytes())
        number = known.setdefault(b"".join(key), len(known))
        if not numbers or numbers[-1] != number:
            changes.append(Change(size, number, block, tuple(found[gemm] for gemm in GEMMS)))
        numbers.append(number)
    return Sweep(tuple(sizes), tuple(numbers), tuple(changes))


def first_token_differs(engine: Engine, ids: NDArray[np.int32], counts: Ints) -> NDArray[np.bool_]:
    """Whether the first token of each routing [routings, tokens, top_k] is of another class than alone.

    In canonical order, without expert parallelism. counts: the routes of each expert, int64 [routings, experts].
    """
    layer, tokens = engine.layer, ids.shape[1]
    launches, alone = engine.launches_at(tokens), engine.launches_at(1)
    assert launches is not None
    assert alone is not None
    slots = ids[:, 0].astype(np.int64)
    per_expert = -(-counts // engine.block_size_at(tokens))
    starts = np.cumsum(per_expert, axis=1) - per_expert
    # The first token is the first of its experts' routes, so it lies in their first blocks; alone, each expert has one.
    of_block = np.take_along_axis(starts, slots, axis=1)
    rank = np.argsort(np.argsort(slots, axis=1), axis=1)
    blocks, found = per_expert.sum(axis=1), np.zeros(len(ids), bool)
    for gemm in GEMMS:
        if launches[gemm].thread_k != alone[gemm].thread_k:
            return np.ones(len(ids), bool)
        single = route_cuts(layer, gemm, layer.top_k, np.arange(layer.top_k), alone[gemm], False)
        for number in np.unique(blocks):
            rows = np.flatnonzero(blocks == number)
            cuts = route_cuts(layer, gemm, int(number), of_block[rows].ravel(), launches[gemm], False)
            same = (cuts == single[rank[rows].ravel()]).all(axis=(1, 2)).reshape(rows.size, -1).all(axis=1)
            found[rows] |= ~same
    return found
