# SPDX-License-Identifier: Apache-2.0
"""The exact model of one element against the twin, on bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from drawn import problem

from routeblock.diagnose.layer_run import Setting, only
from routeblock.diagnose.summation_tree import Element, Form, Kind, Terms, build, form_of
from routeblock.moe.launches import Launch
from routeblock.moe.partition import BLOCK_SIZES, thread_sizes
from routeblock.moe.routing import align
from routeblock.twin.tensor_core import FLOAT16, architecture_of

BFLOAT16 = ml_dtypes.bfloat16
# (dtype, group size, architecture, sums of slices in float32, full K)
FORMATS: list[tuple[Any, int, str, bool, bool]] = [
    (np.float16, 128, "hopper", True, False),
    (BFLOAT16, 32, "ampere", True, False),
    (np.float16, -1, "ada", False, False),
    (BFLOAT16, 64, "hopper", False, False),
    (np.float16, 64, "ampere", True, True),
]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{np.dtype(f[0]).name}-g{f[1]}-{f[2]}")
def test_the_tree_of_an_element_gives_the_twins_bits(block_size: int, fmt: tuple[Any, int, str, bool, bool]) -> None:
    dtype, group_size, architecture, fp32, full_k = fmt
    rng = np.random.default_rng([5, block_size, group_size + 1])
    drawn, ids = problem(
        rng, tokens=40, top_k=3, experts=4, k=1024, n=512, group_size=group_size, dtype=dtype,
        zero_points=group_size != 32, weighted=fp32,
    )  # fmt: skip
    plan = align(ids, 4, block_size, rng.permutation(ids.size))
    core, owner = architecture_of(architecture), plan.block_of()
    slices_seen = set()
    for thread_k, thread_n in thread_sizes(block_size):
        for grid in (11, 45, 700):
            setting = Setting(Launch(thread_k, thread_n, grid), architecture, fp32, full_k)
            cut, out = drawn.cut(plan.num_blocks, setting), drawn.compute(plan, setting)
            for route, column in zip(rng.integers(0, ids.size, 6), rng.integers(0, 512, 6), strict=True):
                block = int(owner[route])
                form = form_of(cut, block, column, thread_k, thread_n, core, fp32)
                slices_seen.add(len(form.slices))
                expert = int(plan.expert_ids[block])
                element = Element(build(form), drawn.terms(expert, route, column))
                value = element.rounded()
                for _, factor in drawn.tail(expert, route, column):
                    value = value * factor
                assert value.view(np.uint16)[0] == out.view(np.uint16)[route, column], (form, route, column)
    assert max(slices_seen) == 1 if full_k else max(slices_seen) > 2


def test_operands_of_every_magnitude_give_the_twins_bits() -> None:
    """Subnormal weights, inputs that differ by 2^30, sums that cancel: where cuts and exponents matter most."""
    rng = np.random.default_rng(9)
    drawn, ids = problem(rng, tokens=12, top_k=2, experts=3, k=512, n=128, group_size=128, dtype=np.float16)
    a = drawn.a.astype(np.float32) * 2.0 ** rng.integers(-20, 9, drawn.a.shape)
    a[:, 1::2] = np.where(rng.random(a[:, 1::2].shape) < 0.5, -a[:, ::2], 0)
    scales = drawn.weights.scales.astype(np.float32) * 2.0 ** rng.integers(-14, 1, drawn.weights.scales.shape)
    hard = type(drawn)(
        a.astype(np.float16), drawn.weights._replace(scales=scales.astype(np.float16)), drawn.group_size, drawn.top_k
    )
    plan = align(ids, 3, 8)
    for architecture in ("ampere", "hopper"):
        setting = Setting(Launch(128, 128, 7), architecture)
        cut, out = hard.cut(plan.num_blocks, setting), hard.compute(plan, setting)
        for route in range(ids.size):
            block, column = int(plan.block_of()[route]), int(rng.integers(128))
            form = form_of(cut, block, column, 128, 128, architecture_of(architecture), True)
            element = Element(build(form), hard.terms(int(plan.expert_ids[block]), route, column))
            assert element.rounded().view(np.uint16)[0] == out.view(np.uint16)[route, column]


def test_a_zero_keeps_the_sign_of_what_was_rounded_to_it() -> None:
    rng = np.random.default_rng(3)
    drawn, ids = problem(rng, tokens=8, top_k=1, experts=1, k=128, n=128, group_size=128, dtype=np.float16)
    tiny = type(drawn)(
        (drawn.a.astype(np.float32) * 2.0**-16).astype(np.float16),
        drawn.weights._replace(scales=(drawn.weights.scales.astype(np.float32) * 2.0**-12).astype(np.float16)),
        drawn.group_size,
        drawn.top_k,
    )
    plan = align(ids, 1, 8)
    setting = Setting(Launch(64, 128, 4), "hopper")
    out, cut = tiny.compute(plan, setting), tiny.cut(plan.num_blocks, setting)
    found = set()
    for route in range(8):
        for column in range(0, 128, 8):
            form = form_of(cut, 0, column, 64, 128, architecture_of("hopper"), True)
            bits = int(Element(build(form), tiny.terms(0, route, column)).rounded().view(np.uint16)[0])
            assert bits == int(out.view(np.uint16)[route, column])
            found.add(bits)
    assert 0x8000 in found


def test_the_errors_of_all_additions_make_up_the_sums_error() -> None:
    rng = np.random.default_rng(21)
    a, w = rng.standard_normal((2, 512)).astype(np.float16).astype(np.float32)
    terms = Terms(a, w, FLOAT16)
    element = Element(build(Form(64, ((0, 3), (3, 8)), 8, 24)), terms)
    inner = range(len(element.tree.nodes) - 1)
    exact = sum(terms.products(element.scale))
    assert element.total - exact == sum(element.addition(i).error for i in inner) != 0


def test_carrying_every_addition_exactly_gives_the_exact_sum_in_any_form() -> None:
    rng = np.random.default_rng(22)
    a, w = rng.standard_normal((2, 512)).astype(np.float16).astype(np.float32)
    terms = Terms(a, w, FLOAT16)
    for form in (Form(64, ((0, 8),), 16, 25), Form(128, ((0, 1), (1, 4)), 8, 24)):
        element = Element(build(form), terms)
        last = len(element.tree.nodes) - 1
        found = element.replaced({}, range(last))
        assert found[element.tree.nodes[last].operands[0]] == sum(terms.products(element.scale))


def test_four_warps_are_added_from_the_last_pair_to_the_first() -> None:
    tree = build(Form(128, ((0, 2),), 16, 25))
    sums = [n for n in tree.nodes if n.kind == Kind.WARPS]
    warp = [tree.nodes[n.operands[0]].warp for n in sums]
    assert warp == [3, 1, 0] and tree.nodes[sums[0].operands[1]].warp == 2


def test_a_row_alone_in_its_block_has_the_bits_it_has_among_others() -> None:
    rng = np.random.default_rng(31)
    drawn, ids = problem(rng, tokens=30, top_k=2, experts=3, k=512, n=256, group_size=128, dtype=np.float16)
    plan = align(ids, 3, 16)
    setting = Setting(Launch(64, 128, 7), "hopper")
    whole = drawn.compute(plan, setting).view(np.uint16)
    for route in (0, 17, 59):
        alone = drawn.compute(only(plan, {route: int(plan.block_of()[route])}), setting).view(np.uint16)
        assert np.array_equal(alone[route], whole[route]) and not alone[np.arange(60) != route].any()
