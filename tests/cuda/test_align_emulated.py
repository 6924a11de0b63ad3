# SPDX-License-Identifier: Apache-2.0
"""The source of the alignment kernel, run thread by thread on the CPU, against the reference."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import align_emulator as emulator
import numpy as np
import pytest

from routeblock.cuda.align_variants import VARIANTS, Kind, Problem, Variant
from routeblock.moe.routing import align as reference


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulator.build(tmp_path_factory.mktemp("emulator"))


def check(library: ctypes.CDLL, variant: Variant, ids: np.ndarray, experts: int, block: int, **kw: object) -> None:
    expert_map = kw.get("expert_map")
    seen = np.where((ids < 0) | (ids >= experts), -1, ids)
    # The reference refuses ids out of range unless there is a map; the kernel gives such routes no slot.
    whole = np.arange(experts, dtype=np.int32) if expert_map is None else expert_map
    want = reference(seen, experts, block, expert_map=whole)
    ours, expert_ids, total = emulator.align(library, variant, ids, experts, block, **kw)
    assert total == want.num_tokens_post_padded
    np.testing.assert_array_equal(ours[:total], want.sorted_token_ids)
    assert (ours[total:] == ids.size).all()
    np.testing.assert_array_equal(expert_ids[: total // block], want.expert_ids)
    assert (expert_ids[total // block :] == kw.get("inactive", -1)).all()


def routing(rng: np.random.Generator, variant: Variant, experts: int) -> np.ndarray:
    """Between 0 and the capacity of the variant (its parts not all full), skewed by a random power."""
    capacity = min(variant.capacity or 3 * variant.threads * variant.items, 9000)
    routes = int(rng.integers(0, capacity + 1)) if rng.random() < 0.8 else capacity
    return (experts * rng.random(routes) ** rng.integers(1, 6)).astype(np.int32)[:, None]


CHEAP = [v for v in VARIANTS.values() if v.threads * v.cluster <= 1024]


@pytest.mark.parametrize("variant", CHEAP, ids=lambda v: v.name)
def test_every_small_variant_gives_the_canonical_order_whatever_order_threads_run_in(
    library: ctypes.CDLL, variant: Variant
) -> None:
    rng = np.random.default_rng(sorted(VARIANTS).index(variant.name))
    for seed in range(4):
        experts = int(rng.choice([1, 2, 8, 33, 64, 100, 128, 255, 256]))
        block = int(rng.choice([8, 16, 32, 48, 64]))
        ids = routing(rng, variant, experts)
        kind = np.int64 if seed % 2 else np.int32
        if seed == 2 and ids.size:  # ids that name no expert
            ids[rng.integers(0, ids.size, 3), 0] = (-1, experts, 2**31 - 1)
        expert_map = None
        if seed == 3:  # a rank that holds some of the experts
            held = rng.random(experts) < 0.4
            expert_map = np.where(held, np.cumsum(held) - 1, -1).astype(np.int32)
        check(library, variant, ids.astype(kind), experts, block, seed=seed, expert_map=expert_map, inactive=-1 + seed)


@pytest.mark.parametrize("name", [v.name for v in VARIANTS.values() if v.kind is Kind.CLUSTER])
def test_blocks_of_a_cluster_take_their_routes_in_order(library: ctypes.CDLL, name: str) -> None:
    rng = np.random.default_rng(5)
    variant = VARIANTS[name]
    ids = rng.integers(0, 128, (variant.capacity or 0, 1)).astype(np.int32)
    check(library, variant, ids, 128, 64, seed=1)
    check(library, variant, ids[: ids.size // 3], 128, 8, seed=2)


@pytest.mark.parametrize("name", ["staged_512x1b", "cluster_8x256x1", "tiles_512x4"])
@pytest.mark.parametrize("experts", [1, 128, 257, 500])
def test_degenerate_routings(library: ctypes.CDLL, name: str, experts: int) -> None:
    variant = VARIANTS[name]
    for ids in (np.zeros(0), np.full(128, experts - 1), np.full(128, -1), np.zeros(1), np.arange(128) % experts):
        check(library, variant, ids.astype(np.int32)[:, None], experts, 16)
    nobody = np.full(experts, -1, np.int32)
    check(library, variant, np.zeros((64, 2), np.int32), experts, 8, expert_map=nobody)


@pytest.mark.parametrize("name", ["tiles_1024x1", "staged_512x1b", "cluster_8x256x1"])
def test_a_thousand_experts_take_several_scanning_warps(library: ctypes.CDLL, name: str) -> None:
    rng = np.random.default_rng(11)
    check(library, VARIANTS[name], rng.integers(0, 1024, (500, 1)).astype(np.int32), 1024, 8, seed=3)


def test_a_buffer_off_the_16_byte_boundary_is_written_all_the_same(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    for spare in range(4):  # the emulation's guard makes bases differ; sizes here end in every remainder
        check(library, VARIANTS["staged_512x1b"], rng.integers(0, 8, (21, 3)).astype(np.int32), 8, 8, spare=spare)


def test_another_order_of_arrival_is_told_apart(library: ctypes.CDLL) -> None:
    ids = np.array([[1, 0], [1, 0]], np.int32)
    ours, _, total = emulator.align(library, VARIANTS["staged_512x1b"], ids, 2, 8)
    assert ours[:2].tolist() == [1, 3] and ours[8:10].tolist() == [0, 2]
    assert reference(ids, 2, 8, arrival=[3, 2, 1, 0]).sorted_token_ids.tolist() != ours[:total].tolist()


def test_the_table_of_variants_is_the_list_in_the_source() -> None:
    text = Path(emulator.SOURCES, "align_variants.cuh").read_text()
    rows = re.findall(r"^ALIGN_(ONCE|TILES)\((\w+), ([^)]*)\)", text, re.M)
    source = {}
    for macro, name, values in rows:
        fields = [v.strip() for v in values.split(",")]
        if macro == "TILES":
            source[name] = Variant(Kind.TILES, int(fields[0]), int(fields[1]), ballot=fields[2] == "true")
            continue
        threads, items, cluster = map(int, fields[:3])
        kind = Kind.CLUSTER if cluster > 1 else Kind.SINGLE
        source[name] = Variant(kind, threads, items, cluster, fields[3] == "true", fields[4] == "true")
    assert source == VARIANTS


@pytest.mark.parametrize("routes", [0, 1, 7, 168, 5000])
@pytest.mark.parametrize(("experts", "block"), [(1, 8), (8, 64), (128, 8), (200, 48)])
def test_the_bound_is_what_the_worst_routing_takes(routes: int, experts: int, block: int) -> None:
    # Worst: as many experts as possible with one route in their last block.
    alone = np.arange(min(routes, experts), dtype=np.int64)
    ids = np.concatenate([alone, np.zeros(max(0, routes - experts), np.int64)])[:, None]
    used = reference(ids, experts, block).num_tokens_post_padded
    assert used <= Problem(routes, experts, block).bound <= used + block * max(0, experts - 1)
