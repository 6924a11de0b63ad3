# SPDX-License-Identifier: Apache-2.0
"""Figure `partition`: every tile of both GEMMs by class, and the blocks in which the exchanged routes stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from routeblock.errors import InputError
from routeblock.figure_style import DARK, GREY, INK, LIGHT, MID, PAPER, WIDTH, head, identity, key, place, say, sheet
from routeblock.moe.launches import Launch
from routeblock.moe.partition import Partition
from routeblock.moe.routing import AlignedPlan, changed_memberships
from routeblock.route_block.facts import HISTORIES, Pairs
from routeblock.route_block.operating_point import GEMMS, cut

_KEY, _HEAD, _TITLE, _ROUTES, _STRIP, _FOOT = 0.22, 0.26, 0.24, 0.44, 0.6, 0.5  # inches, down
_LEFT, _WIDE = 0.44, WIDTH - 0.44 - 0.06  # inches, across
_TILE = np.array([(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0), (0.0, 0.0)])
_CODES = np.array([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], np.uint8)
_NAMES = {"w13": "W13", "w2": "W2"}
# (colour, in the key, in a count) by class: direct, or beyond the direct tiles in 1, 2, or at least 3 slices.
_CLASSES = (
    ("#e6eaee", "direct", "direct"),
    (LIGHT, "shared, one slice", "in one slice"),
    (MID, "two slices", "in two"),
    (DARK, "three or more", "in three or more"),
)
_MARKS = {"stored": "full", "captured": "none"}  # by source of plans


@dataclass(frozen=True)
class Plans:
    """Where plans come from, the plans of both histories, and the pairs that are exchanged."""

    source: str
    plans: Mapping[str, AlignedPlan]
    pairs: Pairs


@dataclass(frozen=True)
class Cut:
    """One point: its native launches, the grid of `full_k`, the fixture's spec, and the plans used there."""

    point: str
    spec: Mapping[str, Any]
    launches: Mapping[str, Launch]
    full_k_grid: int
    used: Sequence[Plans]

    def partitions(self) -> list[tuple[str, str, Launch, Partition]]:
        """(gemm, cell, launch, partition) at the native grid and at that of `full_k`."""
        blocks = self.used[0].plans[HISTORIES[0]].num_blocks
        found = []
        for gemm in GEMMS:
            native = self.launches[gemm]
            for cell, launch in (("native", native), ("full_k", native._replace(grid=self.full_k_grid))):
                found.append((gemm, cell, launch, cut(self.spec, gemm, blocks, launch)))
        return found


def tile_class(partition: Partition, block: int, n_tile: int) -> int:
    """0: direct; else the number of slices of a tile beyond the direct ones, 3 standing for more."""
    if block * partition.n_tiles + n_tile < partition.direct_tiles:
        return 0
    return min(len(partition.slices(block, n_tile)), 3)


