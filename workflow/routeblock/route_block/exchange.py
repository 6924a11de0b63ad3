# SPDX-License-Identifier: Apache-2.0
"""Exchange pairs for captured plans: the fixture's where they serve, else the lowest that do, else none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

from routeblock.moe.routing import AlignedPlan
from routeblock.route_block.cells import HISTORIES
from routeblock.route_block.fixture import LayerFixture

Pair = tuple[int, int]
BY_SEARCH = "by search"


def exchange_for(fixture: LayerFixture, plans: Mapping[str, AlignedPlan]) -> dict[str, Any]:
    """The `exchange` entry of a prediction over captured plans: pairs, how each was chosen, from which data.

    within: two routes in one block in both histories. across: two routes of one expert in different blocks, opposite
    in the two histories. The fixture's pair is kept where this holds; otherwise the lowest pair of routes is taken.
    """
    owner = {history: plans[history].block_of().tolist() for history in HISTORIES}
    experts = fixture.topk_ids.reshape(-1).tolist()
    serves: dict[str, Callable[[int, int], bool]] = {
        "within": lambda a, b: all(o[a] == o[b] for o in owner.values()),
        "across": lambda a, b: (
            owner["H0"][a] != owner["H0"][b] and owner["H0"][a] == owner["H1"][b] and owner["H0"][b] == owner["H1"][a]
        ),
    }
    entry: dict[str, Any] = {"within": None, "across": None}
    chosen, why = [], []
    for name, given in (("within", fixture.pairs.within), ("across", fixture.pairs.across)):
        legal = serves[name]
        if given and experts[given[0]] == experts[given[1]] and legal(*given):
            entry[name] = list(given)
            chosen.append(f"{name} {fixture.spec['exchange'].get('chosen', 'by the fixture')}")
            continue
        pairs = combinations(range(len(experts)), 2)
        found = next(((a, b) for a, b in pairs if experts[a] == experts[b] and legal(a, b)), None)
        if found:
            entry[name] = list(found)
            chosen.append(f"{name} {BY_SEARCH}")
        else:
            why.append(f"no {name} pair in the captured plans")
    entry["chosen"] = ", ".join(chosen) or "none"
    entry["from"] = "the captured plans: the fixture's pair where it serves, else the lowest routes that do"
    return {**entry, "why": ", ".join(why)} if why else entry
