# SPDX-License-Identifier: Apache-2.0
"""Alignment and partition for any routing and launch: nothing lost, nothing twice, nothing that order could change."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from routeblock.moe.partition import BLOCK_SIZES, partition, thread_sizes
from routeblock.moe.routing import AlignedPlan, align, check_plan

EXPERTS = 7
SEEDS = st.integers(0, 2**32 - 1)


def _routing(tokens: int, top_k: int, seed: int) -> np.ndarray:
    """Ids of which some are out of range, as those of other ranks are."""
    return np.random.default_rng(seed).integers(-1, EXPERTS + 2, (tokens, top_k))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.sampled_from(BLOCK_SIZES), SEEDS)
def test_every_route_with_an_expert_here_stands_once_in_a_block_of_its_expert(
    tokens: int, top_k: int, block_size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = _routing(tokens, top_k, seed)
    local = np.where(rng.random(EXPERTS) < 0.3, -1, rng.permutation(EXPERTS)).astype(np.int32)
    plan = align(ids, EXPERTS, block_size, rng.permutation(ids.size), local)
    flat = ids.reshape(-1)
    here = {r for r in range(flat.size) if 0 <= flat[r] < EXPERTS and local[flat[r]] >= 0}
    assert Counter(int(r) for r in plan.sorted_token_ids if r < flat.size) == Counter(here)
    for block in range(plan.num_blocks):
        row = plan.rows[block].tolist()
        routes = [r for r in row if r < flat.size]
        assert routes and row == routes + [flat.size] * (block_size - len(routes))
        assert {int(local[flat[r]]) for r in routes} == {int(plan.expert_ids[block])}
    assert check_plan(plan, ids, EXPERTS, local, where="test") is plan


def _block_sets(plan: AlignedPlan) -> list[tuple[int, frozenset[int]]]:
    return [(int(plan.expert_ids[b]), frozenset(plan.members(b))) for b in range(plan.num_blocks)]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3), SEEDS, SEEDS, st.booleans())
def test_fingerprints_are_equal_exactly_where_the_block_sets_are(
    tokens: int, top_k: int, seed: int, other: int, inside: bool
) -> None:
    ids = np.random.default_rng(seed).integers(0, 2, (tokens, top_k))
    rng = np.random.default_rng(other)
    one = align(ids, 2, 8, rng.permutation(ids.size))
    if inside:  # one that differs inside its blocks alone
        rows = [[*rng.permutation(one.members(b)), *[ids.size] * 8][:8] for b in range(one.num_blocks)]
        flat = np.array(rows, np.int32).reshape(-1)
        two = AlignedPlan(flat, one.expert_ids, flat.size, 8, ids.size)
        assert one.fingerprint() == two.fingerprint()
    else:
        two = align(ids, 2, 8, rng.permutation(ids.size))
    assert (one.fingerprint() == two.fingerprint()) == (_block_sets(one) == _block_sets(two))


@st.composite
def _launches(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    thread_k, thread_n = draw(st.sampled_from([*thread_sizes(8), *thread_sizes(64)]))
    return thread_k, thread_n, draw(st.integers(1, 5)), draw(st.integers(1, 12)), draw(st.integers(1, 300))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 30), _launches(), st.sampled_from([-1, 32, 64, 128]), st.booleans())
def test_every_k_tile_of_every_tile_is_in_one_slice_in_order_and_neighbours_meet(
    blocks: int, launch: tuple[int, int, int, int, int], group: int, full_k: bool
) -> None:
    thread_k, thread_n, n_tiles, k_units, grid = launch
    cut = partition(blocks, n_tiles * thread_n, k_units * 128, thread_n, thread_k, grid, group, full_k)
    shared: list[int] = []
    for tile in range(cut.tiles):
        slices = cut.slices(*divmod(tile, n_tiles))
        assert [k for first, last in slices for k in range(first, last)] == list(range(cut.k_tiles))
        assert all(first < last for first, last in slices)
        shared += [last - first for first, last in slices] if tile >= cut.direct_tiles else []
    # Slices that one CUDA block computes one after another make up its share, and only the last share may be shorter.
    share = 0
    for length in shared[:-1]:
        share += length
        assert share <= cut.iters
        share = 0 if share == cut.iters else share
    assert cut.iters * grid >= sum(shared)
