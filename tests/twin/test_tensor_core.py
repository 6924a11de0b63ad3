# SPDX-License-Identifier: Apache-2.0
"""The tensor-core step against exact rational arithmetic, and the vector path against the scalar one."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeblock.errors import InputError
from routeblock.moe.routing import align
from routeblock.twin import gemm
from routeblock.twin.tensor_core import ARCHITECTURES, BFLOAT16, FLOAT16, OPERAND_TYPES, mma_m16n8k16

DTYPES = [np.float16, ml_dtypes.bfloat16]
MIN_EXPONENT = {FLOAT16.dtype: -14, BFLOAT16.dtype: -126}


def floor_log2(x: Fraction) -> int:
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def cut(x: Fraction, unit: Fraction) -> Fraction:
    return math.trunc(x / unit) * unit


def to_float32_toward_zero(x: Fraction) -> float:
    if x == 0:
        return 0.0
    e = max(floor_log2(abs(x)), -126)
    return float(cut(x, Fraction(2) ** (e - 23)))


def by_fractions(a: np.ndarray, b: np.ndarray, c: float, architecture: str) -> float:
    """One element of D by the rule as it is written, in exact rationals."""
    core, low = ARCHITECTURES[architecture], MIN_EXPONENT[a.dtype]
    acc = Fraction(c)
    for start in range(0, 16, core.group):
        pairs = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a, b, strict=True)][
            start : start + core.group
        ]
        exponents = [max(floor_log2(abs(x)), low) + max(floor_log2(abs(y)), low) for x, y in pairs if x and y]
        if acc:
            exponents.append(max(floor_log2(abs(acc)), -126))
        if not exponents:
            continue
        unit = Fraction(2) ** (max(exponents) - core.fraction_bits)
        total = cut(acc, unit) + sum((cut(x * y, unit) for x, y in pairs), Fraction(0))
        acc = Fraction(to_float32_toward_zero(total))
    return float(acc)


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: object, spread: int) -> np.ndarray:
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)).astype(dtype)
    x[rng.random(shape) < 0.15] = 0
    return x


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "spread"), [(np.float16, 6), (ml_dtypes.bfloat16, 6), (ml_dtypes.bfloat16, 60)])
def test_the_step_equals_exact_rational_arithmetic(architecture: str, dtype: object, spread: int) -> None:
    rng = np.random.default_rng(5)
    for _ in range(6):
        a, b = draw(rng, (16, 16), dtype, spread), draw(rng, (16, 8), dtype, spread)
        c = draw(rng, (16, 8), np.float32, spread)
        d = mma_m16n8k16(a, b, c, architecture)
        for m in range(0, 16, 3):
            for n in range(8):
                want = np.float32(by_fractions(a[m], b[:, n], float(c[m, n]), architecture))
                assert d[m, n].view(np.uint32) == want.view(np.uint32), (m, n)


def test_subnormal_operands_keep_the_minimum_exponent() -> None:
    tiny = np.float16(2**-24)
    a, b = np.zeros((16, 16), np.float16), np.zeros((16, 8), np.float16)
    a[0, 0], a[0, 1], b[:2, 0] = tiny, np.float16(2**-14), 1
    d = mma_m16n8k16(a, b, np.zeros((16, 8), np.float32), "hopper")
    assert float(d[0, 0]) == 2**-14 + 2**-24
    assert not np.signbit(d).any()  # an exact zero is +0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_infinities_and_nan_are_refused(bad: float) -> None:
    a, b, c = np.ones((16, 16), np.float16), np.ones((16, 8), np.float16), np.zeros((16, 8), np.float32)
    for x in (a, b, c):
        broken = [y.copy() for y in (a, b, c)]
        next(y for y, z in zip(broken, (a, b, c), strict=True) if z is x)[0, 0] = bad
        with pytest.raises(InputError, match="infinity or NaN"):
            mma_m16n8k16(*broken, "hopper")


def test_other_shapes_dtypes_and_architectures_are_refused() -> None:
    a, b, c = np.ones((16, 16), np.float16), np.ones((16, 8), np.float16), np.zeros((16, 8), np.float32)
    for arguments in (
        (a[:8], b, c),
        (a, b[:, :4], c),
        (a, b.astype(ml_dtypes.bfloat16), c),
        (a, b, c.astype(np.float64)),
    ):
        with pytest.raises(InputError):
            mma_m16n8k16(*arguments, "hopper")
    with pytest.raises(InputError, match="turing"):
        mma_m16n8k16(a, b, c, "turing")
    with pytest.raises(InputError, match="float32"):
        mma_m16n8k16(a.astype(np.float32), b, c, "hopper")


def layer_by_steps(
    x: np.ndarray, q: np.ndarray, z: np.ndarray, s: np.ndarray, architecture: str, launch: tuple[int, int, int]
) -> np.ndarray:
    """One expert, all rows in one block, as mma instructions in the kernel's order; every tile is one slice."""
    thread_k = launch[0]
    k, n = q.shape
    group = k // s.shape[0]
    steps = (q.astype(np.float32) - np.repeat(z, group, 0).astype(np.float32)) * np.repeat(s, group, 0).astype(
        np.float32
    )
    weights = steps.astype(s.dtype)
    rows = np.zeros((16, k), x.dtype)
    rows[: len(x)] = x
    out = np.zeros((16, n), np.float32)
    for column in range(0, n, 8):
        acc = np.zeros((thread_k // 32, 16, 8), np.float32)
        for k0 in range(0, k, 16):
            warp = k0 % thread_k // 32
            b = np.ascontiguousarray(weights[k0 : k0 + 16, column : column + 8])
            acc[warp] = mma_m16n8k16(np.ascontiguousarray(rows[:, k0 : k0 + 16]), b, acc[warp], architecture)
        total = acc[0] + acc[1] if thread_k == 64 else acc[0] + (acc[1] + (acc[3] + acc[2]))
        out[:, column : column + 8] = total
    return out[: len(x)].astype(x.dtype)


@pytest.mark.parametrize("architecture", ["ampere", "hopper"])
@pytest.mark.parametrize("launch", [(64, 128, 2), (128, 64, 4), (128, 128, 2)])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(np.float16, 1.0), (ml_dtypes.bfloat16, 1.0), (ml_dtypes.bfloat16, 2.0**-70)]
)
def test_the_gemm_is_mma_instructions_in_the_kernels_order(
    architecture: str, launch: tuple[int, int, int], dtype: object, scale: float
) -> None:
    # The last scale leaves the range of the vector path: the scalar one must give the same rule.
    rng = np.random.default_rng(9)
    k, n, tokens = 256, 256, 5
    q = rng.integers(0, 16, (1, k, n), dtype=np.uint8)
    z = rng.integers(0, 16, (1, k // 32, n), dtype=np.uint8)
    s = ((rng.random((1, k // 32, n)) + 0.5) * 0.01 * scale).astype(dtype)
    x = draw(rng, (tokens, k), dtype, 5)
    x[0, :40] = np.asarray(scale, dtype) * x[0, :40]
    plan = align(np.zeros((tokens, 1), np.int32), 1, 8)
    ours = gemm.moe_gemm(
        x, q, z, s, plan, top_k=1, architecture=architecture, thread_k=launch[0], thread_n=launch[1], grid=launch[2],
        group_size=32,
    )  # fmt: skip
    want = layer_by_steps(x, q[0], z[0], s[0], architecture, launch)
    assert np.array_equal(ours.view(np.uint16), want.view(np.uint16))


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding_to_16_bits_equals_the_format_libraries(value: float) -> None:
    with np.errstate(over="ignore"):
        for dtype, operand in OPERAND_TYPES.items():
            ours = np.float32(gemm.round_operand(np.float32(value), operand.dropped_bits))
            assert ours.view(np.uint32) == np.float32(value).astype(dtype).astype(np.float32).view(np.uint32)


def test_rounding_of_every_float16_neighbourhood() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    for x in (middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(-np.inf)), -middles):
        ours = np.array([gemm.round_operand(v, 13) for v in x[::7]], np.float32)
        assert np.array_equal(ours.view(np.uint32), x[::7].astype(np.float16).astype(np.float32).view(np.uint32))
