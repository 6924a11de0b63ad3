# SPDX-License-Identifier: Apache-2.0
"""Exchange pairs over captured plans: the fixture's where they serve, else the lowest routes that do, else none."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from synthetic import make_fixture

from routeblock.moe.routing import AlignedPlan, exchange
from routeblock.route_block.fixtures.exchange import BY_SEARCH, exchange_for
from routeblock.route_block.fixtures.fixture import LayerFixture


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> LayerFixture:
    return make_fixture(tmp_path_factory.mktemp("exchange") / "fixture")


def mates(fixture: LayerFixture, plan: AlignedPlan, *, same_block: bool) -> list[tuple[int, int]]:
    """Pairs of routes of one expert in one block, or in two."""
    owner, experts = plan.block_of().tolist(), fixture.topk_ids.reshape(-1).tolist()
    return [
        (a, b)
        for a, b in combinations(range(len(experts)), 2)
        if experts[a] == experts[b] and (owner[a] == owner[b]) is same_block
    ]


def test_the_fixtures_pairs_are_kept_where_they_serve(fixture: LayerFixture) -> None:
    found = exchange_for(fixture, fixture.plans)
    within, across = fixture.pairs.within, fixture.pairs.across
    assert within is not None and across is not None
    assert (found["within"], found["across"]) == (list(within), list(across))
    assert found["chosen"] == "within by construction, across by construction"
    assert "why" not in found


def test_a_pair_that_no_longer_serves_is_replaced_by_the_lowest_that_does(fixture: LayerFixture) -> None:
    first, (a, b) = fixture.plans["H0"], fixture.pairs.across or (0, 0)
    other = next(p for p in mates(fixture, first, same_block=False) if not {a, b} & set(p))
    second = exchange(first, *other)
    found = exchange_for(fixture, {"H0": first, "H1": second})
    assert found["across"] == list(other)  # the only two routes whose blocks are opposite
    assert found["chosen"] == f"within by construction, across {BY_SEARCH}"


def test_a_within_pair_stands_in_one_block_in_both_histories(fixture: LayerFixture) -> None:
    first, within = fixture.plans["H0"], fixture.pairs.within or (0, 0)
    stranger = next(
        p
        for p in mates(fixture, first, same_block=False)
        if within[0] in p and not set(fixture.pairs.across or ()) & {*p}
    )
    second = exchange(first, *stranger)
    found = exchange_for(fixture, {"H0": first, "H1": second})
    assert found["within"] != list(within) and f"within {BY_SEARCH}" in found["chosen"]
    for plan in (first, second):
        assert tuple(found["within"]) in mates(fixture, plan, same_block=True)
    lowest = set(mates(fixture, first, same_block=True)) & set(mates(fixture, second, same_block=True))
    assert tuple(found["within"]) == min(lowest)


def test_captures_with_one_plan_have_no_across_pair(fixture: LayerFixture) -> None:
    plan = fixture.plans["H1"]
    found = exchange_for(fixture, {"H0": plan, "H1": plan})
    assert found["across"] is None and found["within"] == list(fixture.pairs.within or ())
    assert found["why"] == "no across pair in the captured plans"
    assert found["chosen"] == "within by construction"


def test_a_fixture_without_pairs_gets_them_by_search_alone(tmp_path: Path) -> None:
    bare = make_fixture(tmp_path / "bare", pairs=False)
    found = exchange_for(bare, bare.plans)
    assert found["chosen"] == f"within {BY_SEARCH}, across {BY_SEARCH}"
    for a, b in (found["within"], found["across"]):
        assert bare.topk_ids.reshape(-1)[a] == bare.topk_ids.reshape(-1)[b]
    first, second = (bare.plans[h].block_of() for h in ("H0", "H1"))
    a, b = found["across"]
    assert first[a] != first[b] and (first[a], first[b]) == (second[b], second[a])
