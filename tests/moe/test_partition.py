# SPDX-License-Identifier: Apache-2.0
"""The cut of a GEMM into slices: published figures, an enumerator written apart, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeblock.errors import InputError
from routeblock.moe.devices import DEVICES
from routeblock.moe.launches import SELECTED, Launch, selected_launch
from routeblock.moe.partition import partition
from routeblock.moe.routing import align
from routeblock.moe.sources import Source
from routeblock.route_block.prediction.predict import changed_routes, signatures
from routeblock.route_block.scorer.block_walk import routes_computed_differently, slices_by_tile


def test_published_w13_on_246() -> None:
    cut = partition(50, 1536, 2048, 128, 64, 246, 128)
    assert (cut.tiles, cut.direct_tiles, cut.iters) == (600, 492, 16)
    assert cut.slices(40, 11) == [(0, 32)]
    assert cut.slices(41, 0) == [(0, 16), (16, 32)]
    assert sum(cut.is_split(b, n) for b in range(50) for n in range(12)) == 108


def test_published_w2_on_246_repeats_every_four_n_tiles() -> None:
    cut = partition(50, 2048, 768, 128, 64, 246, 128)
    split = [(b, n) for b in range(50) for n in range(16) if cut.is_split(b, n)]
    assert (cut.direct_tiles, cut.iters, len(split), split[0]) == (492, 16, 154, (30, 13))
    assert len({cut.signature(b) for b in range(31, 50)}) == 1


@pytest.mark.parametrize(("grid", "single"), [(200, True), (240, False), (246, False)])
def test_single_slice_needs_thread_sizes_in_the_right_order(grid: int, single: bool) -> None:
    assert partition(50, 1536, 2048, 128, 64, grid, 128).is_single_slice is single
    assert partition(50, 1536, 2048, 64, 128, 240, 128).is_single_slice  # the superseded prediction's swap


def test_full_k_mode_splits_nothing_and_enlarges_nothing() -> None:
    for grid in (7, 246, 5000):
        cut = partition(50, 1536, 2048, 128, 64, grid, 128, full_k=True)
        assert cut.is_single_slice and cut.iters == 32


def test_without_groups_the_share_is_not_rounded() -> None:
    assert partition(5, 256, 512, 128, 64, 3, -1).iters == partition(5, 256, 512, 128, 64, 3, 64).iters
    assert partition(3, 256, 2048, 128, 64, 132, -1).iters == 2
    assert partition(3, 256, 2048, 128, 64, 132, 256).iters == 4


def test_one_group_over_k_is_cut_as_one_scale_a_column() -> None:
    assert partition(3, 256, 256, 128, 64, 132, 256) == partition(3, 256, 256, 128, 64, 132, -1)
    assert partition(3, 256, 256, 128, 64, 8, 256).iters == 3
    assert slices_by_tile(6, 4, 8, 256, 64) == slices_by_tile(6, 4, 8, -1, 64)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 400),
    st.sampled_from([(64, 128), (128, 64), (128, 128)]),
    st.sampled_from([-1, 32, 64, 128]),
)
def test_slices_equal_a_walk_over_the_cuda_blocks(
    blocks: int, n_tiles: int, k_units: int, grid: int, threads: tuple[int, int], group: int
) -> None:
    thread_k, thread_n = threads
    n, k = n_tiles * thread_n, k_units * 128
    cut = partition(blocks, n, k, thread_n, thread_k, grid, group)
    walked = slices_by_tile(cut.tiles, cut.k_tiles, grid, group, thread_k)
    for tile in range(cut.tiles):
        slices = cut.slices(*divmod(tile, n_tiles))
        assert frozenset(slices) == walked[tile]
        assert [s[0] for s in slices[1:]] == [s[1] for s in slices[:-1]]
        assert (slices[0][0], slices[-1][1]) == (0, cut.k_tiles)
    assert cut.is_single_slice == all(len(w) == 1 for w in walked)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([33, 132, 246, 528]))
def test_predicted_routes_equal_those_of_the_walk(seed: int, grid: int) -> None:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.choice(12, 4, replace=False, p=None) for _ in range(30)]).astype(np.int32)
    one, two = align(ids, 12, 8), align(ids, 12, 8, rng.permutation(ids.size))
    cut = partition(one.num_blocks, 512, 1024, 128, 64, grid, 128)
    predicted = changed_routes(signatures(one, cut, 64), signatures(two, cut, 64))
    assert predicted == routes_computed_differently(one, two, 512, 1024, 64, 128, grid, 128)


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": 1500},
        {"k": 2000},
        {"thread_k": 0},
        {"thread_k": 24},
        {"grid": 0},
        {"blocks": -1},
        {"group_size": 0},
        {"group_size": 24},
        {"group_size": 4096},
    ],
)
def test_sizes_that_do_not_divide_are_refused(arguments: dict[str, int]) -> None:
    sizes = {"blocks": 50, "n": 1536, "k": 2048, "thread_n": 128, "thread_k": 64, "grid": 246, "group_size": 128}
    with pytest.raises(InputError):
        partition(**(sizes | arguments))


def test_a_tile_outside_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        partition(50, 1536, 2048, 128, 64, 246, 128).slices(50, 0)


def test_recorded_launches_and_their_status() -> None:
    found = selected_launch("H200", 8, "float16", 128, 1536, 2048)
    assert (found.launch, found.status) == (Launch(128, 64, 528), Source.RECORDED)
    assert selected_launch("H200", 8, "float16", 32, 768, 1024).launch == Launch(64, 128, 528)
    assert selected_launch("H200", 16, "float16", 128, 1536, 2048).launch.grid == 396
    assert selected_launch("H200", 48, "float16", 128, 1536, 2048).launch.grid == 264
    assert selected_launch("RTX 3090", 8, "float16", 128, 1536, 2048).launch == Launch(64, 128, 246)
    assert selected_launch("RTX 3090", 8, "float16", 128, 2048, 768).status is Source.ASSUMED
    with pytest.raises(InputError, match="read off"):
        selected_launch("H200", 64, "float16", 128, 1536, 2048)
    assert {entry.gpu for entry in SELECTED} <= set(DEVICES)
