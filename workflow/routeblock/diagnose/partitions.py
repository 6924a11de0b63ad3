# SPDX-License-Identifier: Apache-2.0
"""What one routing's GEMMs look like: tiles, direct and split, and the experts whose blocks are cut differently."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.classes import cut_of, tile_classes
from routeblock.diagnose.engine import Engine
from routeblock.diagnose.layer import GEMMS
from routeblock.diagnose.routings import Routings, counts
from routeblock.moe.partition import Partition


def partition_document(engine: Engine, some: Routings, full_k: bool) -> list[dict[str, Any]]:
    """The partition of the first of `some` routings, one entry a rank, as JSON."""
    launches = engine.launches_at(some.tokens)
    assert launches is not None
    block, found = engine.block_size_at(some.tokens), []
    whole = counts(some.ids, engine.layer.experts)[0]
    for rank, local in engine.ranks():
        per_expert = -(-whole[local] // block)
        blocks, gemms, tiles = int(per_expert.sum()), {}, []
        for gemm in GEMMS:
            cut = cut_of(engine.layer, gemm, blocks, launches[gemm], full_k)
            classes = tile_classes(cut)
            tiles.append(classes)
            split = np.argwhere(classes > 0)
            gemms[gemm] = {
                "launch": list(launches[gemm]),
                "n_tiles": cut.n_tiles,
                "k_tiles": cut.k_tiles,
                "tiles": cut.tiles,
                "direct_tiles": cut.direct_tiles,
                "k_tiles_of_a_slice": cut.iters,
                "slices_at_most": slices_at_most(classes, cut),
                "split_tiles": len(split),
                "first_split": split[0].tolist() if len(split) else None,
                "blocks_with_a_split": int((classes > 0).any(axis=1).sum()),
            }
        found.append(
            {
                "rank": rank,
                "tokens": some.tokens,
                "block_size": block,
                "blocks": blocks,
                "routes": int(whole[local].sum()),
                "gemms": gemms,
                "straddling_experts": _straddling(per_expert, local),
                "parted_experts": _parted_experts(some, whole, local, per_expert, tiles),
            }
        )
    return found


def slices_at_most(classes: NDArray[np.int64], cut: Partition) -> int:
    """The most slices of a tile: of two partial sums the order never matters, of three it does."""
    first = classes[classes > 0]
    return int(2 + (cut.k_tiles - 1 - first).max() // cut.iters) if first.size else 1


def _straddling(per_expert: NDArray[np.int64], local: slice) -> list[dict[str, Any]]:
    """Experts with several blocks: arrival order decides which of their routes lie in which."""
    starts = np.cumsum(per_expert) - per_expert
    return [
        {"expert": int(e) + local.start, "blocks": [int(starts[e]), int(starts[e] + per_expert[e]) - 1]}
        for e in np.flatnonzero(per_expert > 1)
    ]


def _parted_experts(
    some: Routings,
    whole: NDArray[np.int64],
    local: slice,
    per_expert: NDArray[np.int64],
    tiles: list[NDArray[np.int64]],
) -> list[dict[str, Any]]:
    starts = np.cumsum(per_expert) - per_expert
    flat, found = some.ids[0].ravel(), []
    for number in np.flatnonzero(per_expert > 1):
        first, last = int(starts[number]), int(starts[number] + per_expert[number])
        parts = {gemm: len(np.unique(classes[first:last], axis=0)) for gemm, classes in zip(GEMMS, tiles, strict=True)}
        if max(parts.values()) > 1:
            expert = int(number) + local.start
            routes = np.flatnonzero(flat == expert)
            found.append(
                {
                    "expert": expert,
                    "blocks": [first, last - 1],
                    "classes": parts,
                    "routes": routes.tolist(),
                    "tokens": sorted({int(r) // some.ids.shape[2] for r in routes}),
                }
            )
    return found
