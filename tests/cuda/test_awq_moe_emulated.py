# SPDX-License-Identifier: Apache-2.0
"""The layer's own source, run on a CPU, against the twin: bits of every surface, in every form of a launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import awq_emulator as emulator
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from routeblock.cuda import awq_moe_plan as plans
from routeblock.cuda.awq_moe_plan import FORMS, Plan, Sizes
from routeblock.moe.routing import align
from routeblock.twin.gemm import moe_gemm
from routeblock.twin.layer import GemmWeights, combine, moe_layer, silu_and_mul

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FULL_K = (64, 128, 1)  # a grid of one block cuts no tile: the twin's full K


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulator.build(tmp_path_factory.mktemp("emulator"))


@dataclass(frozen=True)
class Call:
    """Inputs of one layer."""

    sizes: Sizes
    hidden: NDArray[Any]
    topk_ids: NDArray[np.int32]
    topk_weights: NDArray[np.float32]
    w13: GemmWeights
    w2: GemmWeights


def weights_of(rng: np.random.Generator, sizes: Sizes, gemm: plans.Gemm) -> GemmWeights:
    n, k = sizes.shape(gemm)
    groups = sizes.groups(gemm)
    q = rng.integers(0, 16, (sizes.experts, k, n), dtype=np.uint8)
    zeros = rng.integers(0, 16, (sizes.experts, groups, n), dtype=np.uint8) if sizes.zero_points else None
    scales = (rng.uniform(0.2, 1.0, (sizes.experts, groups, n)) / np.sqrt(20 * k)).astype(DTYPES[sizes.dtype])
    return GemmWeights(q, zeros, scales)


def draw(sizes: Sizes, seed: int) -> Call:
    rng = np.random.default_rng(seed)
    return Call(
        sizes,
        rng.standard_normal((sizes.tokens, sizes.hidden)).astype(DTYPES[sizes.dtype]),
        np.stack([rng.permutation(sizes.experts)[: sizes.top_k] for _ in range(sizes.tokens)]).astype(np.int32),
        rng.random((sizes.tokens, sizes.top_k), dtype=np.float32),
        weights_of(rng, sizes, "w13"),
        weights_of(rng, sizes, "w2"),
    )


def launches(sizes: Sizes, block: int, w13: int | None = None, w2: int | None = None, grid: int = 3) -> Plan:
    chosen = plans.plan(sizes, block_size=block, w13_units=w13, w2_units=w2)
    return Plan(*(replace(x, grid=min(x.grid, grid)) for x in (chosen.w13, chosen.w2)))


def wanted(call: Call, architecture: str = "hopper", expert_map: NDArray[np.int32] | None = None) -> dict[str, Any]:
    local = call.sizes.experts if expert_map is None else expert_map.size
    plan = align(call.topk_ids, local, 8, expert_map=expert_map)
    return moe_layer(
        call.hidden, call.topk_ids, call.topk_weights, call.w13, call.w2, plan, architecture=architecture,
        w13_launch=FULL_K, w2_launch=FULL_K, group_size=call.sizes.group_size if call.sizes.groups("w13") > 1 else -1,
        expert_map=expert_map,
    )  # fmt: skip


def check(machine: emulator.Machine, call: Call, chosen: Plan, want: dict[str, Any], seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    plan = align(call.topk_ids, call.sizes.experts, chosen.block_size, rng.permutation(call.sizes.routes))
    w13, w2 = emulator.marlin(call.w13), emulator.marlin(call.w2)
    got = machine.layer(call.sizes, chosen, call.hidden, call.topk_ids, call.topk_weights, w13, w2, plan)
    for name, surface in got.items():
        assert np.array_equal(surface.view(np.uint16), want[name].view(np.uint16)), name


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("late_copies", [False, True], ids=["early", "late"])
def test_every_form_gives_the_twins_bits(library: ctypes.CDLL, form: plans.Form, late_copies: bool) -> None:
    sizes = Sizes(21, 2, 3, 384, 128, 64)
    call = draw(sizes, 1)
    machine = emulator.Machine(library, seed=3 * late_copies, late_copies=late_copies)
    check(machine, call, launches(sizes, form.tokens, form.units, form.units), wanted(call))


@pytest.mark.parametrize("zero_points", [True, False], ids=["u4", "u4b8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_dtypes_types_and_groups(library: ctypes.CDLL, dtype: str, zero_points: bool, group_size: int) -> None:
    sizes = Sizes(5, 2, 3, 256, 128, group_size, dtype, zero_points)
    if group_size == 128:
        sizes = replace(sizes, intermediate=256)  # else W2 has one group, and the twin wants one number for both
    call = draw(sizes, 2)
    check(emulator.Machine(library), call, launches(sizes, 8, 2, 4), wanted(call))


@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 64), (192, 192), (320, 64), (64, 320)])
def test_sizes_that_no_stage_and_no_tile_divides(library: ctypes.CDLL, hidden: int, intermediate: int) -> None:
    """The twin takes columns by 128: the weights of W2 are widened for it, and its output cut."""
    sizes = Sizes(9, 3, 4, hidden, intermediate, 32)
    call = draw(sizes, 3)
    wide = -hidden % 128
    padded = [np.concatenate([x, np.zeros((*x.shape[:2], wide), x.dtype)], 2) for x in call.w2 if x is not None]
    want = wanted(replace(call, w2=GemmWeights(padded[0], padded[1], padded[2])))
    want = {name: surface[:, :hidden] if name in ("w2", "final") else surface for name, surface in want.items()}
    for block, units in ((8, 2), (8, 4), (64, 4)):
        check(emulator.Machine(library, late_copies=units == 4), call, launches(sizes, block, units, units), want)


def test_a_token_alone_has_the_bits_that_it_has_in_the_batch(library: ctypes.CDLL) -> None:
    sizes = Sizes(40, 2, 2, 256, 128, 64)
    call = draw(sizes, 4)
    machine = emulator.Machine(library)
    w13, w2 = emulator.marlin(call.w13), emulator.marlin(call.w2)

    def run(c: Call, block: int) -> dict[str, Any]:
        plan = align(c.topk_ids, c.sizes.experts, block)
        return machine.layer(c.sizes, launches(c.sizes, block), c.hidden, c.topk_ids, c.topk_weights, w13, w2, plan)

    batch = run(call, 64)
    for token in (0, 17, 39):
        one = slice(token, token + 1)
        alone = replace(
            call, sizes=replace(sizes, tokens=1), hidden=call.hidden[one], topk_ids=call.topk_ids[one],
            topk_weights=call.topk_weights[one],
        )  # fmt: skip
        assert np.array_equal(run(alone, 8)["final"].view(np.uint16), batch["final"][one].view(np.uint16))


def test_ampere_has_the_twins_bits_too(library: ctypes.CDLL) -> None:
    sizes = Sizes(6, 2, 3, 256, 128, 64)
    call = draw(sizes, 5)
    check(emulator.Machine(library, architecture="ampere"), call, launches(sizes, 16), wanted(call, "ampere"))


def test_routes_without_an_expert_here_are_left_alone_and_count_as_zero(library: ctypes.CDLL) -> None:
    sizes = Sizes(10, 3, 2, 256, 128, 64)
    expert_map = np.array([-1, 1, -1, 0, -1], np.int32)
    rng = np.random.default_rng(6)
    ids = np.stack([rng.permutation(5)[:3] for _ in range(10)]).astype(np.int32)
    call = replace(draw(replace(sizes, top_k=2), 6), sizes=sizes, topk_ids=ids)
    call = replace(call, topk_weights=rng.random((10, 3), dtype=np.float32))
    want = wanted(call, expert_map=expert_map)
    plan = align(ids, 5, 8, expert_map=expert_map)
    machine = emulator.Machine(library)
    for width in (np.int32, np.int64):
        got = machine.layer(
            sizes, launches(sizes, 8), call.hidden, ids.astype(width), call.topk_weights, emulator.marlin(call.w13),
            emulator.marlin(call.w2), plan, expert_map,
        )  # fmt: skip
        assert np.array_equal(got["final"].view(np.uint16), want["final"].view(np.uint16))
        here = (expert_map[ids] >= 0).reshape(-1)
        assert np.array_equal(got["w2"][here].view(np.uint16), want["w2"][here].view(np.uint16))
        assert (got["w2"][~here].view(np.uint8) == emulator.POISON).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6, 8, 10])
def test_the_sum_over_routes_is_torchs(library: ctypes.CDLL, dtype: str, top_k: int) -> None:
    sizes = Sizes(3, top_k, 16, 64, 64, 32, dtype)
    rows = np.random.default_rng(7).standard_normal((3 * top_k, 64)).astype(DTYPES[dtype])
    got = emulator.Machine(library).sum_routes(sizes, rows)
    assert np.array_equal(got.view(np.uint16), combine(rows.reshape(3, top_k, 64)).view(np.uint16))


def test_subnormal_weights_and_negative_scales(library: ctypes.CDLL) -> None:
    sizes = Sizes(5, 2, 3, 256, 128, 64)
    call = draw(sizes, 8)
    w13 = call.w13._replace(scales=(call.w13.scales * np.float16(-(2.0**-12))).astype(np.float16))
    call = replace(call, w13=w13, hidden=(call.hidden * np.float16(500)).astype(np.float16))
    check(emulator.Machine(library), call, launches(sizes, 8), wanted(call))


def test_a_block_without_an_expert_is_skipped(library: ctypes.CDLL) -> None:
    sizes = Sizes(8, 1, 2, 128, 64, 32)
    call = draw(sizes, 9)
    plan = align(call.topk_ids, 2, 8)
    plan = replace(plan, expert_ids=np.where(plan.expert_ids == 0, -1, plan.expert_ids).astype(np.int32))
    machine = emulator.Machine(library)
    x, w13 = call.hidden, emulator.marlin(call.w13)
    got = machine.gemm(sizes, "w13", launches(sizes, 8).w13, x, w13, plan, call.topk_weights)
    out = call.topk_ids.reshape(-1) == 0
    assert (got[out].view(np.uint8) == emulator.POISON).all()
    assert np.array_equal(got[~out].view(np.uint16), wanted(call)["activation"][~out].view(np.uint16))


def test_each_gemm_has_its_own_number_of_groups(library: ctypes.CDLL) -> None:
    """K as deep as a group: one scale a column there, multiplied into the rounded sum, and groups in the other GEMM."""
    for hidden, intermediate in ((128, 256), (256, 128)):
        sizes = Sizes(9, 2, 3, hidden, intermediate, 128, "bfloat16", hidden == 256)
        call = draw(sizes, 10)
        plan = align(call.topk_ids, 3, 8)

        def gemm(
            name: plans.Gemm, x: NDArray[Any], top_k: int, weights: Any, sizes: Sizes = sizes, call: Call = call,
            plan: Any = plan,
        ) -> NDArray[Any]:  # fmt: skip
            own = getattr(call, name)
            size = 128 if sizes.groups(name) > 1 else -1
            return moe_gemm(
                x, *own, plan, top_k=top_k, architecture="hopper", thread_k=64, thread_n=128, grid=1, group_size=size,
                topk_weights=weights, full_k=True,
            )  # fmt: skip

        activation = silu_and_mul(gemm("w13", call.hidden, 2, None))
        rows = gemm("w2", activation, 1, call.topk_weights)
        want = {"activation": activation, "w2": rows, "final": combine(rows.reshape(9, 2, hidden))}
        check(emulator.Machine(library), call, launches(sizes, 8, 2, 2), want)


@pytest.mark.parametrize("late_copies", [False, True], ids=["early", "late"])
def test_gpus_without_bulk_copies(tmp_path: Path, late_copies: bool) -> None:
    library = emulator.build(tmp_path, "AWQ_KIND=AWQ_F16_U4", "ROUTEBLOCK_NO_BULK_COPIES")
    sizes = Sizes(21, 2, 3, 192, 192, 32)
    call = draw(sizes, 11)
    wide = -sizes.hidden % 128
    padded = [np.concatenate([x, np.zeros((*x.shape[:2], wide), x.dtype)], 2) for x in call.w2 if x is not None]
    want = wanted(replace(call, w2=GemmWeights(padded[0], padded[1], padded[2])), "ampere")
    want = {name: surface[:, : sizes.hidden] if name in ("w2", "final") else surface for name, surface in want.items()}
    for form in FORMS.values():
        machine = emulator.Machine(library, seed=5, late_copies=late_copies, architecture="ampere")
        check(machine, call, launches(sizes, form.tokens, form.units, form.units), want)
