# SPDX-License-Identifier: Apache-2.0
"""The fast paths' order of roundings against a plain loop, and its bound against dequantisation."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from routeblock.moe import q6k, q6k_dot
from routeblock.moe.q6k_segments import bound, dot, fma

F = np.float32


def rounded(value: Fraction) -> np.float32:
    """To float32, to nearest, ties to even, for normal results."""
    if value == 0:
        return F(0)
    exponent = 0
    magnitude = abs(value)
    while magnitude >= 2**24:
        magnitude /= 2
        exponent += 1
    while magnitude < 2**23:
        magnitude *= 2
        exponent -= 1
    return F(float(round(magnitude)) * 2.0**exponent * (1 if value > 0 else -1))


def exact(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(4000).astype(F) for _ in range(2))
    # Sums whose float64 form would be rounded twice: c near half a unit of the product's last float32 place.
    c = (a.astype(np.float64) * b * 2.0 ** rng.integers(-30, 30, a.size)).astype(F)
    want = np.array([exact(*each) for each in zip(a, b, c, strict=True)], F)
    assert np.array_equal(fma(a, b, c).view(np.uint32), want.view(np.uint32))


def test_two_roundings_would_differ() -> None:
    """A product half a float32 place above 1, and an addend that decides the tie but vanishes in float64."""
    a, b, c = F(1 + 2.0**-12), F(1 + 2.0**-12), F(2.0**-60)
    twice = F(np.float64(a) * np.float64(b) + np.float64(c))
    got = fma(np.array([a]), np.array([b]), np.array([c]))[0]
    assert got == exact(a, b, c) != twice


def one_by_one(row: np.ndarray, activations: np.ndarray) -> np.float32:
    """The definition as its docstring says it, one 32 block at a time."""
    total = None
    for first in range(0, len(row), 2):
        p = F(0)
        for block, a_blocks in zip(
            row[first : first + 2], activations.reshape(-1, 8, 36)[first : first + 2], strict=True
        ):
            q, scales, d = q6k.unpack(block)
            a, a_d, _ = q6k.unpack_q8_1(a_blocks)
            t = F(0)
            for j in range(8):
                places = range(32 * j, 32 * j + 32)
                total_32 = sum((int(q[k]) - 32) * int(a[j, k % 32]) * int(scales[k // 16]) for k in places)
                assert abs(total_32) < 2**24
                t = exact(F(total_32), F(a_d[j]), t)
            p = exact(t, F(d), p)
        total = p if total is None else F(total + p)
    assert total is not None
    return total


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_dot_follows_the_stated_order_of_roundings(blocks: int) -> None:
    rows = q6k.random_q6k(np.random.PCG64(1), (6, blocks))
    activations = q6k.random_q8_1(np.random.PCG64(2), (6, 8 * blocks))
    want = np.array([one_by_one(r, a) for r, a in zip(rows, activations, strict=True)], F)
    assert np.array_equal(dot(rows, activations).view(np.uint32), want.view(np.uint32))


def test_the_order_is_not_study_bs() -> None:
    """So equality with one of them says something."""
    rows = q6k.random_q6k(np.random.PCG64(3), (200, 2))
    activations = q6k.random_q8_1(np.random.PCG64(4), (200, 16))
    assert (dot(rows, activations) != q6k_dot.dot(rows, activations)).any()


def test_dot_lies_within_its_bound_of_the_dequantised_sum() -> None:
    rows = q6k.random_q6k(np.random.PCG64(5), (500, 4))
    activations = q6k.random_q8_1(np.random.PCG64(6), (500, 32))
    sums, bounds = bound(rows, activations)
    assert (np.abs(dot(rows, activations).astype(np.float64) - sums) <= bounds).all()


def test_extreme_integers_stay_exact() -> None:
    """All products at their largest: 32 * 127 * 128 * 32 is below 2**24 and exact in float32."""
    rows = np.zeros((1, 2, 210), np.uint8)
    rows[..., 192:208] = 128  # scale -128
    rows[..., 208:210] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    q = np.full((1, 16, 32), 127, np.int8)
    one = np.ones((1, 16), np.float16)
    activations = q6k.pack_q8_1(q6k.Q81(q, one, one))
    assert dot(rows, activations)[0] == 512 * 32 * 127 * 128


@pytest.mark.parametrize("byte", [0, 130, 195, 209])
def test_one_flipped_weight_bit_leaves_the_bound(byte: int) -> None:
    rows = q6k.random_q6k(np.random.PCG64(7), (200, 2))
    activations = q6k.random_q8_1(np.random.PCG64(8), (200, 16))
    changed = rows.copy()
    changed[:, 0, byte] ^= 1
    sums, bounds = bound(rows, activations)
    assert np.mean(np.abs(dot(changed, activations).astype(np.float64) - sums) > bounds) > 0.9
