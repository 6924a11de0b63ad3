# SPDX-License-Identifier: Apache-2.0
"""Exchange pairs by search, and stored plans H0 and H1, for a routing that nobody has studied before.

At a launch, two blocks of one expert are of one *class* if W13 and W2 cut them alike. A pair whose routes stand in
blocks of different classes can change bits when it is exchanged; a pair inside one block cannot. Candidates are ordered
by expert, blocks and route numbers, and the first that serves is taken: the search is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan, align, changed_memberships, exchange
from routeblock.route_block.cells import HISTORIES, SURFACES, Pairs
from routeblock.route_block.operating_point import GEMMS, cut, full_k_grid

QUIET_EXCHANGES = 9  # between blocks of one class: 18 changed memberships, as many as in the published study
CHOSEN = "by search"

Launches = Mapping[str, Launch]


@dataclass(frozen=True)
class Classes:
    """The class of each block at one launch of both GEMMs: the slices of all its N-tiles in W13 and in W2."""

    launches: Launches
    w13: list[Any]
    w2: list[Any]

    def differ(self, first: int, second: int) -> bool:
        """Whether W13 cuts two blocks differently."""
        return bool(self.w13[first] != self.w13[second])

    def differ_anywhere(self, first: int, second: int) -> bool:
        """Whether W13 or W2 cuts two blocks differently."""
        return self.differ(first, second) or bool(self.w2[first] != self.w2[second])


def classes(spec: Mapping[str, Any], blocks: int, launches: Launches) -> Classes:
    """The classes of `blocks` blocks; spec gives hidden, intermediate and group_size."""
    found = {}
    for gemm in GEMMS:
        partition = cut(spec, gemm, blocks, launches[gemm])
        found[gemm] = [partition.signature(b) for b in range(blocks)]
    return Classes(launches, found["w13"], found["w2"])


@dataclass(frozen=True)
class Found:
    """Plans, pairs, how they were chosen (for fixture.json) and what was checked about them."""

    plans: dict[str, AlignedPlan]
    pairs: Pairs
    exchange: dict[str, Any]
    facts: list[dict[str, Any]]


@dataclass(frozen=True)
class Straddle:
    """Two blocks of one expert that are of different classes."""

    expert: int
    first: int
    second: int


def straddles(plan: AlignedPlan, at: Sequence[Classes]) -> Iterator[Straddle]:
    """Block pairs of one expert in different classes: those that W13 tells apart at every launch first, then at the
    first launch, then those that only W2 tells apart there.
    """
    pairs = [
        (int(plan.expert_ids[a]), a, b) for a, b in combinations(range(plan.num_blocks), 2) if _one_expert(plan, a, b)
    ]
    ranks = {
        p: 0 if all(c.differ(*p[1:]) for c in at) else 1 if at[0].differ(*p[1:]) else 2
        for p in pairs
        if at[0].differ_anywhere(*p[1:])
    }
    for p in sorted(ranks, key=lambda p: (ranks[p], p)):
        yield Straddle(*p)


def _one_expert(plan: AlignedPlan, first: int, second: int) -> bool:
    return bool(plan.expert_ids[first] == plan.expert_ids[second])


Shown = Mapping[int, frozenset[str]]
# For disjoint block pairs, at each operating point, the surfaces that change when a route alone changes blocks.
Sensitivity = Callable[[AlignedPlan, Sequence[tuple[int, int]]], Sequence[Shown]]


def find_pairs(
    topk_ids: NDArray[np.int32],
    num_experts: int,
    block_size: int,
    spec: Mapping[str, Any],
    launches: Sequence[Launches],
    sensitivity: Sensitivity | None = None,
) -> Found:
    """Search a routing for exchange pairs and derive H0 and H1 from canonical order.

    H0 is canonical order with one exchange across a class boundary, so that canonical order is a third plan. H1 is H0
    with the across-pair exchanged, and with exchanges between blocks that are of one class at every launch given. So H0
    and H1 differ in many memberships, of which the across-pair's alone can matter. `launches` are those of the study,
    the first of them decisive. A pair that does not exist is None, and `exchange["why"]` says so.

    `sensitivity` prefers routes that show their class in the bits: an across-pair that changes all four surfaces at
    every point, else at the first, else the first legal pair. The result says which it was.
    """
    canonical = align(topk_ids, num_experts, block_size)
    distinct = [x for i, x in enumerate(launches) if x not in launches[:i]]
    at = [classes(spec, canonical.num_blocks, x) for x in distinct]
    candidates = list(straddles(canonical, at))
    shown = sensitivity(canonical, _disjoint(candidates)) if sensitivity and candidates else []
    base, across, basis = _across(canonical, candidates, shown)
    first = exchange(canonical, *base) if base else canonical
    second = exchange(first, *across) if across else first
    quiet = list(_quiet(second, at, {*(base or ()), *(across or ())}))
    for pair in quiet:
        second = exchange(second, *pair)
    plans = dict(zip(HISTORIES, (first, second), strict=True))
    within = _within(plans, across)
    return Found(
        plans,
        Pairs(within, across),
        _chosen(within, across, canonical, at, basis),
        _facts(canonical, plans, across, within, quiet, at, spec),
    )


def _disjoint(candidates: Sequence[Straddle]) -> list[tuple[int, int]]:
    """The first candidate of each expert, as blocks."""
    found: dict[int, tuple[int, int]] = {}
    for c in candidates:
        found.setdefault(c.expert, (c.first, c.second))
    return list(found.values())


Pair = tuple[int, int]
STRUCTURE = "no output was looked at"


def _across(
    canonical: AlignedPlan, candidates: Sequence[Straddle], shown: Sequence[Shown]
) -> tuple[Pair | None, Pair | None, str]:
    """The exchange that makes H0 of canonical order, the across-pair, and on what basis they were chosen."""
    pairs = [p for c in candidates for p in product(canonical.members(c.first), canonical.members(c.second))]
    if not pairs:
        return None, None, STRUCTURE
    bases = [
        (len(shown), f"the first pair at which the twin changes all four surfaces at each of {len(shown)} points"),
        (1, "the first pair at which the twin changes all four surfaces at the first point"),
    ]
    for count, basis in bases if shown else ():
        good = [p for p in pairs if all(_surfaces(p, x) == set(SURFACES) for x in shown[:count])]
        for across in good:
            free = [p for p in pairs if not set(p) & set(across)]
            visible = [p for p in free if all("final" in _surfaces(p, x) for x in shown[:count])]
            if visible:
                return visible[0], across, basis
    basis = f"{STRUCTURE} but to find that the twin changes no pair on all four surfaces" if shown else STRUCTURE
    # The earliest routes make H0, so the pair is sought from the end of the same expert's blocks.
    for c in candidates:
        one, two = canonical.members(c.first), canonical.members(c.second)
        if len(one) > 1 and len(two) > 1:
            return (one[0], two[0]), (one[-1], two[-1]), basis
    across = pairs[0]
    return next((p for p in pairs if not set(p) & set(across)), None), across, basis


def _surfaces(pair: Pair, shown: Shown) -> set[str]:
    """The surfaces that change when a pair is exchanged: its routes belong to different tokens."""
    return {s for route in pair for s in shown.get(route, ())}


def _quiet(plan: AlignedPlan, at: Sequence[Classes], taken: set[int]) -> Iterator[tuple[int, int]]:
    """Route pairs in blocks of one expert and one class at every launch, in none of which `taken` routes stand."""
    left, used = QUIET_EXCHANGES, set(taken)
    for a, b in combinations(range(plan.num_blocks), 2):
        if not _one_expert(plan, a, b) or any(c.differ_anywhere(a, b) for c in at):
            continue
        free = [[r for r in plan.members(x) if r not in used] for x in (a, b)]
        for pair in list(zip(*free, strict=False))[: min(3, left)]:
            used.update(pair)
            left -= 1
            yield pair
        if not left:
            return


def _within(plans: Mapping[str, AlignedPlan], across: tuple[int, int] | None) -> tuple[int, int] | None:
    """Two routes that share a block in both plans, of the across-pair's expert if it has such, not of the pair."""
    first, second = (plans[h] for h in HISTORIES)
    owner = second.block_of()
    home = first.block_of()
    blocks = list(range(first.num_blocks))
    if across:
        expert = first.expert_ids[home[across[0]]]
        blocks.sort(key=lambda b: (first.expert_ids[b] != expert, b))
    for b in blocks:
        stay = [r for r in first.members(b) if owner[r] == b and r not in (across or ())]
        if len(stay) > 1:
            return stay[0], stay[1]
    return None


