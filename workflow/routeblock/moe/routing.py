# SPDX-License-Identifier: Apache-2.0
"""Alignment of routes to expert blocks, and what may be done to a plan.

A route r = token * top_k + slot. Alignment groups routes by expert, pads each expert to whole blocks with the sentinel
(the number of routes), and names one expert per block. Facts: vLLM's `moe_align_block_size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_json
from routeblock.moe.partition import BLOCK_SIZES

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class AlignedPlan:
    """What alignment hands to the kernel.

    sorted_token_ids int32 [num_tokens_post_padded]: route ids, `num_routes` as the sentinel; expert_ids int32
    [num_tokens_post_padded / block_size]: the (local) expert of each block.
    """

    sorted_token_ids: Ints
    expert_ids: Ints
    num_tokens_post_padded: int
    block_size: int
    num_routes: int

    @cached_property
    def rows(self) -> NDArray[np.int32]:
        """sorted_token_ids as [blocks, block_size]; what stands beyond num_tokens_post_padded is not read."""
        return self.sorted_token_ids[: self.num_tokens_post_padded].reshape(-1, self.block_size)

    @property
    def num_blocks(self) -> int:
        """Number of active blocks."""
        return self.num_tokens_post_padded // self.block_size

    def members(self, block: int) -> list[int]:
        """The routes of a block, ascending, without sentinels."""
        row = self.rows[block]
        return sorted(int(r) for r in row[(row >= 0) & (row < self.num_routes)])

    def blocks(self) -> list[list[Any]]:
        """The mode identity: [expert, j, routes ascending] for each block, j counted from 0 inside the expert."""
        seen: dict[int, int] = {}
        identity: list[list[Any]] = []
        for b in range(self.num_blocks):
            expert = int(self.expert_ids[b])
            identity.append([expert, seen.get(expert, 0), self.members(b)])
            seen[expert] = seen.get(expert, 0) + 1
        return identity

    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON of `blocks()`: order inside a block and the tail do not count."""
        return sha256_json(self.blocks())

    def block_of(self) -> NDArray[np.int32]:
        """The global block of each route, int32 [num_routes]; -1 for a route that takes no slot."""
        owner = np.full(self.num_routes, -1, np.int32)
        for b in range(self.num_blocks):
            owner[self.members(b)] = b
        return owner


def check_topk_ids(topk_ids: NDArray[Any], num_experts: int, *, outside_allowed: bool) -> NDArray[np.int64]:
    """`topk_ids` as int64 [M, k] after checks: integers, two axes, ids of experts that exist.

    Ids out of range stand for experts of other ranks; they are refused unless an expert map says so.
    """
    if topk_ids.ndim != 2 or topk_ids.dtype.kind not in "iu":
        raise InputError(
            f"topk_ids {topk_ids.dtype} {topk_ids.shape}",
            where="alignment",
            limit="integers of shape [tokens, top_k]",
            way_out="pass the router's ids unchanged",
        )
    ids = topk_ids.astype(np.int64)
    bad = (ids < 0) | (ids >= num_experts)
    if bad.any() and not outside_allowed:
        token, slot = (int(x) for x in np.argwhere(bad)[0])
        raise InputError(
            f"expert id {int(ids[token, slot])} at token {token}, slot {slot}",
            where="alignment",
            limit=f"ids from 0 to {num_experts - 1} without an expert map",
            way_out="correct topk_ids, or pass the expert map of this rank",
        )
    return ids


