# SPDX-License-Identifier: Apache-2.0
"""Which route blocks are computed alike, for one routing or ten thousand, from counts alone.

A tile's class is where its K is first cut, in K-tiles, 0 where it is not: the cuts of a tile lie `iters` apart, so the
first one says them all. A block's class is the classes of its N-tiles. Two blocks of one class are added up in one
order, so a route that moves between them keeps its bits; between two classes they can change. A legal reorder puts the
routes of an expert into its blocks in any way, so what counts is whether an expert's blocks are of more than one class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.layer import GEMMS, Layer
from routeblock.moe.launches import Launch
from routeblock.moe.partition import Partition, partition

Ints = NDArray[np.int64]


def cut_of(layer: Layer, gemm: str, blocks: int, launch: Launch, full_k: bool = False) -> Partition:
    """The partition of one GEMM of the layer over `blocks` route blocks."""
    n, k, _ = layer.gemm(gemm, 1)
    group = layer.weights.group_size
    # One group over K is one scale a column: the operator looks at the number of groups.
    return partition(
        blocks, n, k, launch.thread_n, launch.thread_k, launch.grid, -1 if group >= k else group, full_k=full_k
    )


def tile_classes(cut: Partition) -> Ints:
    """The class of each tile, int64 [blocks, n_tiles]: the first cut in K-tiles, 0 where K is whole."""
    tile = np.arange(cut.tiles, dtype=np.int64)
    first_cut = cut.iters - (tile - cut.direct_tiles) * cut.k_tiles % cut.iters
    whole = (tile < cut.direct_tiles) | (first_cut >= cut.k_tiles)
    return np.where(whole, 0, first_cut).reshape(cut.blocks, cut.n_tiles)


def block_classes(tiles: Ints) -> Ints:
    """A number for each block, int64 [blocks]: equal numbers, equal classes."""
    return np.unique(tiles, axis=0, return_inverse=True)[1].reshape(-1)


@dataclass(frozen=True)
class RunToRun:
    """What legal reorders can do to each of some routings of one size; every array is [routings].

    blocks: route blocks. straddling: experts with more than one block. parted: experts whose blocks are of more than
    one class, in W13 or W2. w13, any: routes of experts whose blocks part in W13, in either GEMM. log_outcomes:
    natural logarithm of the number of ways to spread the routes over classes: no more outcomes have different bits.
    """

    blocks: Ints
    straddling: Ints
    parted: Ints
    w13: Ints
    any: Ints
    log_outcomes: NDArray[np.float64]

    @property
    def can_differ(self) -> NDArray[np.bool_]:
        """Whether bits can differ between two orders of the routing."""
        return self.any > 0


class Classes:
    """The classes of blocks at fixed launches, by the number of blocks: computed once for each number."""

    def __init__(self, layer: Layer, launches: Mapping[str, Launch], full_k: bool = False) -> None:
        self.layer, self.launches, self.full_k = layer, dict(launches), full_k
        self._known: dict[int, tuple[Ints, Ints]] = {}

    def __call__(self, blocks: int) -> tuple[Ints, Ints]:
        """(class in W13, class in both GEMMs) of each of so many blocks, int64 [blocks] each."""
        if blocks == 0:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        if blocks not in self._known:
            tiles = [tile_classes(cut_of(self.layer, gemm, blocks, self.launches[gemm], self.full_k)) for gemm in GEMMS]
            self._known[blocks] = block_classes(tiles[0]), block_classes(np.concatenate(tiles, axis=1))
        return self._known[blocks]


def run_to_run(counts: Ints, block_size: int, classes: Classes) -> RunToRun:
    """What legal reorders can do to routings with `counts` routes of each local expert, int64 [routings, experts]."""
    routings, experts = counts.shape
    per_expert = -(-counts // block_size)
    blocks = per_expert.sum(axis=1)
    # All blocks of all routings in a line: the routing and expert that each is of, and the routes in it.
    owner = np.repeat(np.arange(routings * experts), per_expert.ravel())
    ends = np.cumsum(per_expert.ravel())
    within = np.arange(owner.size) - np.repeat(ends - per_expert.ravel(), per_expert.ravel())
    fill = np.minimum(counts.ravel()[owner] - within * block_size, block_size)
    w13, both = np.zeros(owner.size, np.int64), np.zeros(owner.size, np.int64)
    starts = np.cumsum(blocks) - blocks
    for number in np.unique(blocks):
        same = np.flatnonzero(blocks == number)
        places = (starts[same][:, None] + np.arange(number)).ravel()
        known = classes(int(number))
        w13[places], both[places] = np.tile(known[0], same.size), np.tile(known[1], same.size)
    routes = counts.ravel()
    parted13, parted = _parted(owner, w13, routes.size), _parted(owner, both, routes.size)
    shape = (routings, experts)
    return RunToRun(
        blocks,
        (per_expert > 1).sum(axis=1),
        parted.reshape(shape).sum(axis=1),
        np.where(parted13, routes, 0).reshape(shape).sum(axis=1),
        np.where(parted, routes, 0).reshape(shape).sum(axis=1),
        _log_outcomes(owner, both, fill, parted, routes, experts, routings),
    )


def _parted(owner: Ints, label: Ints, owners: int) -> NDArray[np.bool_]:
    """Whether an owner's blocks, which lie side by side, are of more than one class: bool [owners]."""
    changes = (owner[1:] == owner[:-1]) & (label[1:] != label[:-1])
    found = np.zeros(owners, bool)
    found[owner[1:][changes]] = True
    return found


def _log_outcomes(
    owner: Ints, label: Ints, fill: Ints, parted: NDArray[np.bool_], routes: Ints, experts: int, routings: int
) -> NDArray[np.float64]:
    # Multinomial of an expert's routes over its classes, each as large as its blocks are full: ln n! from a table.
    table = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, max(int(routes.max(initial=0)), 1) + 1)))])
    chosen = parted[owner]
    keys = owner[chosen] * (int(label.max(initial=0)) + 1) + label[chosen]
    distinct, inverse = np.unique(keys, return_inverse=True)
    sizes = np.bincount(inverse, weights=fill[chosen], minlength=distinct.size).astype(np.int64)
    found = np.zeros(routings)
    np.add.at(found, np.flatnonzero(parted) // experts, table[routes[parted]])
    np.subtract.at(found, distinct // (int(label.max(initial=0)) + 1) // experts, table[sizes])
    return found


def outcomes_text(log_outcomes: float) -> str:
    """The number of outcomes in words: exact where it is small."""
    if log_outcomes < log(1e6):
        return f"{round(np.exp(log_outcomes)):,}"
    return f"10^{log_outcomes / log(10):.1f}"
