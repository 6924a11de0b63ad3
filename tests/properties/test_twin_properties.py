# SPDX-License-Identifier: Apache-2.0
"""The twin for any routing and numbers: what the kernel's arithmetic cannot depend on changes no bit."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeblock.moe.partition import partition
from routeblock.moe.routing import AlignedPlan, align
from routeblock.twin.gemm import moe_gemm
from routeblock.twin.tensor_core import ARCHITECTURES, mma_m16n8k16

K, N, EXPERTS, TOP_K, GROUP = 256, 128, 3, 2, 64
SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from([np.float16, ml_dtypes.bfloat16])
GRIDS = st.integers(1, 40)


def _layer(tokens: int, dtype: Any, seed: int) -> tuple[dict[str, Any], np.ndarray]:
    rng = np.random.default_rng(seed)
    given_ = {
        "a": (rng.standard_normal((tokens, K)) * 2.0 ** rng.integers(-4, 5, (tokens, K))).astype(dtype),
        "q": rng.integers(0, 16, (EXPERTS, K, N), dtype=np.uint8),
        "zeros": rng.integers(0, 16, (EXPERTS, K // GROUP, N), dtype=np.uint8),
        "scales": (rng.random((EXPERTS, K // GROUP, N)) * 0.02).astype(dtype),
    }
    return given_, rng.integers(0, EXPERTS, (tokens, TOP_K))


def _compute(layer: dict[str, Any], plan: AlignedPlan, grid: int, architecture: str) -> np.ndarray:
    launch = {"thread_k": 64, "thread_n": 128, "grid": grid, "group_size": GROUP}
    return moe_gemm(**layer, plan=plan, top_k=TOP_K, architecture=architecture, **launch).view(np.uint16)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 24), DTYPES, SEEDS, GRIDS, st.sampled_from(["ampere", "hopper"]))
def test_the_order_of_routes_inside_a_block_changes_no_bit(
    tokens: int, dtype: Any, seed: int, grid: int, architecture: str
) -> None:
    layer, ids = _layer(tokens, dtype, seed)
    rng = np.random.default_rng(seed)
    plan = align(ids, EXPERTS, 8, rng.permutation(ids.size))
    rows = [[*rng.permutation(plan.members(b)), *[ids.size] * 8][:8] for b in range(plan.num_blocks)]
    other = dataclasses.replace(plan, sorted_token_ids=np.array(rows, np.int32).reshape(-1))
    assert np.array_equal(_compute(layer, plan, grid, architecture), _compute(layer, other, grid, architecture))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 24), DTYPES, SEEDS, GRIDS, GRIDS)
def test_a_tile_in_one_slice_does_not_depend_on_plan_or_grid(
    tokens: int, dtype: Any, seed: int, grid: int, other: int
) -> None:
    layer, ids = _layer(tokens, dtype, seed)
    rng = np.random.default_rng(seed)
    plans = [align(ids, EXPERTS, 8, rng.permutation(ids.size)) for _ in range(2)]
    found = []
    for plan, size in zip(plans, (grid, other), strict=True):
        cut = partition(plan.num_blocks, N, K, 128, 64, size, GROUP)
        whole = [not cut.is_split(int(b), 0) for b in plan.block_of()]
        found.append((_compute(layer, plan, size, "hopper"), np.array(whole)))
    both = found[0][1] & found[1][1]
    assert np.array_equal(found[0][0][both], found[1][0][both])


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 24), DTYPES, SEEDS, GRIDS)
def test_a_row_of_zeros_gives_zeros_and_touches_no_other_row(tokens: int, dtype: Any, seed: int, grid: int) -> None:
    layer, ids = _layer(tokens, dtype, seed)
    plan = align(ids, EXPERTS, 8)
    before = _compute(layer, plan, grid, "hopper")
    silent = int(np.random.default_rng(seed).integers(tokens))
    layer["a"] = layer["a"].copy()
    layer["a"][silent] = 0
    after = _compute(layer, plan, grid, "hopper").reshape(tokens, TOP_K, N)
    assert not after[silent].any()  # +0, in every bit
    others = np.arange(tokens) != silent
    assert np.array_equal(after[others], before.reshape(tokens, TOP_K, N)[others])


def _exact_step(a: np.ndarray, b: np.ndarray, c: float, architecture: str) -> float:
    """One element of D by the published rule in integers: every addend cut toward zero at one common place."""
    core, acc = ARCHITECTURES[architecture], Fraction(c)
    low = -14 if a.dtype == np.float16 else -126

    def exponent(x: float, least: int) -> int:
        return max(math.frexp(x)[1] - 1, least)

    for start in range(0, 16, core.group):
        pairs = [(float(x), float(y)) for x, y in zip(a[start : start + core.group], b[start:], strict=False)]
        tops = [exponent(x, low) + exponent(y, low) for x, y in pairs if x and y]
        tops += [exponent(float(acc), -126)] if acc else []
        if tops:
            step = Fraction(2) ** (max(tops) - core.fraction_bits)
            addends = [acc, *(Fraction(x) * Fraction(y) for x, y in pairs)]
            total = step * sum(math.trunc(x / step) for x in addends)
            acc = _toward_zero(total)
    return float(acc)


def _toward_zero(x: Fraction) -> Fraction:
    near = np.float32(float(x))  # float64 of a sum of at most 17 addends of 26 bits and one place is exact
    if abs(Fraction(float(near))) > abs(x):
        near = np.nextafter(near, np.float32(0))
    return Fraction(float(near))


@pytest.mark.parametrize("architecture", ["ampere", "ada", "hopper"])
@settings(max_examples=60, deadline=None)
@given(DTYPES, SEEDS, st.integers(0, 40))
def test_the_step_equals_the_slow_model(architecture: str, dtype: Any, seed: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    spread = min(spread, 6) if dtype is np.float16 else spread

    def draw(shape: tuple[int, int], kind: Any) -> np.ndarray:
        x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)).astype(kind)
        x[rng.random(shape) < 0.2] = 0
        return x

    a, b, c = draw((16, 16), dtype), draw((16, 8), dtype), draw((16, 8), np.float32)
    d = mma_m16n8k16(a, b, c, architecture)
    for m, n in ((0, 0), (5, 3), (15, 7)):
        want = np.float32(_exact_step(a[m], b[:, n], float(c[m, n]), architecture))
        assert d[m, n].view(np.uint32) == want.view(np.uint32), (m, n)
