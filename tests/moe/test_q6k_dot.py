# SPDX-License-Identifier: Apache-2.0
"""The dot product's definition against a plain loop, and its bound against dequantisation."""

from __future__ import annotations

import numpy as np
import pytest

from routeblock.moe import q6k, q6k_dot

F = np.float32


def lane_by_lane(row: np.ndarray, activations: np.ndarray) -> np.float32:
    """The definition as its docstring says it, one product at a time."""
    lanes = [F(0)] * 32
    for block, a_blocks in zip(row, activations.reshape(len(row), 8, 36), strict=True):
        q, scales, d = q6k.unpack(block)
        a, a_d, _ = q6k.unpack_q8_1(a_blocks)
        for lane in range(32):
            parts = []
            for part in range(2):
                first = 128 * (lane // 16) + 64 * part + 32 * (lane % 16 // 8) + 4 * (lane % 8)
                total = sum((int(q[p]) - 32) * int(a[p // 32, p % 32]) for p in range(first, first + 4))
                parts.append(F(total * int(scales[first // 16])) * F(a_d[first // 32]))
            lanes[lane] = lanes[lane] + (parts[0] + parts[1]) * F(d)
    for step in (16, 8, 4, 2, 1):
        lanes = [lanes[i] + lanes[i + step] for i in range(step)]
    return lanes[0]


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_dot_follows_the_stated_order_of_roundings(blocks: int) -> None:
    rows = q6k.random_q6k(np.random.PCG64(1), (20, blocks))
    activations = q6k.random_q8_1(np.random.PCG64(2), (20, 8 * blocks))
    want = np.array([lane_by_lane(r, a) for r, a in zip(rows, activations, strict=True)], F)
    assert np.array_equal(q6k_dot.dot(rows, activations).view(np.uint32), want.view(np.uint32))


def test_another_order_of_roundings_gives_other_bits() -> None:
    """So the comparison above is one of bits and not of values that every order shares."""
    rows = q6k.random_q6k(np.random.PCG64(3), (200, 2))
    activations = q6k.random_q8_1(np.random.PCG64(4), (200, 16))
    sums, _ = q6k_dot.dequantized_dot(rows, activations)
    assert (q6k_dot.dot(rows, activations) != sums.astype(F)).any()


def test_dot_lies_within_its_bound_of_the_dequantised_sum() -> None:
    rows = q6k.random_q6k(np.random.PCG64(5), (500, 4))
    activations = q6k.random_q8_1(np.random.PCG64(6), (500, 32))
    sums, bounds = q6k_dot.dequantized_dot(rows, activations)
    error = np.abs(q6k_dot.dot(rows, activations).astype(np.float64) - sums)
    assert (error <= bounds).all()


@pytest.mark.parametrize("byte", [0, 130, 195, 209])
def test_one_flipped_weight_bit_leaves_the_bound(byte: int) -> None:
    """The bound is narrow enough to notice a wrong nibble, upper pair, scale or d."""
    rows = q6k.random_q6k(np.random.PCG64(7), (200, 2))
    activations = q6k.random_q8_1(np.random.PCG64(8), (200, 16))
    sums, bounds = q6k_dot.dequantized_dot(rows, activations)
    rows[:, 0, byte] ^= 4
    error = np.abs(q6k_dot.dot(rows, activations).astype(np.float64) - sums)
    assert (error > bounds).mean() > 0.9


def test_extreme_integers_stay_exact() -> None:
    """-32 * -128 * -128 four times is the largest sum a lane can meet; float32 holds it."""
    q = np.zeros((1, 256), np.uint8)
    weights = q6k.pack(q6k.Q6K(q, np.full((1, 16), -128, np.int8), np.ones(1, np.float16)))
    a = q6k.pack_q8_1(q6k.Q81(np.full((8, 32), -128, np.int8), np.ones(8, np.float16), np.zeros(8, np.float16)))
    assert q6k_dot.dot(weights, a) == -128.0 * 128 * 32 * 256
