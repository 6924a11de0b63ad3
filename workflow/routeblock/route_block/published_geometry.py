# SPDX-License-Identifier: Apache-2.0
"""The default fixture: a synthetic Qwen3-MoE AWQ layer, drawn from a seed, with every published geometric fact.

The facts (counts, expert 106 at blocks 40 and 41, routes 51/86 and 22/28, twenty changed memberships) hold by
construction, are checked again on the finished fixture, and are listed in it. It is not the published checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.moe.awq import pack_awq
from routeblock.moe.launches import GPUS, Launch, selected_launch
from routeblock.moe.partition import Partition, partition
from routeblock.moe.routing import AlignedPlan, align, block_size_for, changed_memberships, check_plan, exchange
from routeblock.route_block.fixture import tensor_name, write_fixture

NAME = "published_geometry"
TOKENS, TOP_K, EXPERTS, BLOCK, LAYER = 21, 8, 128, 8, 6
HIDDEN, INTERMEDIATE, GROUP = 2048, 768, 128
TWO_BLOCK_EXPERTS = 3  # low ids, 12 to 14 routes each: blocks 0 to 5, direct at every launch of the study
BEFORE, AFTER = 34, 8  # one-block experts with ids below and above 106: blocks 6 to 39 and 42 to 49
FOCUS, FOCUS_ROUTES = 106, 11
ACROSS, WITHIN = (51, 86), (22, 28)
EXCHANGES = 3  # between the two blocks of each low expert: 18 of the 20 changed memberships


def _degrees(rng: np.random.Generator) -> dict[int, int]:
    """Routes of each expert in use, by id ascending."""
    low = np.sort(rng.choice(np.arange(0, 12), TWO_BLOCK_EXPERTS, replace=False))
    before = np.sort(rng.choice(np.arange(12, FOCUS), BEFORE, replace=False))
    after = np.sort(rng.choice(np.arange(FOCUS + 1, EXPERTS), AFTER, replace=False))
    counts = {int(e): int(c) for e, c in zip(low, rng.permutation([12, 13, 14]), strict=True)}
    counts[FOCUS] = FOCUS_ROUTES
    singles = [int(e) for e in (*before, *after)]
    counts.update(dict.fromkeys(singles, 1))
    for _ in range(TOKENS * TOP_K - sum(counts.values())):
        counts[int(rng.choice([e for e in singles if counts[e] < BLOCK]))] += 1
    return dict(sorted(counts.items()))


def _tokens(rng: np.random.Generator, counts: dict[int, int]) -> dict[int, list[int]]:
    """The tokens of each expert: every token has TOP_K distinct experts; the named routes' tokens go to the focus."""
    room = np.full(TOKENS, TOP_K)
    named = sorted({route // TOP_K for route in (*ACROSS, *WITHIN)})
    chosen: dict[int, list[int]] = {}
    for expert in sorted(counts, key=lambda e: (e != FOCUS, -counts[e])):
        forced = named if expert == FOCUS else []
        # The fullest need first: the largest remaining room, ties by chance, always leaves a solution (Gale and Ryser).
        order = sorted((t for t in range(TOKENS) if t not in forced), key=lambda t: (-room[t], rng.random()))
        chosen[expert] = sorted([*forced, *order[: counts[expert] - len(forced)]])
        room[chosen[expert]] -= 1
    if room.any():
        raise InputError(
            "the drawn expert counts leave a token without its experts",
            where=f"fixture {NAME}",
            limit=f"{TOP_K} distinct experts for each of {TOKENS} tokens",
            way_out="choose another seed",
        )
    return chosen


def draw_routing(rng: np.random.Generator) -> NDArray[np.int32]:
    """topk_ids int32 [21, 8] in which the named routes belong to the focus expert."""
    chosen = _tokens(rng, _degrees(rng))
    slot_of_focus = {route // TOP_K: route % TOP_K for route in (*ACROSS, *WITHIN)}
    ids = np.full((TOKENS, TOP_K), -1, np.int32)
    for token in range(TOKENS):
        experts = [e for e, tokens in chosen.items() if token in tokens]
        slots = [int(s) for s in rng.permutation(TOP_K)]
        if token in slot_of_focus:
            experts.remove(FOCUS)
            slots.remove(slot_of_focus[token])
            ids[token, slot_of_focus[token]] = FOCUS
        ids[token, slots] = experts
    return ids


def draw_plans(rng: np.random.Generator, ids: NDArray[np.int32]) -> dict[str, AlignedPlan]:
    """H0 and H1: 51 and 86 opposite, 22 and 28 together, and another pair over the boundary than in canonical order."""
    flat = ids.reshape(-1)
    focus = [int(r) for r in np.flatnonzero(flat == FOCUS)]
    free = [r for r in focus if r not in (*ACROSS, *WITHIN)]
    # Block 41 takes one route of the across pair and the two earliest free routes, which canonical order puts into 40.
    late = [ACROSS[1], *free[:2]]
    early = [r for r in focus if r not in late]
    others = [int(r) for r in rng.permutation(np.flatnonzero(flat != FOCUS))]
    first = align(ids, EXPERTS, BLOCK, arrival=[*others, *early, *late])
    second = exchange(first, *ACROSS)
    for expert in sorted(set(flat.tolist()))[:TWO_BLOCK_EXPERTS]:
        one, two = (first.members(b) for b in range(first.num_blocks) if first.expert_ids[b] == expert)
        pairs = zip(rng.permutation(one)[:EXCHANGES], rng.permutation(two)[:EXCHANGES], strict=True)
        for a, b in pairs:
            second = exchange(second, int(a), int(b))
    return {"H0": first, "H1": second}


def _inputs(rng: np.random.Generator, ids: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    weights = rng.random(ids.shape, dtype=np.float32) + np.float32(0.05)
    weights /= weights.sum(1, keepdims=True, dtype=np.float32)
    hidden = (rng.standard_normal((TOKENS, HIDDEN)) * 0.5).astype(np.float16)
    return {"hidden": hidden, "topk_ids": ids, "topk_weights": np.sort(weights, axis=1)[:, ::-1].copy()}


def _layer(seed: int, experts: list[int]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Packed tensors of each expert; each expert has its own stream, so its weights do not depend on which are in
    use.
    """
    shapes = {
        "gate_proj": (HIDDEN, INTERMEDIATE),
        "up_proj": (HIDDEN, INTERMEDIATE),
        "down_proj": (INTERMEDIATE, HIDDEN),
    }
    for expert in experts:
        rng = np.random.Generator(np.random.PCG64([seed, LAYER, expert]))
        for projection, (k, n) in shapes.items():
            q = rng.integers(0, 16, (k, n), dtype=np.uint8)
            zeros = rng.integers(5, 11, (k // GROUP, n), dtype=np.uint8)
            scales = (rng.random((k // GROUP, n)) * 0.006 + 0.002).astype(np.float16)
            yield tensor_name(LAYER, expert, projection, "qweight"), pack_awq(q)
            yield tensor_name(LAYER, expert, projection, "qzeros"), pack_awq(zeros)
            yield tensor_name(LAYER, expert, projection, "scales"), scales


def _cuts(blocks: int) -> dict[str, tuple[Partition, Partition]]:
    """(W13, W2) cut at each launch that the facts speak of."""
    named = {f"(64, 128) on {grid}": (Launch(64, 128, grid),) * 2 for grid in (246, 240, 200)}
    named["(128, 64) on 240, the swap"] = (Launch(128, 64, 240),) * 2
    shapes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    first, second = (selected_launch("H200", BLOCK, "float16", GROUP, n, k).launch for n, k in shapes)
    named["H200 auto"] = (first, second)

    def cut(which: int, launch: Launch) -> Partition:
        return partition(blocks, *shapes[which], launch.thread_n, launch.thread_k, launch.grid, GROUP)

    return {name: (cut(0, w13), cut(1, w2)) for name, (w13, w2) in named.items()}


def facts(ids: NDArray[np.int32], plans: dict[str, AlignedPlan]) -> list[dict[str, Any]]:
    """Every published geometric fact, with the value wanted and the value found on this routing and these plans."""
    first, second = plans["H0"], plans["H1"]
    canonical = align(ids, EXPERTS, BLOCK)
    cuts = _cuts(first.num_blocks)
    w13, w2 = cuts["(64, 128) on 246"]
    low = sorted(set(ids.reshape(-1).tolist()))[:TWO_BLOCK_EXPERTS]
    changed = changed_memberships(first, second)
    others = [r for r in changed if r not in ACROSS]
    owner = {name: plan.block_of() for name, plan in plans.items()}
    quiet = sorted({int(o[r]) for o in owner.values() for r in others})
    focus_blocks = {name: [b for b in range(p.num_blocks) if p.expert_ids[b] == FOCUS] for name, p in plans.items()}
    split13 = [(b, n) for b in range(w13.blocks) for n in range(w13.n_tiles) if w13.is_split(b, n)]
    split2 = [(b, n) for b in range(w2.blocks) for n in range(w2.n_tiles) if w2.is_split(b, n)]
    boundary = {name: sorted(set(canonical.members(40)) ^ set(p.members(40))) for name, p in plans.items()}
    rows: list[tuple[str, Any, Any]] = [
        ("valid routes", 168, int(first.num_routes)),
        ("aligned rows", 400, first.num_tokens_post_padded),
        ("active blocks", 50, first.num_blocks),
        ("block size of the fused path for 128 experts", 8, block_size_for(TOKENS, TOP_K, EXPERTS)),
        ("blocks of expert 106 in H0 and H1", [[40, 41], [40, 41]], list(focus_blocks.values())),
        ("routes of expert 106", FOCUS_ROUTES, int((ids == FOCUS).sum())),
        ("routes 51 and 86 in H0", [40, 41], [int(owner["H0"][r]) for r in ACROSS]),
        ("routes 51 and 86 in H1", [41, 40], [int(owner["H1"][r]) for r in ACROSS]),
        ("routes 22 and 28 in H0 and H1", [40] * 4, [int(owner[h][r]) for h in plans for r in WITHIN]),
        ("memberships that differ between H0 and H1", 20, len(changed)),
        ("... besides 51 and 86", 18, len(others)),
        ("blocks of the 18 others", list(range(2 * TWO_BLOCK_EXPERTS)), quiet),
        ("experts of the 18 others", low, sorted({int(ids.reshape(-1)[r]) for r in others})),
        (
            "the 18 others keep their W13 and W2 slices at every launch",
            True,
            all(len({c.signature(b) for b in quiet}) == 1 for pair in cuts.values() for c in pair),
        ),
        (
            "canonical order differs from both over the boundary of 40 and 41, elsewhere than 51 and 86 alone",
            True,
            all(set(b) - set(ACROSS) for b in boundary.values()),
        ),
        ("W13 tiles, N-tiles, K-tiles at (64, 128)", [600, 12, 32], [w13.tiles, w13.n_tiles, w13.k_tiles]),
        ("W13 direct tiles on 246", 492, w13.direct_tiles),
        ("W13 K-tiles of a slice on 246", 16, w13.iters),
        ("W13 split tiles on 246", 108, len(split13)),
        ("W13 first split tile on 246", [41, 0], list(split13[0])),
        ("W13 block 40 on 246 is direct, 41 split in two", [[1], [2]], [_slice_counts(w13, b) for b in (40, 41)]),
        ("W2 direct tiles on 246", 492, w2.direct_tiles),
        ("W2 split tiles on 246", 154, len(split2)),
        ("W2 first split tile on 246", [30, 13], list(split2[0])),
        ("W2 slices of blocks 40 and 41 on 246 are alike", True, w2.signature(40) == w2.signature(41)),
        ("W13 direct tiles on 200", 400, cuts["(64, 128) on 200"][0].direct_tiles),
        ("W13 first block beyond them on 200", 33, cuts["(64, 128) on 200"][0].direct_tiles // 12),
        ("single slice on 200, W13", True, cuts["(64, 128) on 200"][0].is_single_slice),
        ("single slice on 200, W2", True, cuts["(64, 128) on 200"][1].is_single_slice),
        ("single slice on 240, W13", False, cuts["(64, 128) on 240"][0].is_single_slice),
        (
            "single slice on 240 with thread_k and thread_n swapped, W13",
            True,
            cuts["(128, 64) on 240, the swap"][0].is_single_slice,
        ),
        ("SMs of an RTX 3090 times 3", 246, GPUS["RTX 3090"].sms * 3),
    ]
    return [{"fact": fact, "wanted": wanted, "found": found, "holds": wanted == found} for fact, wanted, found in rows]


def _slice_counts(cut: Partition, block: int) -> list[int]:
    return sorted({len(cut.slices(block, n)) for n in range(cut.n_tiles)})


def write(folder: Path, seed: int) -> None:
    """Draw the fixture from `seed` into an existing folder. Raises InputError if a fact does not hold."""
    rng = np.random.Generator(np.random.PCG64([seed, 0]))
    ids = draw_routing(rng)
    plans = draw_plans(rng, ids)
    for history, plan in plans.items():
        check_plan(plan, ids, EXPERTS, where=f"fixture {NAME}, {history}")
    found = facts(ids, plans)
    for fact in found:
        if not fact["holds"]:
            raise InputError(
                f"{fact['fact']}: {fact['found']}",
                where=f"fixture {NAME}, seed {seed}",
                limit=f"published: {fact['wanted']}",
                way_out="choose another seed",
            )
    experts = sorted(set(ids.reshape(-1).tolist()))
    spec = {
        "name": NAME,
        "kind": "synthetic",
        "source": {"generator": "numpy PCG64", "seed": seed, "model": "Qwen3-MoE layer shape, AutoAWQ form"},
        "layer": LAYER,
        "num_experts": EXPERTS,
        "experts": experts,
        "tokens": TOKENS,
        "top_k": TOP_K,
        "block_size": BLOCK,
        "group_size": GROUP,
        "dtype": "float16",
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "exchange": {
            "within": list(WITHIN),
            "across": list(ACROSS),
            "chosen": "by construction",
            "from": "the route numbers of the published study, which chose them from prior H0/H1 data",
        },
        "facts": found,
    }
    write_fixture(folder, spec, layer=dict(_layer(seed, experts)), inputs=_inputs(rng, ids), plans=plans)
