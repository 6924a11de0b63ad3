# SPDX-License-Identifier: Apache-2.0
"""What the GEMM and the layer refuse, each in one line, and layouts that they must not mind."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from routeblock.errors import InputError
from routeblock.moe.routing import AlignedPlan, align, exchange
from routeblock.twin.gemm import moe_gemm
from routeblock.twin.layer import combine, moe_layer

RNG = np.random.default_rng(1)
IDS = np.array([[0, 1], [1, 0], [0, 1]], np.int32)
PLAN = align(IDS, 2, 8)
GOOD: dict[str, Any] = {
    "a": RNG.standard_normal((3, 128)).astype(np.float16),
    "q": RNG.integers(0, 16, (2, 128, 128), dtype=np.uint8),
    "zeros": RNG.integers(0, 16, (2, 4, 128), dtype=np.uint8),
    "scales": (RNG.random((2, 4, 128)) * 0.01).astype(np.float16),
    "plan": PLAN,
    "top_k": 2,
    "architecture": "hopper",
    "thread_k": 64,
    "thread_n": 128,
    "grid": 4,
    "group_size": 32,
}


def edited(**changes: Any) -> AlignedPlan:
    return dataclasses.replace(PLAN, **changes)


def with_entry(place: int, value: int) -> AlignedPlan:
    ids = PLAN.sorted_token_ids.copy()
    ids[place] = value
    return edited(sorted_token_ids=ids)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"a": GOOD["a"].astype(np.float32)}, "dtype float32"),
        ({"a": GOOD["a"][:2]}, "input"),
        ({"a": np.where(np.arange(128) == 5, np.nan, GOOD["a"]).astype(np.float16)}, "nan at"),
        ({"a": np.where(np.arange(128) == 5, np.inf, GOOD["a"]).astype(np.float16)}, "inf at"),
        ({"q": GOOD["q"].astype(np.int32)}, "q int32"),
        ({"q": GOOD["q"] + np.uint8(16)}, "a weight of"),
        ({"zeros": GOOD["zeros"] + np.uint8(16)}, "a zero point of"),
        ({"zeros": GOOD["zeros"][:, :2]}, "zeros uint8"),
        ({"scales": GOOD["scales"].astype(np.float32)}, "scales float32"),
        ({"scales": np.full_like(GOOD["scales"], np.nan)}, "scale nan"),
        ({"scales": np.full_like(GOOD["scales"], 10000)}, "a weight can reach"),
        ({"group_size": 0}, "group size 0"),
        ({"group_size": 48}, "group size 48"),
        ({"thread_k": 32}, "thread sizes"),
        ({"grid": 0}, "grid of 0"),
        ({"architecture": "volta"}, "volta"),
        ({"plan": with_entry(0, -1)}, "names none"),
        ({"plan": with_entry(0, 7)}, "names none"),
        ({"plan": with_entry(0, 2)}, "repeats a route"),
        ({"plan": with_entry(0, 6)}, "sentinel before a route"),
        ({"plan": edited(expert_ids=np.array([0], np.int32))}, "1 experts"),
        ({"plan": edited(expert_ids=np.array([0, 2], np.int32))}, "expert ids"),
        (
            {"plan": edited(expert_ids=np.array([0, -1], np.int32))},
            "expert id -1 in block 1; .*before the weights",
        ),
        ({"plan": edited(block_size=7)}, "blocks of 7"),
        ({"plan": edited(num_tokens_post_padded=12)}, "12 rows"),
        ({"topk_weights": np.ones((3, 2))}, "topk_weights float64"),
        ({"topk_weights": np.full((3, 2), np.inf, np.float32)}, "not finite"),
        ({"topk_weights": np.full((3, 2), 70000, np.float32)}, "70000 is not finite in float16"),
    ],
)
def test_what_is_not_whole_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        moe_gemm(**(GOOD | changes))
    assert "\n" not in str(caught.value)


def test_bfloat16_sums_beyond_float32_are_refused() -> None:
    big = {
        "a": np.full((3, 128), 1e30, ml_dtypes.bfloat16),
        "zeros": None,
        "q": np.full((2, 128, 128), 15, np.uint8),
        "scales": np.full((2, 4, 128), 1e20, ml_dtypes.bfloat16),
    }
    with pytest.raises(InputError, match="beyond float32"):
        moe_gemm(**(GOOD | big))


def test_float16_sums_between_slices_are_refused_by_the_name_of_float16() -> None:
    big = {
        "a": np.full((3, 256), 60000, np.float16),
        "q": np.full((2, 256, 128), 15, np.uint8),
        "zeros": None,
        "scales": np.ones((2, 8, 128), np.float16),
        "grid": 8,
    }
    with pytest.raises(InputError, match="a sum beyond float16"):
        moe_gemm(**(GOOD | big), fp32_reduce=False)
    assert np.isposinf(moe_gemm(**(GOOD | big))).all()


def test_an_infinity_times_zero_is_refused_and_times_a_scale_is_not() -> None:
    big = {
        "a": np.full((3, 128), 6000, np.float16),
        "q": np.full((2, 128, 128), 15, np.uint8),
        "zeros": None,
        "scales": np.ones((2, 1, 128), np.float16),
        "group_size": -1,
    }
    assert np.isposinf(moe_gemm(**(GOOD | big))).all()
    for zero in ({"scales": np.zeros((2, 1, 128), np.float16)}, {"topk_weights": np.zeros((3, 2), np.float32)}):
        with pytest.raises(InputError, match="an infinity times 0 at route 0, column 0"):
            moe_gemm(**(GOOD | big | zero))


def test_a_top_k_weight_that_bfloat16_rounds_to_infinity_is_refused() -> None:
    half = {name: GOOD[name].astype(ml_dtypes.bfloat16) for name in ("a", "scales")}
    with pytest.raises(InputError, match="is not finite in bfloat16"):
        moe_gemm(**(GOOD | half), topk_weights=np.full((3, 2), 3.4e38, np.float32))


@pytest.mark.parametrize("form", ["fp32", "each"])
def test_a_sum_of_both_infinities_is_refused_and_of_one_is_not(form: Any) -> None:
    rows = np.zeros((2, 4, 8), np.float16)
    rows[1, 0, 3] = np.inf
    assert np.isposinf(combine(rows, form)[1, 3])
    rows[1, 1, 3] = -np.inf
    with pytest.raises(InputError, match="token 1 at column 3 is NaN"):
        combine(rows, form)


@pytest.mark.parametrize(
    ("hidden", "match"), [(60000, "w13 is -?inf at route"), (2000, "activation is -?inf at route")]
)
def test_a_layer_names_the_surface_on_which_an_infinity_arose(hidden: float, match: str) -> None:
    launch = (64, 128, 4)
    w13 = (np.full((2, 128, 128), 15, np.uint8), None, np.full((2, 4, 128), 0.01, np.float16))
    w2 = (GOOD["q"][:, :64], GOOD["zeros"][:, :2], GOOD["scales"][:, :2])
    with pytest.raises(InputError, match=f"moe_layer: {match}") as caught:
        moe_layer(
            np.full((3, 128), hidden, np.float16), IDS, np.ones(IDS.shape, np.float32), w13, w2, PLAN,
            architecture="hopper", w13_launch=launch, w2_launch=launch, group_size=32,
        )  # fmt: skip
    assert "\n" not in str(caught.value)


def test_the_order_of_arrays_in_memory_changes_no_bit() -> None:
    want = moe_gemm(**GOOD).view(np.uint16)
    for name in ("a", "q", "zeros", "scales"):
        turned = moe_gemm(**(GOOD | {name: np.asfortranarray(GOOD[name])}))
        wide = np.repeat(GOOD[name], 2, axis=-1)[..., ::2]
        assert np.array_equal(turned.view(np.uint16), want), name
        assert np.array_equal(moe_gemm(**(GOOD | {name: wide})).view(np.uint16), want), name


def test_no_tokens_give_no_rows() -> None:
    empty = align(np.zeros((0, 2), np.int32), 2, 8)
    assert moe_gemm(**(GOOD | {"a": GOOD["a"][:0], "plan": empty})).shape == (0, 128)


def test_a_layer_refuses_a_plan_of_another_routing() -> None:
    w13 = (GOOD["q"], GOOD["zeros"], GOOD["scales"])
    w2 = (GOOD["q"][:, :64], GOOD["zeros"][:, :2], np.ascontiguousarray(GOOD["scales"][:, :2]))
    launch = (64, 128, 4)

    def run(plan: AlignedPlan, ids: np.ndarray) -> Any:
        weights = np.ones(ids.shape, np.float32)
        return moe_layer(
            GOOD["a"], ids, weights, w13, w2, plan, architecture="hopper", w13_launch=launch, w2_launch=launch,
            group_size=32,
        )  # fmt: skip

    assert run(exchange(PLAN, 0, 3), IDS)["final"].shape == (3, 128)
    with pytest.raises(InputError, match="moe_layer"):
        run(PLAN, 1 - IDS)


def test_the_alignment_of_the_fused_path_makes_no_block_without_an_expert() -> None:
    here = align(IDS, 2, 8, expert_map=np.array([-1, 0], np.int32))
    assert here.expert_ids.tolist() == [0] and here.members(0) == [1, 2, 5]
    first = {name: GOOD[name][1:] for name in ("q", "zeros", "scales")}
    out = moe_gemm(**(GOOD | first | {"plan": here}))
    whole = moe_gemm(**GOOD)
    assert not out[[0, 3, 4]].any()
    assert out[[1, 2, 5]].view(np.uint16).tolist() == whole[[1, 2, 5]].view(np.uint16).tolist()


@pytest.mark.parametrize("zeros", [True, False])
def test_one_group_over_k_is_a_scale_of_the_column(zeros: bool) -> None:
    one = {name: np.ascontiguousarray(GOOD[name][:, :1]) for name in ("zeros", "scales")}
    if not zeros:
        one["zeros"] = None
    by_size, by_column = (moe_gemm(**(GOOD | one | {"group_size": g})) for g in (128, -1))
    assert np.array_equal(by_size.view(np.uint16), by_column.view(np.uint16))
    each = {name: None if x is None else np.repeat(x, 2, axis=1) for name, x in one.items()}
    inside = moe_gemm(**(GOOD | each | {"group_size": 64}))
    assert (inside.view(np.uint16) != by_size.view(np.uint16)).any()
