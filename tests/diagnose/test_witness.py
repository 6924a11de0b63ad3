# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from drawn import layer

from routeblock.diagnose.layer_run import GEMMS, LayerInputs, Run, Setting, bits
from routeblock.diagnose.witness import document, witness
from routeblock.errors import InputError
from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan, align, exchange
from routeblock.twin.layer import SURFACES

SPLIT, SINGLE = Launch(64, 128, 37), Launch(64, 128, 20)  # 20 tiles in both GEMMs


@pytest.fixture(scope="module")
def case() -> tuple[LayerInputs, AlignedPlan]:
    rng = np.random.default_rng(19)
    inputs = layer(rng, tokens=16, top_k=2, experts=3, hidden=512, intermediate=256, group_size=128)
    return inputs, align(inputs.topk_ids, 3, 8)


def settings(launch: Launch) -> dict[str, Setting]:
    return dict.fromkeys(GEMMS, Setting(launch, "hopper"))


def every_exchange(inputs: LayerInputs, plan: AlignedPlan, launch: Launch) -> dict[tuple[int, int], dict[str, object]]:
    """What each exchange over a block boundary changes, by computing the whole layer for each."""
    owner, expert = plan.block_of(), inputs.topk_ids.reshape(-1)
    before = Run("plan", inputs, plan, settings(launch))
    found = {}
    for a, b in combinations(range(plan.num_routes), 2):
        if expert[a] == expert[b] and owner[a] != owner[b]:
            after = Run("edited", inputs, exchange(plan, a, b), settings(launch))
            found[a, b] = {s: bits(before.surfaces[s]) != bits(after.surfaces[s]) for s in SURFACES}
    return found


@pytest.fixture(scope="module")
def plain(case: tuple[LayerInputs, AlignedPlan]) -> dict[tuple[int, int], dict[str, object]]:
    return every_exchange(*case, SPLIT)


@pytest.mark.parametrize("surface", SURFACES)
def test_the_exchanges_that_change_a_surface_are_those_of_plain_search(
    case: tuple[LayerInputs, AlignedPlan], plain: dict[tuple[int, int], dict[str, np.ndarray]], surface: str
) -> None:
    found = witness(*case, settings(SPLIT), surface)
    changing = [pair for pair, changed in plain.items() if changed[surface].any()]
    assert (found.exchanges, found.changing) == (len(plain), len(changing)) and 0 < len(changing) < len(plain)
    assert found.pairs == (min(changing),)
    assert dict(found.changed) == {s: int(plain[min(changing)][s].sum()) for s in SURFACES}


@pytest.mark.parametrize("surface", ["w13", "w2", "final"])
def test_for_an_element_too(
    case: tuple[LayerInputs, AlignedPlan], plain: dict[tuple[int, int], dict[str, np.ndarray]], surface: str
) -> None:
    inputs, plan = case
    ever = np.logical_or.reduce([changed[surface] for changed in plain.values()])
    rng = np.random.default_rng(2)
    row, column = (int(x) for x in np.argwhere(ever)[0])
    found = witness(inputs, plan, settings(SPLIT), surface, (row, column))
    assert found.pairs == (min(p for p, changed in plain.items() if changed[surface][row, column]),)
    for row, column in rng.permutation(np.argwhere(~ever))[:8].tolist():
        quiet = witness(inputs, plan, settings(SPLIT), surface, (row, column))
        assert quiet.changing == 0 and quiet.complete


def test_no_plan_among_many_changes_what_is_proven_not_to_change(case: tuple[LayerInputs, AlignedPlan]) -> None:
    """The proof covers every legal plan, not exchanges alone: random ones must agree with it."""
    inputs, plan = case
    before = Run("plan", inputs, plan, settings(SPLIT))
    changed = {s: np.zeros(bits(before.surfaces[s]).shape, bool) for s in ("w13", "final")}
    rng = np.random.default_rng(6)
    for _ in range(40):
        other = Run("other", inputs, align(inputs.topk_ids, 3, 8, rng.permutation(32)), settings(SPLIT))
        for surface, seen in changed.items():
            seen |= bits(before.surfaces[surface]) != bits(other.surfaces[surface])
    for surface, seen in changed.items():
        for row, column in rng.permutation(np.argwhere(seen))[:8].tolist():
            assert witness(inputs, plan, settings(SPLIT), surface, (row, column)).pairs


def test_where_every_tile_is_one_slice_no_plan_changes_anything(case: tuple[LayerInputs, AlignedPlan]) -> None:
    found = witness(*case, settings(SINGLE), "final")
    assert found.pairs == () and found.complete and found.classes == 0 and found.exchanges > 0
    assert "no legal plan" in document(found, case[1])["minimality"]


def test_two_exchanges_are_found_where_no_single_one_suffices() -> None:
    rng = np.random.default_rng(24)
    inputs = layer(rng, tokens=16, top_k=3, experts=4, hidden=512, intermediate=256, group_size=32)
    plan, launch = align(inputs.topk_ids, 4, 8), Launch(64, 128, 90)
    token, column = 10, 251
    found = witness(inputs, plan, settings(launch), "final", (token, column))
    assert len(found.pairs) == 2 and found.changing == 0 and found.class_changing > 0 and found.combinations > 0
    before = bits(Run("plan", inputs, plan, settings(launch)).surfaces["final"])
    for pair in found.pairs:
        alone = Run("edited", inputs, exchange(plan, *pair), settings(launch))
        assert bits(alone.surfaces["final"])[token, column] == before[token, column]
    both = Run("edited", inputs, exchange(exchange(plan, *found.pairs[0]), *found.pairs[1]), settings(launch))
    assert bits(both.surfaces["final"])[token, column] != before[token, column]
    assert "2 of one token's routes" in document(found, plan)["minimality"]


def test_an_element_that_does_not_exist_is_refused(case: tuple[LayerInputs, AlignedPlan]) -> None:
    for surface, element in (("w13", (32, 0)), ("final", (16, 0)), ("w14", None)):
        with pytest.raises(InputError):
            witness(*case, settings(SPLIT), surface, element)