def _checked_map(expert_map: NDArray[Any], num_experts: int) -> NDArray[np.int64]:
    """An expert map as int64: one entry a global expert, its local id or -1, no local id twice."""

    def refuse(what: str, limit: str) -> InputError:
        return InputError(
            what, where="alignment", limit=limit, way_out="pass the map of this rank as the engine has it"
        )

    if expert_map.shape != (num_experts,):
        raise refuse(f"expert map of shape {expert_map.shape}", f"one entry for each of {num_experts} global experts")
    if expert_map.dtype.kind not in "iu":
        raise refuse(f"expert map of {expert_map.dtype}", "integers are needed")
    local = expert_map.astype(np.int64)
    here = local[local >= 0]
    if (local < -1).any():
        expert = int(np.flatnonzero(local < -1)[0])
        raise refuse(f"expert map gives expert {expert} the local id {int(local[expert])}", "a local id from 0, or -1")
    ids, counts = np.unique(here, return_counts=True)
    if (counts > 1).any():
        shared = int(ids[counts > 1][0])
        experts = " and ".join(map(str, np.flatnonzero(local == shared)[:2]))
        raise refuse(f"expert map gives experts {experts} the local id {shared}", "one expert for each local id")
    return local


def align(
    topk_ids: NDArray[Any],
    num_experts: int,
    block_size: int,
    arrival: NDArray[Any] | Sequence[int] | None = None,
    expert_map: NDArray[Any] | None = None,
) -> AlignedPlan:
    """Align routes to blocks of `block_size`.

    topk_ids: integers [M, k]. arrival[i] is the route that arrives i-th and so takes the next slot of its expert; the
    default is the stable order, which is the canonical one (expert id, route id). expert_map: int32 [num_experts], the
    local id of each global expert or -1; experts stand in the order of their global ids and `expert_ids` is local;
    routes of experts mapped to -1 or out of range take no slot. Raises InputError for a bad id, block size, map or
    arrival.
    """
    if num_experts < 1 or block_size not in BLOCK_SIZES:
        raise InputError(
            f"{num_experts} experts, block size {block_size}",
            where="alignment",
            limit=f"at least one expert, block size one of {', '.join(map(str, BLOCK_SIZES))}",
            way_out="choose one of them",
        )
    ids = check_topk_ids(topk_ids, num_experts, outside_allowed=expert_map is not None).reshape(-1)
    routes = ids.size
    local = np.arange(num_experts, dtype=np.int64)
    if expert_map is not None:
        local = _checked_map(np.asarray(expert_map), num_experts)
    order = np.arange(routes, dtype=np.int64) if arrival is None else np.asarray(arrival, dtype=np.int64)
    if order.shape != (routes,) or not np.array_equal(np.sort(order), np.arange(routes)):
        raise InputError(
            f"arrival of {order.size} entries",
            where="alignment",
            limit=f"a permutation of the {routes} routes",
            way_out="name every route once",
        )
    in_range = (ids >= 0) & (ids < num_experts)
    active = in_range & (local[np.where(in_range, ids, 0)] >= 0)
    order = order[active[order]]
    order = order[np.argsort(ids[order], kind="stable")]
    counts = np.bincount(ids[active], minlength=num_experts)
    padded = -(-counts // block_size) * block_size
    total = int(padded.sum())
    sorted_ids = np.full(total, routes, np.int32)
    starts = np.cumsum(padded) - padded
    within = np.arange(order.size) - np.repeat(np.cumsum(counts) - counts, counts)
    sorted_ids[np.repeat(starts, counts) + within] = order
    experts = np.repeat(local, padded // block_size).astype(np.int32)
    return AlignedPlan(sorted_ids, experts, total, block_size, routes)


def check_plan(
    plan: AlignedPlan, topk_ids: NDArray[Any], num_experts: int, expert_map: NDArray[Any] | None = None, *, where: str
) -> AlignedPlan:
    """`plan` if it is legal for this routing, else InputError that names the first fault.

    Legal: every route with an expert here stands exactly once, in a block of its expert; experts ascend; a sentinel
    only after the routes of its block (the kernel processes the first n entries of a block with n valid ones, so a
    sentinel before a route would lose that route), and only in an expert's last block.
    """

    def refuse(what: str, limit: str) -> InputError:
        return InputError(what, where=where, limit=limit, way_out="use a plan that alignment made for this routing")

    want = align(topk_ids, num_experts, plan.block_size, expert_map=expert_map)
    if plan.num_routes != want.num_routes:
        raise refuse(f"plan for {plan.num_routes} routes", f"this routing has {want.num_routes}")
    if (
        plan.num_tokens_post_padded != want.num_tokens_post_padded
        or plan.sorted_token_ids.size < plan.num_tokens_post_padded
        or plan.expert_ids.size < plan.num_blocks
    ):
        raise refuse(
            f"plan of {plan.num_tokens_post_padded} rows ({plan.sorted_token_ids.size} stored)",
            f"this routing takes {want.num_tokens_post_padded}",
        )
    used = plan.sorted_token_ids[: plan.num_tokens_post_padded]
    if ((used < 0) | (used > plan.num_routes)).any():
        raise refuse(f"entry {int(used[(used < 0) | (used > plan.num_routes)][0])}", f"0 to {plan.num_routes}")
    for b in range(want.num_blocks):
        row, expert = plan.rows[b], int(plan.expert_ids[b])
        if expert != int(want.expert_ids[b]):
            raise refuse(f"block {b} has expert {expert}", f"this routing puts expert {int(want.expert_ids[b])} there")
        valid = row < plan.num_routes
        if (valid[1:] & ~valid[:-1]).any():
            raise refuse(f"block {b} has a sentinel before a route", "sentinels stand last in a block")
        if int(valid.sum()) != len(want.members(b)):
            raise refuse(
                f"block {b} has {int(valid.sum())} routes", f"this routing fills it with {len(want.members(b))}"
            )
    counts = np.bincount(used[used < plan.num_routes], minlength=plan.num_routes)
    wanted = np.bincount(want.sorted_token_ids[want.sorted_token_ids < want.num_routes], minlength=plan.num_routes)
    if not np.array_equal(counts, wanted):
        route = int(np.flatnonzero(counts != wanted)[0])
        raise refuse(f"route {route} stands {counts[route]} times", f"it must stand {wanted[route]} times")
    flat = np.asarray(topk_ids).reshape(-1)
    local = np.arange(num_experts) if expert_map is None else np.asarray(expert_map)
    for b in range(want.num_blocks):
        for route in plan.members(b):
            if int(local[flat[route]]) != int(plan.expert_ids[b]):
                raise refuse(
                    f"route {route} stands in block {b} of expert {int(plan.expert_ids[b])}",
                    f"its expert is {int(local[flat[route]])}",
                )
    return plan


def exchange(plan: AlignedPlan, first: int, second: int) -> AlignedPlan:
    """The plan with two routes of one expert exchanged; InputError if their blocks belong to different experts."""
    used = plan.sorted_token_ids[: plan.num_tokens_post_padded]
    places = [np.flatnonzero(used == r) for r in (first, second)]
    experts = [int(plan.expert_ids[p[0] // plan.block_size]) if p.size == 1 else None for p in places]
    if first == second or None in experts or experts[0] != experts[1]:
        raise InputError(
            f"exchange of routes {first} and {second}",
            where="plan",
            limit="two different routes that stand in blocks of one expert",
            way_out="choose another pair",
        )
    edited = plan.sorted_token_ids.copy()
    edited[[places[0][0], places[1][0]]] = second, first
    return AlignedPlan(edited, plan.expert_ids, plan.num_tokens_post_padded, plan.block_size, plan.num_routes)


def changed_memberships(first: AlignedPlan, second: AlignedPlan) -> list[int]:
    """The routes that stand in different blocks in two plans of one routing, ascending."""
    return [int(r) for r in np.flatnonzero(first.block_of() != second.block_of())]


def block_size_for(tokens: int, top_k: int, local_experts: int) -> int:
    """The block size that vLLM's fused path picks: the first b with tokens * top_k / experts / b < 0.9, else 64."""
    for b in BLOCK_SIZES:
        if tokens * top_k / local_experts / b < 0.9:
            return b
    return BLOCK_SIZES[-1]
