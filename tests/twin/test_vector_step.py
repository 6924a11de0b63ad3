# SPDX-License-Identifier: Apache-2.0
"""The vector step against the scalar one, on bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from routeblock.twin.gemm import widen
from routeblock.twin.jit import address, jit
from routeblock.twin.tensor_core import ARCHITECTURES, FLOAT16, OPERAND_TYPES, dot_general, exponent_of
from routeblock.twin.vector import (
    CHUNK,
    ZERO_FIELD,
    expand_chunk,
    expand_chunk_subnormal,
    step_chunk8,
    step_chunk16,
)

LARGEST = np.float16(1.9990234)  # all fraction bits set


@jit()
def vector_steps(acc: Any, b: Any, b_exp: Any, a: Any, a_exp: Any, group: int, fraction_bits: int) -> None:
    for i in range(acc.shape[0]):
        at = address(acc, i), address(b, 16 * i), address(b_exp, 16 * i), address(a, i), address(a_exp, i)
        if group == 16:
            step_chunk16(at[0], at[1], at[2], CHUNK, at[3], at[4], fraction_bits)
        else:
            step_chunk8(at[0], at[1], at[2], CHUNK, at[3], at[4], fraction_bits)


@jit()
def scalar_steps(acc: Any, b: Any, a: Any, group: int, fraction_bits: int, min_exponent: int) -> None:
    for i in range(acc.shape[0]):
        for c in range(acc.shape[1]):
            for first in range(0, 16, group):
                column = b[16 * i : 16 * i + 16, c].copy()
                acc[i, c] = dot_general(acc[i, c], a[i], column, first, first + group, fraction_bits, min_exponent)


@jit()
def expand_rows(b: Any, b_exp: Any, q: Any, terms: Any, dropped_bits: int, subnormal: bool) -> Any:
    seen = 0
    for i in range(terms.shape[0]):
        at = address(b, 16 * i), address(b_exp, 16 * i), address(q, 16 * i), address(terms, i)
        if subnormal:
            seen |= expand_chunk_subnormal(at[0], at[1], CHUNK, at[2], CHUNK, at[3], dropped_bits)
        else:
            seen |= expand_chunk(at[0], at[1], CHUNK, at[2], CHUNK, at[3], dropped_bits)
    return seen


@jit()
def widen_all(bits: Any, out: Any, dropped_bits: int) -> None:
    for i in range(bits.size):
        out[i] = widen(bits[i], dropped_bits)


@jit()
def field_words(x: Any, min_exponent: int, zero: int) -> Any:
    words = np.empty(x.shape, np.int32)
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            field = np.int32(max(exponent_of(x[i, k], min_exponent), zero)) << 7
            words[i, k] = np.int32((field << 16) | (field & 0xFFFF))
    return words


def b_fields(b: Any, min_exponent: int) -> Any:
    """Exponent fields in the layout of a chunk: column c low, column c + 16 high, in a word."""
    exponents = np.maximum(np.frexp(b)[1] - 1, min_exponent) + 127
    fields = np.where(b == 0, 0, exponents).astype(np.int16) << 7
    pairs = np.stack([fields[:, :16], fields[:, 16:]], axis=2)
    return np.ascontiguousarray(pairs.reshape(b.shape[0], CHUNK))


def both(a: Any, b: Any, acc: Any, architecture: str, steps: int) -> tuple[Any, Any]:
    core = ARCHITECTURES[architecture]
    operand = OPERAND_TYPES[a.dtype]
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    words, fields = field_words(wide_a, operand.min_exponent, ZERO_FIELD), b_fields(wide_b, operand.min_exponent)
    ours, reference = acc.copy(), acc.copy()
    for _ in range(steps):
        vector_steps(ours, wide_b, fields, wide_a, words, core.group, core.fraction_bits)
        scalar_steps(reference, wide_b, wide_a, core.group, core.fraction_bits, operand.min_exponent)
    return ours.view(np.uint32), reference.view(np.uint32)


def spread(rng: Any, shape: tuple[int, ...], dtype: Any, exponents: tuple[int, int], zeros: float) -> Any:
    x = rng.uniform(1, 2, shape) * 2.0 ** rng.integers(*exponents, shape) * rng.choice([-1, 1], shape)
    x[rng.random(shape) < zeros] = 0
    return x.astype(dtype)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_vector_step_equals_scalar_step_over_the_range_of_exponents(architecture: str, dtype: Any) -> None:
    rng = np.random.default_rng(7)
    wide = (-24, 15) if dtype == np.float16 else (-49, 26)
    for exponents, zeros in ((wide, 0.1), ((-3, 1), 0.0), ((-6, 2), 0.5), (wide, 0.95)):
        a = spread(rng, (2000, 16), dtype, exponents, zeros)
        b = spread(rng, (2000 * 16, CHUNK), dtype, (max(exponents[0], -24), min(exponents[1], 15)), zeros)
        ours, reference = both(a, b, np.zeros((2000, CHUNK), np.float32), architecture, 4)
        assert np.array_equal(ours, reference)
        assert zeros > 0.9 or len(np.unique(reference)) > 1000


def test_a_sum_of_products_that_leaves_int32_with_the_accumulator_is_exact() -> None:
    """16 products of the largest significands and of one sign, on an accumulator of their exponent: the only way."""
    rng = np.random.default_rng(8)
    a = np.full((400, 16), LARGEST)
    b = np.full((400 * 16, CHUNK), LARGEST)
    b[rng.random(b.shape) < 0.02] = np.float16(1.5)
    b[: 200 * 16] *= -1
    acc = np.full((400, CHUNK), 1.9999999, np.float32)
    acc[:200] *= -1
    total = np.abs((a.astype(np.float64)[:, :, None] * b.astype(np.float64).reshape(400, 16, CHUNK)).sum(1) + acc)
    assert (total * 2.0 ** ARCHITECTURES["hopper"].fraction_bits >= 2.0**31).mean() > 0.3
    ours, reference = both(a, b, acc, "hopper", 1)
    assert np.array_equal(ours, reference)


def test_cancellation_leaves_a_positive_zero() -> None:
    a = np.ones((1, 16), np.float16)
    b = np.tile(np.array([[1.0], [-1.0]], np.float16), (8, CHUNK))
    for architecture in ARCHITECTURES:
        ours, reference = both(a, b, np.zeros((1, CHUNK), np.float32), architecture, 1)
        assert not ours.any() and not reference.any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_expansion_is_the_rounded_product_for_every_scale_and_step(dtype: Any) -> None:
    operand = OPERAND_TYPES[np.dtype(dtype)]
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        values = bits.view(dtype).astype(np.float64)
    usable = np.abs(values) <= operand.largest / 15
    if dtype == ml_dtypes.bfloat16:  # the vector step is not used below
        usable &= (np.abs(values) >= 2.0**-100) & (np.abs(values) <= 2.0**22)
    bits = bits[usable]
    bits = np.concatenate([bits, np.zeros(-bits.size % CHUNK, np.uint16)])
    scale = np.empty(bits.size, np.float32)
    widen_all(bits, scale, operand.dropped_bits)
    assert np.array_equal(scale, bits.view(dtype).astype(np.float32))
    scale = scale.reshape(-1, CHUNK)
    for zero in (0, 7, 15):
        terms = np.stack([scale, -(np.float32(zero) * scale)], axis=1).reshape(-1, 2 * CHUNK)
        q = np.tile(np.repeat(np.arange(16, dtype=np.uint8)[:, None], CHUNK, 1), (scale.shape[0], 1))
        b, b_exp = np.empty(q.shape, np.float32), np.empty(q.shape, np.int16)
        assert expand_rows(b, b_exp, q, terms, operand.dropped_bits, operand is FLOAT16) == 15
        exact = (np.arange(16) - zero)[None, :, None] * scale.astype(np.float64)[:, None, :]
        expected = exact.astype(np.float32).astype(dtype).astype(np.float32).reshape(b.shape)
        assert np.array_equal(b, expected)
        assert np.array_equal(b_exp, b_fields(expected, operand.min_exponent))
        normal = np.repeat((np.abs(scale) >= 2.0**operand.min_exponent).all(1), 16)
        b[:], b_exp[:] = 0, 0
        expand_rows(b, b_exp, q, terms, operand.dropped_bits, False)
        assert np.array_equal(b[normal], expected[normal])
        assert np.array_equal(b_exp[normal], b_fields(expected, operand.min_exponent)[normal])


def test_expansion_reports_bits_beyond_a_nibble() -> None:
    q = np.zeros((16, CHUNK), np.uint8)
    q[9, 30] = 16
    terms = np.ones((1, 2 * CHUNK), np.float32)
    assert expand_rows(np.empty(q.shape, np.float32), np.empty(q.shape, np.int16), q, terms, 13, False) == 16
