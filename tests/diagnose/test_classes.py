# SPDX-License-Identifier: Apache-2.0
"""Classes from counts against every legal order: enumeration, a walk over CUDA blocks, and the twin's bits."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeblock.diagnose.batches import sweep
from routeblock.diagnose.classes import Classes, cut_of, outcomes_text, run_to_run, tile_classes
from routeblock.diagnose.engine import Engine
from routeblock.diagnose.layer import GEMMS, Layer
from routeblock.diagnose.partitions import slices_at_most
from routeblock.diagnose.routings import counts, draw
from routeblock.moe.devices import DEVICES
from routeblock.moe.launches import Launch
from routeblock.moe.marlin_launch import Weights
from routeblock.moe.partition import partition
from routeblock.moe.routing import AlignedPlan, align
from routeblock.route_block.prediction.predict import changed_routes, signatures
from routeblock.route_block.scorer.block_walk import routes_computed_differently
from routeblock.twin.layer import moe_layer

SIZES = ((64, 128), (128, 64), (128, 128))
CUTS = st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(1, 12), st.sampled_from(SIZES), st.integers(1, 300))


@given(CUTS, st.sampled_from((-1, 32, 64, 128)), st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_first_cut_says_all_slices(
    size: tuple[int, int, int, tuple[int, int], int], group: int, full_k: bool
) -> None:
    blocks, n, k, (thread_k, thread_n), grid = size
    cut = partition(blocks, n * 128, k * 128, thread_n, thread_k, grid, group, full_k)
    classes = tile_classes(cut)
    slices = {}
    for block, tile in product(range(cut.blocks), range(cut.n_tiles)):
        found = tuple(cut.slices(block, tile))
        assert (classes[block, tile] == 0) == (len(found) == 1)
        assert slices.setdefault(int(classes[block, tile]), found) == found
    assert len(set(slices.values())) == len(slices)
    assert slices_at_most(classes, cut) == max(map(len, slices.values()))


def layer_of(experts: int, top_k: int, group: int = 32) -> Layer:
    return Layer(256, 128, experts, top_k, Weights("float16", True, group))


def every_order(ids: np.ndarray, experts: int, block: int) -> list[AlignedPlan]:
    """All plans that differ in which routes lie in which block; experts with at most two blocks."""
    flat, choices = ids.ravel(), []
    for expert in range(experts):
        routes = np.flatnonzero(flat == expert).tolist()
        first = list(combinations(routes, min(block, len(routes))))
        choices.append([[*c, *sorted(set(routes) - set(c))] for c in first])
    return [
        align(ids, experts, block, np.concatenate([*map(np.array, order)]).astype(int)) for order in product(*choices)
    ]


@pytest.mark.parametrize(("seed", "grid"), [(s, g) for s in range(4) for g in (3, 5, 7, 11)])
def test_outcomes_and_routes_are_those_of_all_legal_orders(seed: int, grid: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [(10, 4, 3), (9, 9, 2), (11, 1, 1), (9, 2, 10)][seed]
    ids = rng.permutation(np.repeat(np.arange(3), sizes)).astype(np.int32)[:, None]
    layer = layer_of(3, 1)
    launches = {"w13": Launch(64, 128, grid), "w2": Launch(64, 128, grid)}
    found = run_to_run(counts(ids[None], 3), 8, Classes(layer, launches))
    plans = every_order(ids, 3, 8)
    cuts = {g: cut_of(layer, g, plans[0].num_blocks, launches[g]) for g in GEMMS}
    seen = {g: [signatures(p, cuts[g], 64) for p in plans] for g in GEMMS}
    both = [tuple(map(tuple, zip(a, b, strict=True))) for a, b in zip(seen["w13"], seen["w2"], strict=True)]
    assert round(np.exp(found.log_outcomes[0])) == len(set(both))
    moved = {g: {r for s in seen[g] for r in changed_routes(seen[g][0], s)} for g in GEMMS}
    assert (int(found.w13[0]), int(found.any[0])) == (len(moved["w13"]), len(moved["w13"] | moved["w2"]))
    assert bool(found.can_differ[0]) == (len(set(both)) > 1)


@given(st.integers(0, 2**32), st.integers(2, 30), st.integers(1, 60), st.sampled_from(SIZES[:2]))
@settings(max_examples=60, deadline=None)
def test_no_order_changes_a_route_beyond_the_predicted_ones(
    seed: int, tokens: int, grid: int, threads: tuple[int, int]
) -> None:
    layer = layer_of(4, 2)
    ids = draw(tokens, 2, 4, seed)
    launches = dict.fromkeys(GEMMS, Launch(*threads, grid))
    found = run_to_run(counts(ids, 4), 8, Classes(layer, launches))
    rng = np.random.default_rng(seed)
    first, second = (align(ids[0], 4, 8, rng.permutation(ids.size)) for _ in range(2))
    changed = {
        gemm: routes_computed_differently(first, second, *layer.gemm(gemm, 1)[:2], *threads, grid, 32) for gemm in GEMMS
    }
    assert len(changed["w13"]) <= int(found.w13[0])
    assert len({*changed["w13"], *changed["w2"]}) <= int(found.any[0])
    if not found.can_differ[0]:
        assert changed == {"w13": [], "w2": []}


def test_many_routings_at_once_are_each_alone() -> None:
    layer = layer_of(6, 3)
    classes = Classes(layer, {"w13": Launch(128, 64, 17), "w2": Launch(64, 128, 5)})
    whole = counts(draw(40, 3, 6, 1, 50), 6)
    together = run_to_run(whole, 16, classes)
    for row in range(50):
        alone = run_to_run(whole[row : row + 1], 16, classes)
        for name in ("blocks", "straddling", "parted", "w13", "any", "log_outcomes"):
            assert getattr(together, name)[row] == pytest.approx(getattr(alone, name)[0])
    assert 0 < int(together.can_differ.sum()) < 50


def test_the_twins_bits_change_only_where_predicted_and_they_do_change() -> None:
    layer, rng = layer_of(4, 2), np.random.default_rng(0)
    ids = draw(20, 2, 4, 5)[0]
    hidden = rng.standard_normal((20, 256)).astype(np.float16)
    weights = rng.random((20, 2), dtype=np.float32)

    def matrix(k: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        q, z = (rng.integers(0, 16, shape, dtype=np.uint8) for shape in ((4, k, n), (4, k // 32, n)))
        return q, z, (rng.random((4, k // 32, n)) * 0.05).astype(np.float16)

    w13, w2 = matrix(256, 256), matrix(128, 256)
    moved = 0
    for grid in (3, 5, 16):
        launch = Launch(64, 128, grid)
        found = run_to_run(counts(ids[None], 4), 8, Classes(layer, dict.fromkeys(GEMMS, launch)))
        outputs = [
            moe_layer(
                hidden, ids, weights, w13, w2, align(ids, 4, 8, rng.permutation(ids.size)), architecture="hopper",
                w13_launch=launch, w2_launch=launch, group_size=32,
            )
            for _ in range(6)
        ]  # fmt: skip
        for surface, most in (("w13", found.w13[0]), ("w2", found.any[0])):
            bits = np.stack([o[surface].view(np.uint16) for o in outputs])
            changed = int((bits != bits[0]).any(axis=(0, 2)).sum())
            assert changed <= int(most)
            moved += changed
    assert moved > 0


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
@pytest.mark.parametrize("ep", [1, 2])
def test_a_tokens_classes_over_batches_are_those_of_its_slices(version: str, ep: int) -> None:
    layer = Layer(2048, 768, 32, 8, Weights("float16", True, 128))
    engine = Engine(layer, DEVICES["RTX 4090"], version, expert_parallel=ep)
    ids = draw(200, 8, 32, 11)[0]
    sizes = [4, 5, 7, 9, 17, 30, 40, 64, 65, 130, 200]
    found = sweep(engine, ids, 3, sizes)
    assert found is not None
    seen: dict[tuple[object, ...], int] = {}
    numbers = []
    for size in sizes:
        launches = engine.launches_at(size)
        assert launches is not None
        key: list[object] = []
        for slot in range(8):
            rank = int(ids[3, slot]) // engine.local_experts
            local = np.full(32, -1, np.int32)
            local[rank * engine.local_experts : (rank + 1) * engine.local_experts] = np.arange(engine.local_experts)
            plan = align(ids[:size], 32, engine.block_size_at(size), expert_map=local)
            block = int(plan.block_of()[3 * 8 + slot])
            for gemm in GEMMS:
                launch = launches[gemm]
                cut = cut_of(layer, gemm, plan.num_blocks, launch)
                edges = [tuple(a * launch.thread_k for a, _ in cut.slices(block, t)) for t in range(cut.n_tiles)]
                key.append((launch.thread_k, tuple(e for e in edges for _ in range(launch.thread_n // 64))))
        numbers.append(seen.setdefault(tuple(key), len(seen)))
    assert list(found.numbers) == numbers
    assert found.classes > 1


def test_outcomes_are_exact_where_they_are_few() -> None:
    assert outcomes_text(np.log(165)) == "165"
    assert outcomes_text(200.0) == "10^86.9"
