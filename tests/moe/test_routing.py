# SPDX-License-Identifier: Apache-2.0
"""Alignment, plan identity, plan edits, and what a plan is refused for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeblock.errors import InputError
from routeblock.moe.routing import (
    AlignedPlan,
    align,
    block_size_for,
    changed_memberships,
    check_plan,
    exchange,
)

IDS = np.array([[0, 2], [0, 3], [0, 2], [0, 1], [0, 2], [0, 3], [0, 2], [0, 1], [0, 2], [0, 3]], np.int32)


def by_hand(ids: np.ndarray, num_experts: int, block_size: int, arrival: np.ndarray) -> tuple[list[int], list[int]]:
    """Alignment one route at a time."""
    queues: dict[int, list[int]] = {e: [] for e in range(num_experts)}
    for r in arrival:
        queues[int(ids.reshape(-1)[r])].append(int(r))
    rows, experts = [], []
    for e, queue in queues.items():
        while len(queue) % block_size:
            queue.append(ids.size)
        rows += queue
        experts += [e] * (len(queue) // block_size)
    return rows, experts


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.sampled_from([8, 16, 32, 48, 64]), st.integers(0, 2**32 - 1))
def test_alignment_equals_one_route_at_a_time(tokens: int, top_k: int, block_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 9, (tokens, top_k))
    arrival = rng.permutation(ids.size)
    plan = align(ids, 9, block_size, arrival)
    rows, experts = by_hand(ids, 9, block_size, arrival)
    assert plan.sorted_token_ids.tolist() == rows
    assert plan.expert_ids.tolist() == experts
    assert plan.num_tokens_post_padded == len(rows)
    assert check_plan(plan, ids, 9, where="test") is plan


def test_exchange_inside_a_block_keeps_the_fingerprint_and_over_a_boundary_changes_it() -> None:
    plan = align(IDS, 4, 8)  # expert 0 has ten routes: blocks of 8 and 2
    inside, over = exchange(plan, 0, 2), exchange(plan, 0, 18)
    assert inside.fingerprint() == plan.fingerprint()
    assert not np.array_equal(inside.sorted_token_ids, plan.sorted_token_ids)
    assert over.fingerprint() != plan.fingerprint()
    assert changed_memberships(plan, over) == [0, 18]
    assert exchange(over, 0, 18).fingerprint() == plan.fingerprint()


def test_the_fingerprint_is_the_canonical_json_of_expert_block_and_sorted_routes() -> None:
    plan = align(np.array([[1], [0], [1]]), 2, 8)
    assert plan.blocks() == [[0, 0, [1]], [1, 0, [0, 2]]]
    # printf '[[0,0,[1]],[1,0,[0,2]]]' | sha256sum
    assert plan.fingerprint() == "44ab1572e92854132b0487a4b1d17e1139415b49b56cefc0d27b5f4ef8509290"


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(4097, 16, 128), (128, 2, 32)])
def test_stable_order_has_one_fingerprint_and_arrival_orders_have_many(tokens: int, top_k: int, experts: int) -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, experts, (tokens, top_k))
    stable = {align(ids, experts, 64).fingerprint() for _ in range(100)}
    plans = [align(ids, experts, 64, rng.permutation(ids.size)) for _ in range(100)]
    assert len(stable) == 1
    small = int(np.bincount(ids.reshape(-1)).max()) <= 64
    assert len({p.fingerprint() for p in plans}) == (1 if small else 100)
    if not small:
        moved = changed_memberships(plans[0], plans[1])
        assert moved and all((np.bincount(ids.reshape(-1)) > 64)[ids.reshape(-1)[r]] for r in moved)


def test_what_stands_beyond_the_padded_count_is_not_read() -> None:
    plan = align(IDS, 4, 8)
    tail = np.concatenate([plan.sorted_token_ids, np.full(24, 12345, np.int32)])
    longer = dataclasses.replace(plan, sorted_token_ids=tail)
    assert longer.fingerprint() == plan.fingerprint()
    check_plan(longer, IDS, 4, where="test")


def test_routes_of_experts_elsewhere_take_no_slot() -> None:
    ids = np.array([[0, -1], [3, 2], [7, 2]])
    plan = align(ids, 4, 8, expert_map=np.array([-1, 0, 1, 2], np.int32))
    assert plan.blocks() == [[1, 0, [3, 5]], [2, 0, [2]]]
    assert plan.block_of().tolist() == [-1, -1, 1, 0, -1, 0]


@pytest.mark.parametrize("bad", [-1, -2, 4])
def test_an_expert_that_does_not_exist_is_refused_without_a_map(bad: int) -> None:
    ids = IDS.copy()
    ids[3, 1] = bad
    with pytest.raises(InputError, match=f"expert id {bad} at token 3, slot 1"):
        align(ids, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"topk_ids": IDS.astype(np.float32)}, "float32"),
        ({"topk_ids": IDS.reshape(-1)}, "integers of shape"),
        ({"block_size": 0}, "block size 0"),
        ({"block_size": 24}, "block size 24"),
        ({"num_experts": 0}, "0 experts"),
        ({"arrival": np.zeros(20, int)}, "permutation"),
        ({"arrival": np.arange(19)}, "19 entries"),
        ({"expert_map": np.arange(3)}, "expert map of shape"),
    ],
)
def test_bad_alignment_input_is_refused(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(InputError, match=match):
        align(**({"topk_ids": IDS, "num_experts": 4, "block_size": 8} | arguments))  # type: ignore[arg-type]


def edited(plan: AlignedPlan, changes: dict[int, int]) -> AlignedPlan:
    ids = plan.sorted_token_ids.copy()
    for place, value in changes.items():
        ids[place] = value
    return dataclasses.replace(plan, sorted_token_ids=ids)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({0: 20}, "sentinel before a route"),
        ({9: 20}, "routes"),
        ({0: 2}, "route 0 stands 0 times"),
        ({0: 7, 16: 0}, "its expert is"),
        ({0: -1}, "entry -1"),
        ({0: 21}, "entry 21"),
        ({8: 20, 10: 16}, "sentinel before a route"),
    ],
)
def test_a_plan_that_loses_repeats_or_misplaces_a_route_is_refused(changes: dict[int, int], match: str) -> None:
    plan = align(IDS, 4, 8)
    with pytest.raises(InputError, match=match):
        check_plan(edited(plan, changes), IDS, 4, where="test")


def test_an_exchange_over_experts_is_refused() -> None:
    plan = align(IDS, 4, 8)
    for pair in ((0, 1), (0, 0), (0, 99)):
        with pytest.raises(InputError, match="exchange of routes"):
            exchange(plan, *pair)


def test_all_routes_to_one_expert_and_no_routes_at_all() -> None:
    ids = np.zeros((5, 1), np.int32)
    assert align(ids, 3, 8).blocks() == [[0, 0, [0, 1, 2, 3, 4]]]
    empty = align(np.zeros((0, 2), np.int32), 3, 8)
    assert (empty.num_tokens_post_padded, empty.blocks()) == (0, [])


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block"),
    [(21, 8, 128, 8), (128, 4, 128, 8), (128, 4, 16, 48), (128, 4, 8, 64), (16384, 8, 128, 64)],
)
def test_block_size_follows_the_local_expert_count(tokens: int, top_k: int, experts: int, block: int) -> None:
    assert block_size_for(tokens, top_k, experts) == block