def _launch_text(launches: Launches) -> str:
    parts = [f"{g} ({x.thread_k}, {x.thread_n}) on {x.grid}" for g, x in launches.items()]
    return ", ".join(parts)


def _chosen(
    within: Pair | None, across: Pair | None, canonical: AlignedPlan, at: Sequence[Classes], basis: str
) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "within": list(within) if within else None,
        "across": list(across) if across else None,
        "chosen": CHOSEN,
        "from": f"the routing and the partition at {_launch_text(at[0].launches)}; {basis}",
    }
    why = []
    if across is None:
        several = any(_one_expert(canonical, a, a + 1) for a in range(canonical.num_blocks - 1))
        why.append(
            "across: the blocks of every expert are cut alike at this launch"
            if several
            else "across: no expert has more than one block"
        )
    if within is None:
        why.append("within: no block holds two routes in both plans besides the across-pair")
    return {**chosen, "why": "; ".join(why)} if why else chosen


def _facts(
    canonical: AlignedPlan,
    plans: Mapping[str, AlignedPlan],
    across: tuple[int, int] | None,
    within: tuple[int, int] | None,
    quiet: Sequence[tuple[int, int]],
    at: Sequence[Classes],
    spec: Mapping[str, Any],
) -> list[dict[str, Any]]:
    first, second = (plans[h] for h in HISTORIES)
    changed = changed_memberships(first, second)
    rows: list[tuple[str, Any, Any]] = [
        (
            "memberships in which H0 and H1 of the search differ",
            2 * len(quiet) + 2 * (across is not None),
            len(changed),
        ),
        (
            "canonical order differs in a class from H0 and from H1",
            [True, True],
            [_crosses(canonical, p, at[0]) for p in plans.values()],
        ),
    ]
    if within:
        homes = [{int(p.block_of()[r]) for r in within} for p in plans.values()]
        rows.append(("the within-pair shares a block in H0 and H1", [1, 1], [len(h) for h in homes]))
    for c in at:
        text = _launch_text(c.launches)
        if across:
            blocks = [int(first.block_of()[r]) for r in across]
            rows.append((f"W13 cuts the across-pair's blocks differently at {text}", True, c.differ(*blocks)))
        others = [r for r in changed if r not in (across or ())]
        home, away = first.block_of(), second.block_of()
        moved = [r for r in others if c.differ_anywhere(int(home[r]), int(away[r]))]
        rows.append((f"other changed memberships that change a class at {text}", [], moved))
        grid = full_k_grid(spec, first.num_blocks, c.launches["w13"])
        single = cut(spec, "w13", first.num_blocks, c.launches["w13"]._replace(grid=grid))
        rows.append((f"full_k: grid {grid} makes every W13 tile one slice, from {text}", True, single.is_single_slice))
    return [{"fact": fact, "wanted": wanted, "found": found, "holds": wanted == found} for fact, wanted, found in rows]


def _crosses(one: AlignedPlan, two: AlignedPlan, at: Classes) -> bool:
    """Whether a route stands in a block of another class in the second plan."""
    home, away = one.block_of(), two.block_of()
    return any(at.differ_anywhere(int(home[r]), int(away[r])) for r in changed_memberships(one, two))
