# SPDX-License-Identifier: Apache-2.0
"""The cells of study A: which plan each uses, on which grid, and in which order the processes run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.moe.routing import AlignedPlan, align, exchange

HISTORIES = ("H0", "H1")
SURFACES = ("w13", "activation", "w2", "final")
REPLICATE_THREADS = (1, 2, 3, 4, 2)  # of the twin: five equal outcomes then say something


class Intervention(StrEnum):
    """What is done to the plan before the GEMMs see it."""

    NONE = "native alignment"
    REPLAY = "own plan injected"
    CROSS = "other history's plan injected"
    SWAP_WITHIN = "own plan, within-pair exchanged"
    SWAP_ACROSS = "own plan, across-pair exchanged"
    CANONICAL = "stable order by (expert id, route id)"


@dataclass(frozen=True)
class Cell:
    """One arm of the study."""

    name: str
    intervention: Intervention
    full_k_grid: bool = False


CELLS = {
    c.name: c
    for c in (
        Cell("native", Intervention.NONE),
        Cell("replay", Intervention.REPLAY),
        Cell("cross", Intervention.CROSS),
        Cell("swap_within", Intervention.SWAP_WITHIN),
        Cell("swap_across", Intervention.SWAP_ACROSS),
        Cell("full_k", Intervention.REPLAY, full_k_grid=True),
        Cell("canonical", Intervention.CANONICAL),
    )
}


@dataclass(frozen=True)
class Pairs:
    """The exchange pairs of a fixture; None where it has none."""

    within: tuple[int, int] | None
    across: tuple[int, int] | None


NEEDS_PAIR = {Intervention.SWAP_WITHIN: "within", Intervention.SWAP_ACROSS: "across"}


def cells_of(exchange: Mapping[str, Any]) -> list[str]:
    """The cells that a fixture can run, by the `exchange` of its fixture.json: an exchange needs its pair."""
    return [c.name for c in CELLS.values() if exchange.get(NEEDS_PAIR.get(c.intervention, ""), True) is not None]


def other(history: str) -> str:
    """The other of the two histories."""
    return HISTORIES[1 - HISTORIES.index(history)]


def injected_plan(
    cell: Cell,
    history: str,
    plans: Mapping[str, AlignedPlan],
    pairs: Pairs,
    topk_ids: NDArray[Any],
    num_experts: int,
) -> AlignedPlan | None:
    """The plan of a cell under a history; None where the fixture has no pair for the exchange.

    For `native` this is the history's own plan: what a CPU replays, and what a GPU is compared with.
    """
    own = plans[history]
    match cell.intervention:
        case Intervention.CROSS:
            return plans[other(history)]
        case Intervention.SWAP_WITHIN:
            return exchange(own, *pairs.within) if pairs.within else None
        case Intervention.SWAP_ACROSS:
            return exchange(own, *pairs.across) if pairs.across else None
        case Intervention.CANONICAL:
            return align(topk_ids, num_experts, own.block_size)
        case _:
            return own


def schedule(replicates: int) -> Iterator[tuple[str, str, int]]:
    """(cell, history, replicate) in the order of the study: replicate-major, the history order alternates."""
    for replicate in range(1, replicates + 1):
        for history in HISTORIES if replicate % 2 else HISTORIES[::-1]:
            for cell in CELLS:
                yield cell, history, replicate


def position(cell: str, history: str, replicate: int) -> int:
    """The place of a process in the order of the study, from 0."""
    index = HISTORIES.index(history) if replicate % 2 else 1 - HISTORIES.index(history)
    return ((replicate - 1) * len(HISTORIES) + index) * len(CELLS) + list(CELLS).index(cell)


def gpu_of(replicate: int, gpus: int) -> int:
    """The GPU of a replicate: replicates spread over GPUs, so that one replicate is one GPU's."""
    return (replicate - 1) % gpus


def predecessor(
    cell: str, history: str, replicate: int, gpus: int, cells: Collection[str] = tuple(CELLS)
) -> tuple[str, str, int] | None:
    """(cell, history, replicate) of the process before this one on the same GPU, of the cells that are run; None for a
    GPU's first.
    """
    this, gpu = (cell, history, replicate), gpu_of(replicate, gpus)
    before = [k for k in schedule(replicate) if k == this or (k[0] in cells and gpu_of(k[2], gpus) == gpu)]
    place = before.index(this)
    return before[place - 1] if place else None


def threads_of(replicate: int) -> int:
    """Threads of a replicate on the twin."""
    return REPLICATE_THREADS[(replicate - 1) % len(REPLICATE_THREADS)]


def largest_divisor(tiles: int, limit: int) -> int:
    """The largest divisor of `tiles` that is not above `limit`."""
    candidates = np.arange(1, min(tiles, limit) + 1)
    return int(candidates[tiles % candidates == 0][-1])
