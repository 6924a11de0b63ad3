# SPDX-License-Identifier: Apache-2.0
"""What the twin makes of some routings of a survey: do the bits change where they can? Only the rows at stake are
computed: the other blocks keep their places in the partition and hold no route.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.layer import Layer
from routeblock.moe.launches import Launch
from routeblock.moe.partition import operator_group
from routeblock.moe.routing import AlignedPlan

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Drawn:
    """A layer's weights for some experts and its inputs, drawn from a seed: any bits serve, none is claimed."""

    layer: Layer
    experts: tuple[int, ...]
    seed: int

    def weights(
        self, n: int, k: int, place: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None, NDArray[np.generic]]:
        """(q, zeros, scales) of a GEMM for the experts in order."""
        kind = self.layer.weights
        group = operator_group(kind.group_size, k)
        shape = len(self.experts), 1 if group == -1 else k // group, n
        rng = np.random.Generator(np.random.PCG64([self.seed, place]))
        q = rng.integers(0, 16, (len(self.experts), k, n), dtype=np.uint8)
        zeros = rng.integers(4, 12, shape, dtype=np.uint8) if kind.zero_points else None
        return q, zeros, (rng.random(shape) * 0.006 + 0.002).astype(DTYPES[kind.dtype])

    def hidden(self, tokens: int) -> NDArray[np.generic]:
        """Hidden states [tokens, hidden]."""
        rng = np.random.Generator(np.random.PCG64([self.seed, 0]))
        drawn = rng.standard_normal((tokens, self.layer.hidden), dtype=np.float32) * 0.5
        return drawn.astype(DTYPES[self.layer.weights.dtype])


def only(plan: AlignedPlan, experts: Sequence[int], *, first_blocks: bool = False) -> AlignedPlan:
    """The plan with the routes of these experts alone (of their first blocks if `first_blocks`): ids are rows of
    `experts`; the slots of all other blocks hold no route, and their expert is any.
    """
    rows = np.full(int(plan.expert_ids.max(initial=0)) + 1, -1, np.int32)
    for row, expert in enumerate(experts):
        if expert < len(rows):
            rows[expert] = row
    kept = rows[plan.expert_ids]
    if first_blocks:
        kept[1:][plan.expert_ids[1:] == plan.expert_ids[:-1]] = -1
    slots = plan.sorted_token_ids.copy()
    slots[np.repeat(kept < 0, plan.block_size)] = plan.num_routes
    return dataclasses.replace(plan, sorted_token_ids=slots, expert_ids=np.maximum(kept, 0))


class Sample:
    """One routing's computation by the twin; weights and inputs are drawn once and every plan gets the same."""

    def __init__(self, layer: Layer, architecture: str, tokens: int, experts: Sequence[int], seed: int) -> None:
        self.layer, self.architecture = layer, architecture
        self.drawn = Drawn(layer, tuple(experts), seed)
        self.x = self.drawn.hidden(tokens)
        self.parts = {
            gemm: self.drawn.weights(*layer.gemm(gemm, 1)[:2], place) for place, gemm in ((1, "w13"), (2, "w2"))
        }

    def rows(
        self, plan: AlignedPlan, launches: dict[str, Launch], tokens: int | None = None, *, first_blocks: bool = False
    ) -> dict[str, NDArray[np.uint16]]:
        """Bits of the W13 and W2 outputs, uint16 [routes, N] each; rows of what `only` leaves out are 0.

        tokens: that many of the inputs, from the first; default all.
        """
        from routeblock.twin.gemm import moe_gemm
        from routeblock.twin.layer import silu_and_mul

        mine = only(plan, self.drawn.experts, first_blocks=first_blocks)
        found, x, top_k = {}, self.x[:tokens], self.layer.top_k
        for gemm in ("w13", "w2"):
            q, zeros, scales = self.parts[gemm]
            launch = launches[gemm]
            out = moe_gemm(
                x, q, zeros, scales, mine, top_k=top_k, architecture=self.architecture, thread_k=launch.thread_k,
                thread_n=launch.thread_n, grid=launch.grid,
                group_size=operator_group(self.layer.weights.group_size, q.shape[1]),
            )  # fmt: skip
            found[gemm] = out.view(np.uint16)
            x, top_k = silu_and_mul(out) if gemm == "w13" else x, 1
        return found


def ulps(first: NDArray[np.uint16], second: NDArray[np.uint16]) -> int:
    """The largest distance of two arrays of floats in steps of their format."""
    ordered = [
        np.where(b >> 15, -(b & 0x7FFF).astype(np.int64), (b & 0x7FFF).astype(np.int64)) for b in (first, second)
    ]
    return int(np.abs(ordered[0] - ordered[1]).max(initial=0))
