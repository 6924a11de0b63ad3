# SPDX-License-Identifier: Apache-2.0
"""The kernel's own source, run on a CPU, against the model: bits, sentinels, guards, in every form of a launch."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import q6k_emulator as emulator

from routeblock.cuda.q6k_plan import Products, Sizes, Tuning, plan
from routeblock.moe import q6k
from routeblock.moe.q6k_segments import dot

SMALL = Tuning(warps=2, tile_segments=32, tiles=1, capacity=8, few=3, fused=False)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulator.build(tmp_path_factory.mktemp("emulator"))


def jobs(sizes: Sizes, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((sizes.tokens, sizes.cols)).astype(np.float32)
    shape = (sizes.experts, sizes.rows, sizes.blocks)
    weights = q6k.random_q6k(np.random.PCG64(seed), shape)
    return rng.integers(0, sizes.experts, sizes.slots).astype(np.int32), x, weights


def wanted(sizes: Sizes, ids: np.ndarray, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    activations = q6k.quantize_q8_1(x)
    out = np.full((sizes.slots, sizes.rows), 0, np.float32)
    out.view(np.uint8)[:] = emulator.POISON
    for slot, expert in enumerate(ids):
        if 0 <= expert < sizes.experts:
            out[slot] = dot(weights[expert], activations[slot // sizes.top_k][None])
    return out


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("path", list(Products))
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "prepared"])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(16, 3, 8, 48, 512),  # more slots than experts: chunks of jobs
        Sizes(6, 9, 2, 40, 1024),  # by slot; rows that no tile divides
        Sizes(5, 2, 1, 16, 1536),  # three segments
        Sizes(4, 2, 1, 32, 2048),
        Sizes(4, 2, 2, 16, 256),  # an odd number of blocks
        Sizes(3, 2, 1, 24, 768),
        Sizes(3, 2, 1, 7, 512),  # rows that no 16 bytes divide
    ],
    ids=str,
)
def test_every_path_gives_the_models_bits(library: ctypes.CDLL, sizes: Sizes, fused: bool, path: Products) -> None:
    ids, x, weights = jobs(sizes, 3)
    launch = plan(sizes, replace(SMALL, fused=fused), path)
    got = emulator.products(library, sizes, launch, ids, x, weights)
    assert same(got, wanted(sizes, ids, x, weights))


@pytest.mark.parametrize("path", list(Products))
def test_sentinels_and_ids_beyond_the_pool_leave_their_rows_alone(library: ctypes.CDLL, path: Products) -> None:
    for sizes in (Sizes(9, 4, 1, 32, 512), Sizes(9, 40, 1, 32, 512)):
        ids, x, weights = jobs(sizes, 4)
        ids[[0, 4]] = -1, sizes.experts
        got = emulator.products(library, sizes, plan(sizes, SMALL, path), ids, x, weights)
        assert same(got, wanted(sizes, ids, x, weights))
        assert (got[[0, 4]].view(np.uint8) == emulator.POISON).all()


def test_one_expert_for_more_jobs_than_a_block_holds(library: ctypes.CDLL) -> None:
    sizes = Sizes(70, 70, 1, 16, 512)
    ids, x, weights = jobs(sizes, 5)
    ids[:] = 3
    for path in Products:
        got = emulator.products(library, sizes, plan(sizes, SMALL, path), ids, x, weights)
        assert same(got, wanted(sizes, ids, x, weights))


@pytest.mark.parametrize(
    "tuning",
    [
        Tuning(1, 16, 1, 8, 4, True),
        Tuning(2, 32, 3, 16, 0, False),
        Tuning(4, 128, 1, 32, 2, True),
        Tuning(3, 64, 2, 8, 9, False),
    ],
    ids=str,
)
def test_tuning_moves_no_bit(library: ctypes.CDLL, tuning: Tuning) -> None:
    sizes = Sizes(24, 4, 8, 96, 1024)
    ids, x, weights = jobs(sizes, 6)
    got = emulator.products(library, sizes, plan(sizes, tuning), ids, x, weights, seed=7)
    assert same(got, wanted(sizes, ids, x, weights))
