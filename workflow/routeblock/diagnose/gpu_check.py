# SPDX-License-Identifier: Apache-2.0
"""What the check of launches and predictions on a GPU runs: shapes, and layers and plans drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.classes import block_classes, cut_of, tile_classes
from routeblock.diagnose.layer import GEMMS, Layer
from routeblock.diagnose.routings import draw
from routeblock.moe.launches import Launch
from routeblock.moe.marlin_launch import Weights
from routeblock.moe.routing import AlignedPlan, align, block_size_for

# (N, K, group, dtype, zero points, experts, tokens, top-k): none of them in moe/launches.py.
SHAPES = (
    (2816, 2048, 128, "float16", True, 60, 256, 4),
    (2048, 1408, 64, "bfloat16", True, 60, 256, 4),
    (1024, 2048, 128, "bfloat16", True, 64, 300, 8),
    (4096, 1536, 32, "float16", False, 32, 64, 4),
    (512, 4096, 128, "float16", True, 16, 16, 2),
    (7168, 256, 128, "bfloat16", False, 32, 512, 8),
)
STUDY = Layer(2048, 768, 128, 8, Weights("float16", True, 128))
STUDY_TOKENS = 21
GRIDS = (246, 200, 528)
SEED = 20251201
PLANS = 2000
# Slices of a tile wait for one another: all blocks of a grid must be resident, and every block size admits two an SM.
LEAST_SMS = 108


@dataclass(frozen=True)
class Case:
    """One layer, batch and launch, and how many random legal plans are compared with the canonical one.

    ids: expert ids [tokens, top_k]. classes: the class of each block of the canonical partition, in W13 and W2.
    """

    layer: Layer
    tokens: int
    launch: Launch
    plans: int
    ids: NDArray[Any]
    classes: tuple[NDArray[np.int64], NDArray[np.int64]]
    rng: np.random.Generator

    @property
    def base(self) -> AlignedPlan:
        """The canonical plan."""
        return align(self.ids, self.layer.experts, self._block_size)

    @property
    def _block_size(self) -> int:
        return block_size_for(self.tokens, self.layer.top_k, self.layer.experts)

    def orders(self) -> Iterator[AlignedPlan]:
        """The random plans, once: they are drawn from the generator that the next case goes on with."""
        for _ in range(self.plans):
            yield align(self.ids, self.layer.experts, self._block_size, self.rng.permutation(self.ids.size))

    def predicted(self, home: NDArray[Any], away: NDArray[Any]) -> list[NDArray[np.bool_]]:
        """Rows of W13 and of W2 that may change: routes whose block, `home` then `away`, has another class."""
        return [classes[home] != classes[away] for classes in self.classes]


def drawn_layers(rng: np.random.Generator) -> list[tuple[Layer, int, Launch]]:
    """Five shapes, batches and launches from a seed."""
    found: list[tuple[Layer, int, Launch]] = []
    while len(found) < 5:
        layer = Layer(
            128 * int(rng.integers(4, 33)), 128 * int(rng.integers(2, 13)), int(rng.choice([16, 32, 64, 128])),
            int(rng.choice([2, 4, 8])),
            Weights(str(rng.choice(["float16", "bfloat16"])), bool(rng.integers(2)), int(rng.choice([32, 64, 128]))),
        )  # fmt: skip
        found.append((layer, int(rng.integers(12, 400)), Launch(64, 128, int(rng.integers(40, 2 * LEAST_SMS)))))
    return found


def cases(plans: int) -> Iterator[Case]:
    """A third of `plans` at each grid of the study's shape, a fifth at each drawn one.

    All plans of a case must be drawn before the next case is.
    """
    rng = np.random.default_rng(SEED)
    for grid in GRIDS:
        yield _case(STUDY, STUDY_TOKENS, Launch(64, 128, grid), -(-plans // len(GRIDS)), rng)
    for layer, tokens, launch in drawn_layers(rng):
        yield _case(layer, tokens, launch, -(-plans // 5), rng)


def _case(layer: Layer, tokens: int, launch: Launch, plans: int, rng: np.random.Generator) -> Case:
    ids = draw(tokens, layer.top_k, layer.experts, int(rng.integers(2**32)))[0]
    # Some experts are popular, so that blocks straddle.
    popular = rng.random(tokens) < 0.6
    ids[popular, 0] = np.where((ids[popular, 1:] == layer.experts - 3).any(axis=1), ids[popular, 0], layer.experts - 3)
    blocks = align(ids, layer.experts, block_size_for(tokens, layer.top_k, layer.experts)).num_blocks
    tiles = [tile_classes(cut_of(layer, gemm, blocks, launch)) for gemm in GEMMS]
    classes = (block_classes(tiles[0]), block_classes(np.concatenate(tiles, axis=1)))
    return Case(layer, tokens, launch, plans, ids, classes, rng)
