# SPDX-License-Identifier: Apache-2.0
"""Packings and their inverses; the recorded digests are compared in tests/twin/test_golden.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeblock.errors import InputError
from routeblock.moe import awq
from routeblock.twin.weights import unpack_into


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_every_packing_has_its_inverse(k: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 16, (16 * k, 64 * n), dtype=np.uint8)
    scales = rng.random((k, 64 * n)).astype(np.float16)
    assert np.array_equal(awq.unpack_awq(awq.pack_awq(q)), q)
    assert np.array_equal(awq.marlin_unpack_weights(awq.marlin_repack_weights(q)), q)
    assert np.array_equal(awq.marlin_unpack_zeros(awq.marlin_pack_zeros(q)), q)
    assert np.array_equal(awq.marlin_unpermute_scales(awq.marlin_permute_scales(scales)), scales)
    out = np.full((16 * k, 64 * n + 8), 255, np.uint8)
    unpack_into(awq.pack_awq(q), out, 8)
    assert np.array_equal(out[:, 8:], q) and (out[:, :8] == 255).all()


def test_neighbouring_zero_points_stay_apart_and_zero_stays_zero() -> None:
    zeros = np.tile(np.arange(16, dtype=np.uint8), 8)[None, :]
    assert np.array_equal(awq.unpack_awq(awq.pack_awq(zeros)), zeros)
    assert not awq.unpack_awq(awq.pack_awq(np.zeros((1, 64), np.uint8))).any()
    assert not awq.marlin_unpack_zeros(awq.marlin_pack_zeros(np.zeros((2, 64), np.uint8))).any()


def test_a_nibble_stands_where_the_checkpoint_format_says() -> None:
    row = np.zeros((1, 8), np.uint8)
    row[0, 1] = 5  # column 1 is nibble 4
    assert awq.pack_awq(row).tolist() == [[5 << 16]]


def test_one_group_has_another_scale_order_than_several() -> None:
    row = np.arange(64, dtype=np.float32)[None, :]
    assert awq.marlin_permute_scales(row)[0, :8].tolist() == [0, 1, 8, 9, 16, 17, 24, 25]
    assert awq.marlin_permute_scales(np.vstack([row, row]))[0, :8].tolist() == [0, 8, 16, 24, 32, 40, 48, 56]


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (awq.pack_awq, np.zeros((2, 12), np.uint8)),
        (awq.pack_awq, np.full((2, 8), 16, np.uint8)),
        (awq.pack_awq, np.zeros((2, 8), np.int32)),
        (awq.unpack_awq, np.zeros((2, 8), np.uint8)),
        (awq.marlin_repack_weights, np.zeros((8, 64), np.uint8)),
        (awq.marlin_repack_weights, np.zeros((16, 32), np.uint8)),
        (awq.marlin_pack_zeros, np.zeros((1, 32), np.uint8)),
        (awq.marlin_permute_scales, np.zeros((2, 32), np.float16)),
        (awq.marlin_permute_scales, np.zeros((1, 16), np.float16)),
    ],
)
def test_wrong_shapes_dtypes_and_values_are_refused(function: object, x: np.ndarray) -> None:
    with pytest.raises(InputError, match="weight packing"):
        function(x)  # type: ignore[operator]