def classes(partition: Partition) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The class of every tile, int64 [blocks, N-tiles]."""
    size = (partition.blocks, partition.n_tiles)
    return np.array([tile_class(partition, *tile) for tile in np.ndindex(size)], np.int64).reshape(size)


def check_split_routes(prediction: Mapping[str, Any], at: Cut, plans: Plans) -> None:
    """Refuse to draw another partition than the one that the frozen prediction counted with."""
    arms = {(a["cell"], a["history"]): a["split_routes"] for a in prediction["arms"]}
    for gemm, cell, _, partition in at.partitions():
        split = np.flatnonzero((classes(partition) > 1).any(axis=1))
        for history in HISTORIES:
            found = int(np.isin(plans.plans[history].block_of(), split).sum())
            if arms.get((cell, history), {}).get(gemm, found) != found:
                raise InputError(
                    f"{found} routes in split blocks of {gemm}, {cell}/{history}",
                    where=f"prediction of point {at.point}",
                    limit=f"the prediction has {arms[cell, history][gemm]}",
                    way_out="make the prediction again",
                )


def draw(cuts: Sequence[Cut]) -> Figure:
    """One group of strips a point: W13 and W2, at the native grid and at that of `full_k`; blocks along x."""
    group = 4 * (_TITLE + _STRIP) + _FOOT
    figure = sheet(_KEY + sum(_HEAD + len(at.used) * (_TITLE + _ROUTES) + group for at in cuts))
    patches = [Patch(facecolor=color, edgecolor=GREY, lw=0.6, label=label) for color, label, _ in _CLASSES]
    key(figure, patches, len(_CLASSES))
    top = _KEY
    for at in cuts:
        launch = at.launches["w13"]
        head(
            figure,
            top + 0.2,
            f"{at.spec['name']}, point {at.point}: thread_k {launch.thread_k}, thread_n {launch.thread_n}",
        )
        top += _HEAD
        for used in at.used:
            fill = _MARKS[used.source]
            top += _TITLE
            say(figure, _LEFT, top - 0.05, f"Routes, {used.source} plans", size=8.5)
            _routes(place(figure, _LEFT, top, _WIDE, _ROUTES), used, fill, identity(at.spec["name"], at.point))
            top += _ROUTES
        for gemm, cell, launch, partition in at.partitions():
            top += _TITLE
            say(figure, _LEFT, top - 0.07, _counts(gemm, cell, launch, partition), size=8.5)
            axes = place(figure, _LEFT, top, _WIDE, _STRIP)
            _strip(axes, identity(at.spec["name"], at.point, gemm, cell), partition)
            axes.tick_params(labelbottom=False)
            for used in at.used:
                fill = _MARKS[used.source]
                x = [int(used.plans[HISTORIES[0]].block_of()[r]) for r in used.pairs.across or ()]
                axes.plot(x, [-0.5] * len(x), "v", ms=4, color=INK, fillstyle=fill, mew=0.8, clip_on=False, zorder=5)
            top += _STRIP
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("MoE block")
        top += _FOOT
    return figure


def _counts(gemm: str, cell: str, launch: Launch, partition: Partition) -> str:
    found = np.bincount(classes(partition).ravel(), minlength=len(_CLASSES))
    told = ", ".join(f"{n} {label}" for n, (*_, label) in zip(found, _CLASSES, strict=True) if n)
    return f"{_NAMES[gemm]}, {cell}, grid {launch.grid}: {told}"


def _strip(axes: Axes, name: str, partition: Partition) -> None:
    """All tiles of a GEMM: a column a block, a row an N-tile. One path a class, with one piece a run in a column."""
    pieces: dict[int, list[Any]] = {}
    for block, column in enumerate(classes(partition)):
        start = 0
        for kind, run in groupby(column.tolist()):
            length = len(list(run))
            pieces.setdefault(kind, []).append(_TILE * (1, length) + (block - 0.5, start - 0.5))
            start += length
    for kind, mine in pieces.items():
        path = Path(np.concatenate(mine), np.tile(_CODES, len(mine)))
        look = {"facecolor": _CLASSES[kind][0], "edgecolor": PAPER, "lw": 0.3}
        axes.add_patch(PathPatch(path, gid=identity("tiles", name, kind), **look))
    axes.set(xlim=(-0.5, partition.blocks - 0.5), ylim=(partition.n_tiles - 0.5, -0.5))
    axes.set_yticks([0, partition.n_tiles - 1])
    axes.set_ylabel("N-tile", labelpad=-4)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=11))


def _routes(axes: Axes, used: Plans, fill: str, name: str) -> None:
    """The blocks of the exchanged routes, over the strips: across-pair, within-pair, other changed memberships."""
    first, second = (used.plans[h].block_of() for h in HISTORIES)
    blocks = used.plans[HISTORIES[0]].num_blocks
    axes.set(xlim=(-0.5, blocks - 0.5), ylim=(2.5, -0.5))
    axes.axis("off")
    across, within = used.pairs.across, used.pairs.within
    named = {*(across or ()), *(within or ())}
    moved = [r for r in changed_memberships(used.plans[HISTORIES[0]], used.plans[HISTORIES[1]]) if r not in named]
    at = {r: int(first[r]) for r in named}
    rows: list[tuple[str, str, list[int], dict[str, Any]]] = [
        (
            "across",
            f"across: {across[0]} (block {at[across[0]]}) \u21c4 {across[1]} (block {at[across[1]]}) in H0"
            if across
            else "across: no pair",
            [at[r] for r in across or ()],
            {"marker": "v", "ls": "-", "fillstyle": fill},
        ),
        (
            "within",
            f"within: {within[0]} and {within[1]}, block {at[within[0]]}" if within else "within: no pair",
            [at[within[0]]] if within else [],
            {"marker": "s", "fillstyle": fill},
        ),
        (
            "others",
            f"H0 and H1 differ in {len(moved)} other routes",
            sorted({int(block[r]) for r in moved for block in (first, second)}),
            {"marker": "|"},
        ),
    ]
    for y, (kind, label, x, style) in enumerate(rows):
        look: dict[str, Any] = {"color": INK, "ms": 4, "lw": 1, "mew": 0.8, "ls": ""}
        axes.plot(x, [y] * len(x), **(look | style), gid=identity("routes", name, used.source, kind))
        left, right = _widest_gap(x, blocks)
        at_left = left >= 0
        axes.text(left + 1 if at_left else right - 1, y, label, ha="left" if at_left else "right", va="center", size=8)


def _widest_gap(taken: Sequence[int], blocks: int) -> tuple[int, int]:
    """Where a label has most room between marks: the mark to its left (-1: none) and the one to its right."""
    edges = [-1, *sorted(set(taken)), blocks]
    return max(pairwise(edges), key=lambda gap: gap[1] - gap[0])
