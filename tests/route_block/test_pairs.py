# SPDX-License-Identifier: Apache-2.0
"""Pair search and derived plans, held against the partition itself."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from routeblock.moe.launches import Launch
from routeblock.moe.partition import partition
from routeblock.moe.routing import AlignedPlan, align, changed_memberships, check_plan
from routeblock.route_block.fixtures import published_geometry as published
from routeblock.route_block.fixtures.pair_search import classes, find_pairs, straddles

PUBLISHED = {"w13": Launch(64, 128, 246), "w2": Launch(64, 128, 246)}
SPEC = {"hidden": 2048, "intermediate": 768, "group_size": 128}


def slices(plan: AlignedPlan, block: int, launch: Launch, n: int, k: int) -> list[Any]:
    cut = partition(plan.num_blocks, n, k, launch.thread_n, launch.thread_k, launch.grid, 128)
    return [cut.slices(block, tile) for tile in range(n // launch.thread_n)]


def routing(seed: int, tokens: int = 40, experts: int = 64, top_k: int = 4) -> np.ndarray[Any, np.dtype[np.int32]]:
    rng = np.random.default_rng(seed)
    p = np.exp(rng.normal(0, 1.5, experts))
    return np.stack([rng.choice(experts, top_k, replace=False, p=p / p.sum()) for _ in range(tokens)]).astype(np.int32)


def test_published_routing_has_one_straddling_expert_the_published_one() -> None:
    ids = published.draw_routing(np.random.default_rng(0))
    plan = align(ids, 128, 8)
    at = classes(SPEC, plan.num_blocks, PUBLISHED)
    found = [(s.expert, s.first, s.second) for s in straddles(plan, [at]) if at.differ(s.first, s.second)]
    assert found == [(106, 40, 41)]


GEMM_SHAPES = {"w13": (1536, 2048), "w2": (2048, 768)}


def told_apart(plan: AlignedPlan, gemm: str) -> list[tuple[int, int]]:
    """Block pairs of one expert that a GEMM cuts differently, by brute force."""
    cuts = [slices(plan, b, PUBLISHED[gemm], *GEMM_SHAPES[gemm]) for b in range(plan.num_blocks)]
    pairs = combinations(range(plan.num_blocks), 2)
    return [(a, b) for a, b in pairs if plan.expert_ids[a] == plan.expert_ids[b] and cuts[a] != cuts[b]]


@pytest.mark.parametrize("seed", range(16))
def test_found_pairs_and_plans_are_what_they_are_called(seed: int) -> None:
    ids = routing(seed)
    canonical = align(ids, 64, 8)
    by_w13, by_w2 = told_apart(canonical, "w13"), told_apart(canonical, "w2")
    found = find_pairs(ids, 64, 8, SPEC, [PUBLISHED])
    first, second = found.plans["H0"], found.plans["H1"]
    for plan in (first, second):
        check_plan(plan, ids, 64, where="test")
    assert (found.pairs.across is not None) == bool(by_w13 or by_w2)
    if found.pairs.across:
        home, away = ([int(p.block_of()[r]) for r in found.pairs.across] for p in (first, second))
        assert home == away[::-1]
        assert tuple(sorted(home)) in (by_w13 or by_w2)
    assert found.pairs.within is not None
    for plan in (first, second):
        assert len({int(plan.block_of()[r]) for r in found.pairs.within}) == 1
    others = sorted(set(changed_memberships(first, second)) - set(found.pairs.across or ()))
    for route in others:
        home, away = int(first.block_of()[route]), int(second.block_of()[route])
        for gemm, shape in GEMM_SHAPES.items():
            assert slices(first, home, PUBLISHED[gemm], *shape) == slices(first, away, PUBLISHED[gemm], *shape)
    told = {f["fact"]: f["holds"] for f in found.facts}
    assert told.pop("canonical order differs in a class from H0 and from H1") == any(
        any(tuple(sorted((int(canonical.block_of()[r]), int(first.block_of()[r])))) in by_w13 + by_w2 for r in moved)
        for moved in [changed_memberships(canonical, first)]
    )
    assert all(holds for fact, holds in told.items() if by_w13 or "W13 cuts" not in fact)
    assert found.exchange["chosen"] == "by search" and ("why" in found.exchange) == (found.pairs.across is None)


def test_some_routings_have_pairs_and_some_have_none() -> None:
    kinds = [find_pairs(routing(seed), 64, 8, SPEC, [PUBLISHED]).pairs.across is None for seed in range(16)]
    assert 0 < sum(kinds) < 16


def test_search_is_deterministic() -> None:
    assert (
        find_pairs(routing(3), 64, 8, SPEC, [PUBLISHED]).exchange
        == find_pairs(routing(3), 64, 8, SPEC, [PUBLISHED]).exchange
    )


def test_without_an_expert_of_two_blocks_there_is_no_across_pair_and_it_says_so() -> None:
    ids = np.arange(64, dtype=np.int32).reshape(16, 4)
    found = find_pairs(ids, 64, 8, SPEC, [PUBLISHED])
    assert found.pairs.across is None and found.pairs.within is None
    assert "no expert has more than one block" in found.exchange["why"]
    assert "no block holds two routes" in found.exchange["why"]
    assert found.plans["H0"].fingerprint() == found.plans["H1"].fingerprint()


def test_where_every_block_is_cut_alike_there_is_no_across_pair_and_it_says_so() -> None:
    ids = routing(1)
    blocks = align(ids, 64, 8).num_blocks
    single = {"w13": Launch(64, 128, blocks * 12), "w2": Launch(64, 128, blocks * 16)}
    found = find_pairs(ids, 64, 8, SPEC, [single])
    assert found.pairs.across is None and found.pairs.within is not None
    assert "cut alike" in found.exchange["why"]
    assert not all(f["holds"] for f in found.facts)  # canonical order is H0 there


def test_sensitivity_decides_among_legal_pairs() -> None:
    ids = routing(5)
    plain = find_pairs(ids, 64, 8, SPEC, [PUBLISHED])
    canonical = align(ids, 64, 8)
    at = classes(SPEC, canonical.num_blocks, PUBLISHED)
    chosen = next(s for s in straddles(canonical, [at]) if len(canonical.members(s.second)) > 2)
    one, two = canonical.members(chosen.first), canonical.members(chosen.second)
    surfaces = frozenset({"w13", "activation", "w2", "final"})

    def look(plan: AlignedPlan, pairs: Any) -> list[dict[int, frozenset[str]]]:
        assert all(plan.expert_ids[a] == plan.expert_ids[b] for a, b in pairs)
        return [{one[2]: surfaces, two[1]: frozenset({"final"})}]

    found = find_pairs(ids, 64, 8, SPEC, [PUBLISHED], look)
    assert found.pairs.across is not None and one[2] in found.pairs.across
    assert found.pairs.across != plain.pairs.across
    assert "twin changes all four surfaces" in found.exchange["from"]
    nothing = find_pairs(ids, 64, 8, SPEC, [PUBLISHED], lambda plan, pairs: [{}])
    assert nothing.pairs == plain.pairs
    assert "changes no pair" in nothing.exchange["from"]
