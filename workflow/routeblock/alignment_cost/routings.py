# SPDX-License-Identifier: Apache-2.0
"""The routings of an operating point, and what alignment has to make of them: a CPU can recompute both."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

from routeblock.alignment_cost.protocol import Point
from routeblock.moe.routing import AlignedPlan, align


def draw(point: Point, seed: int) -> list[NDArray[np.int32]]:
    """`point.routings` routings, int32 [tokens, top_k] each: distinct experts, all alike probable."""
    found = []
    for number in range(point.routings):
        rng = np.random.Generator(np.random.PCG64([seed, point.experts, point.top_k, point.tokens, number]))
        order = np.argsort(rng.random((point.tokens, point.experts)), axis=1)
        found.append(np.ascontiguousarray(order[:, : point.top_k], np.int32))
    return found


def canonical(point: Point, ids: NDArray[np.int32]) -> AlignedPlan:
    """The reference's plan of one routing."""
    return align(ids, point.experts, point.block_size)


def plan_digest(plan: AlignedPlan) -> str:
    """SHA-256 over sorted_token_ids and expert_ids, as far as they are used, int32 little-endian."""
    digest = hashlib.sha256(plan.sorted_token_ids[: plan.num_tokens_post_padded].astype("<i4").tobytes())
    digest.update(plan.expert_ids[: plan.num_blocks].astype("<i4").tobytes())
    return digest.hexdigest()


@cache
def digests(point: Point, seed: int) -> tuple[str, ...]:
    """The digest of the canonical plan of each routing of a point."""
    return tuple(plan_digest(canonical(point, ids)) for ids in draw(point, seed))
