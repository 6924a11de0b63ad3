# SPDX-License-Identifier: Apache-2.0
"""The scorer's own account of plans: memberships, mode identity, legality, and what each cell's plan has to be.

Written apart from `moe.routing`, which the runs use: an error there does not vouch for itself here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.evidence.digest import sha256_array, sha256_json
from routeblock.route_block.scorer.reasons import Reason

# The protocol as the scorer holds it: the cells in their order, and the words of the intervention that each asks for.
ASKED = {
    "native": "native alignment",
    "replay": "own plan injected",
    "cross": "other history's plan injected",
    "swap_within": "own plan, within-pair exchanged",
    "swap_across": "own plan, across-pair exchanged",
    "full_k": "own plan injected",
    "canonical": "stable order by (expert id, route id)",
}
EXCHANGES = {"swap_within": "within", "swap_across": "across"}
HISTORIES = ("H0", "H1")


@dataclass(frozen=True)
class StoredPlan:
    """A plan as bytes: sorted_token_ids int32 [rows], expert_ids int32 [blocks]; `routes` is the sentinel."""

    sorted_token_ids: NDArray[Any]
    expert_ids: NDArray[Any]
    block_size: int
    routes: int

    @cached_property
    def slots(self) -> list[list[int]]:
        """The entries of each block as they stand, sentinels included."""
        entries, size = self.sorted_token_ids.tolist(), self.block_size
        return [entries[at : at + size] for at in range(0, len(entries), size)]

    @cached_property
    def identity(self) -> list[tuple[int, int, list[int]]]:
        """(expert, block counted within the expert, routes ascending) of each block in order."""
        counted: dict[int, int] = defaultdict(int)
        found = []
        for expert, slots in zip(self.expert_ids.tolist(), self.slots, strict=False):
            found.append((expert, counted[expert], sorted(s for s in slots if s != self.routes)))
            counted[expert] += 1
        return found

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON of the mode identity."""
        return sha256_json([list(block) for block in self.identity])

    @cached_property
    def digests(self) -> tuple[str, str]:
        """SHA-256 of the bytes of sorted_token_ids and of expert_ids."""
        return sha256_array(self.sorted_token_ids), sha256_array(self.expert_ids)

    def fault(self, topk_ids: NDArray[Any]) -> tuple[Reason, str] | None:
        """What makes the plan illegal for a routing (integers [M, k]), or None."""
        size, routes = self.block_size, self.routes
        owner = topk_ids.reshape(-1).tolist()
        for name, x in (("sorted_token_ids", self.sorted_token_ids), ("expert_ids", self.expert_ids)):
            if x.dtype != np.int32 or x.ndim != 1:
                return Reason.ILLEGAL_PLAN, f"{name} is {x.dtype} {list(x.shape)}, not int32 with one axis"
        blocks = sum(-(-owner.count(e) // size) for e in set(owner))
        if (self.sorted_token_ids.size, self.expert_ids.size) != (blocks * size, blocks):
            found = f"{self.sorted_token_ids.size} rows and {self.expert_ids.size} blocks"
            return Reason.ILLEGAL_PLAN, f"{found}; the routing takes {blocks * size} and {blocks}"
        times: dict[int, int] = defaultdict(int)
        for block, slots in enumerate(self.slots):
            valid = [s for s in slots if s != routes]
            if slots[: len(valid)] != valid:
                return Reason.ILLEGAL_PLAN, f"block {block} has a sentinel before a route"
            for route in valid:
                if not 0 <= route < routes:
                    return Reason.ILLEGAL_PLAN, f"block {block} holds {route}; routes are 0 to {routes - 1}"
                times[route] += 1
        for route in range(routes):
            if times[route] != 1:
                return Reason.ILLEGAL_PLAN, f"route {route} stands {times[route]} times"
        for block, (expert, _, members) in enumerate(self.identity):
            for route in members:
                if owner[route] != expert:
                    detail = f"block {block} is of expert {expert} and holds route {route} of expert {owner[route]}"
                    return Reason.EXPERT_BLOCK, detail
        if self.expert_ids.tolist() != sorted(self.expert_ids.tolist()):
            return Reason.EXPERT_BLOCK, "experts do not ascend"
        full = [len(members) == size for _, _, members in self.identity]
        for block, (expert, j, _) in enumerate(self.identity):
            if j and not full[block - 1]:
                return Reason.ILLEGAL_PLAN, f"block {block - 1} of expert {expert} is padded and is not its last"
        return None

    def differs(self, wanted: StoredPlan) -> tuple[Reason, str] | None:
        """Where this plan is not the wanted one: a block's expert, a membership, or a slot; None if equal in bytes."""
        if self.expert_ids.tolist() != wanted.expert_ids.tolist():
            return Reason.EXPERT_BLOCK, "the blocks belong to other experts than the intervention asks for"
        mine, theirs = self.owners(), wanted.owners()
        for route, (found, asked) in enumerate(zip(mine, theirs, strict=True)):
            if found != asked:
                return (
                    Reason.ROUTE_MEMBERSHIP,
                    f"route {route} stands in block {found}; the intervention puts it into {asked}",
                )
        if self.digests != wanted.digests:
            return Reason.SLOT_ORDER, "the order inside a block is not that of the plan to inject"
        return None

    def owners(self) -> list[int]:
        """The block of each route; -1 for one that stands nowhere."""
        found = [-1] * self.routes
        for block, slots in enumerate(self.slots):
            for route in slots:
                if 0 <= route < self.routes:
                    found[route] = block
        return found


def _exchanged(plan: StoredPlan, pair: tuple[int, int]) -> StoredPlan:
    turn = {pair[0]: pair[1], pair[1]: pair[0]}
    edited = [turn.get(entry, entry) for entry in plan.sorted_token_ids.tolist()]
    return StoredPlan(np.array(edited, np.int32), plan.expert_ids, plan.block_size, plan.routes)


def _canonical(topk_ids: NDArray[Any], block_size: int) -> StoredPlan:
    owner = topk_ids.reshape(-1).tolist()
    members: dict[int, list[int]] = defaultdict(list)
    for route, expert in enumerate(owner):
        members[expert].append(route)
    slots: list[int] = []
    experts: list[int] = []
    for expert in sorted(members):
        blocks = -(-len(members[expert]) // block_size)
        slots += members[expert] + [len(owner)] * (blocks * block_size - len(members[expert]))
        experts += [expert] * blocks
    return StoredPlan(np.array(slots, np.int32), np.array(experts, np.int32), block_size, len(owner))


def wanted_plan(
    cell: str,
    history: str,
    own: Mapping[str, StoredPlan],
    pairs: Mapping[str, tuple[int, int] | None],
    topk_ids: NDArray[Any],
) -> StoredPlan | None:
    """The plan that a cell has to use under a history; None where the fixture has no pair for the exchange.

    For `native` this is the history's own plan: what a twin replays.
    """
    if cell in EXCHANGES:
        pair = pairs[EXCHANGES[cell]]
        return _exchanged(own[history], pair) if pair else None
    if cell == "cross":
        return own["H1" if history == "H0" else "H0"]
    if cell == "canonical":
        return _canonical(topk_ids, own[history].block_size)
    return own[history]


def place_in_order(cell: str, history: str, replicate: int) -> int:
    """The planned position of a run: replicate by replicate, the history order turning each time, then the cells."""
    histories = HISTORIES if replicate % 2 else HISTORIES[::-1]
    order = [(h, c) for h in histories for c in ASKED]
    return (replicate - 1) * len(order) + order.index((history, cell))
