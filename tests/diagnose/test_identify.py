# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from time import process_time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from drawn import layer, plans

from routeblock.diagnose.identify import Candidate, Contradiction, by_brute_force, identify, settings
from routeblock.diagnose.layer_run import GEMMS, LayerInputs, Run
from routeblock.errors import InputError
from routeblock.moe.partition import BLOCK_SIZES
from routeblock.moe.routing import AlignedPlan, align
from routeblock.twin import self_test_inputs as golden
from routeblock.twin.layer import GemmWeights

GOLDEN = Path(__file__).resolve().parents[2] / "fixtures" / "golden"


def drawn_case(seed: int) -> tuple[LayerInputs, dict[str, AlignedPlan], list[Candidate], Candidate]:
    """A layer, plans and candidates from a seed, and the launch that made the output."""
    rng = np.random.default_rng([41, seed])
    dtype: Any = (np.float16, ml_dtypes.bfloat16)[seed % 2]
    block_size = BLOCK_SIZES[seed % len(BLOCK_SIZES)]
    inputs = layer(
        rng, tokens=int(rng.integers(10, 24)), top_k=2, experts=3, hidden=512, intermediate=256,
        group_size=int(rng.choice([32, 64, 128])), dtype=dtype,
    )  # fmt: skip
    known = dict(zip(("stable", "drawn"), plans(inputs, block_size, seed), strict=True))
    grids = sorted({int(g) for g in rng.integers(3, 80, 3)})
    shapes = [(512, 512), (512, 256)]
    candidates = [Candidate(p, s) for p in known for s in settings(block_size, shapes, grids)]
    return inputs, known, candidates, candidates[int(rng.integers(len(candidates)))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("surface", ["w13", "w2", "final"])
def test_the_class_equals_what_brute_force_finds(seed: int, surface: str) -> None:
    inputs, known, candidates, truth = drawn_case(seed)
    made = Run("truth", inputs, known[truth.plan], truth.settings)
    given = {"activation": made.surfaces["activation"]} if surface == "w2" and seed % 2 else {}
    found = identify(inputs, surface, made.surfaces[surface], known, candidates, given)
    plain = by_brute_force(inputs, surface, made.surfaces[surface], known, candidates, given)
    assert truth in found.reproduce
    assert set(found.reproduce) == {c for c, wrong in plain.items() if wrong is None}
    assert dict(found.excluded) == {c: wrong for c, wrong in plain.items() if wrong is not None}
    assert found.rows_computed < len(candidates) * found.rows


def test_an_output_with_one_wrong_bit_is_reproduced_by_nobody() -> None:
    inputs, known, candidates, truth = drawn_case(2)
    output = Run("truth", inputs, known[truth.plan], truth.settings).surfaces["w13"].copy()
    word = output.view(np.uint16)[7, 100]
    output.view(np.uint16)[7, 100] ^= 1
    found = identify(inputs, "w13", output, known, candidates)
    assert not found.reproduce
    assert found.excluded[truth] == Contradiction(7, 100, int(word) ^ 1, int(word))


def test_ampere_and_ada_are_one_class() -> None:
    inputs, known, candidates, _ = drawn_case(0)
    truth = next(c for c in candidates if c.setting.architecture == "ampere")
    found = identify(
        inputs, "w13", Run("t", inputs, known[truth.plan], truth.settings).surfaces["w13"], known, candidates
    )
    assert {c.setting.architecture for c in found.reproduce} == {"ampere", "ada"}


def test_rows_of_absent_experts_are_not_compared() -> None:
    inputs, _, _, _ = drawn_case(0)
    rows = inputs.expert_rows.copy()
    rows[1] = -1
    plan = align(inputs.topk_ids, 3, 8, expert_map=rows)
    candidates = [Candidate("local", s) for s in settings(8, [(512, 512)], (7, 20))]
    output = Run("truth", inputs, plan, candidates[0].settings).surfaces["w13"].copy()
    output[plan.block_of() < 0] = 1
    assert candidates[0] in identify(inputs, "w13", output, {"local": plan}, candidates).reproduce


def test_an_output_of_another_shape_is_refused() -> None:
    inputs, known, candidates, _ = drawn_case(0)
    with pytest.raises(InputError, match="identify w13"):
        identify(inputs, "w13", np.zeros((3, 512), np.float16), known, candidates)


@pytest.fixture(scope="module")
def recorded() -> tuple[LayerInputs, dict[str, AlignedPlan]]:
    ids, weights = golden.layer_routing()
    experts = sorted(set(ids.reshape(-1).tolist()))
    rows = np.full(golden.EXPERTS, -1, np.int32)
    rows[experts] = np.arange(len(experts), dtype=np.int32)
    inputs = LayerInputs(
        golden.layer_hidden(), ids, weights, {g: GemmWeights(*golden.layer_weights(g, experts)) for g in GEMMS},
        golden.GROUP, rows,
    )  # fmt: skip
    known = {
        order: align(ids, golden.EXPERTS, golden.BLOCK, golden.arrival(order, ids.size), expert_map=rows)
        for order in golden.ORDERS
    }
    return inputs, known


@pytest.mark.parametrize("surface", ["w13", "w2", "final"])
@pytest.mark.parametrize("order", list(golden.ORDERS))
def test_the_recorded_h200_launch_is_found_among_all(
    recorded: tuple[LayerInputs, dict[str, AlignedPlan]], surface: str, order: str
) -> None:
    inputs, known = recorded
    with np.load(GOLDEN / "h200_grid246.npz") as stored:
        short = {"w13": "w13", "w2": "w2", "final": "fin"}[surface]
        output = stored[f"{order}.{short}"].view(np.float16)
        given = {"activation": stored[f"{order}.act"].view(np.float16)} if surface != "w13" else {}
    candidates = [Candidate(p, s) for p in known for s in settings(8, [(1536, 2048), (2048, 768)])]
    began = process_time()
    found = identify(inputs, surface, output, known, candidates, given)
    assert len(candidates) > 3000 and process_time() - began < 20
    truth = [c for c in found.reproduce if c.plan == order and c.setting.launch == (64, 128, 246)]
    assert {(c.setting.architecture, c.setting.fp32_reduce) for c in truth} >= {("hopper", True)}
    assert all(c.setting.architecture == "hopper" for c in found.reproduce)
    # Brute force on some of them, and on all that reproduce.
    rng = np.random.default_rng(8)
    some = [*found.reproduce, *(candidates[int(i)] for i in rng.integers(0, len(candidates), 6))]
    plain = by_brute_force(inputs, surface, output, known, some, given)
    assert all((wrong is None) == (c in found.reproduce) for c, wrong in plain.items())
    assert all(found.excluded[c] == wrong for c, wrong in plain.items() if wrong is not None)


@pytest.mark.parametrize("name", ["manyslices_f16_u4", "halfreduce_f16_u4", "column_f16_u4b8"])
def test_recorded_single_gemms_give_the_class_of_brute_force(name: str) -> None:
    """32 slices of a tile, sums of slices in float16, one scale a column: recorded on an H200."""
    case, drawn = golden.CORNERS[name], golden.corner_inputs(name)
    w13 = GemmWeights(drawn.q, drawn.z if case.has_zero_points else None, drawn.s.astype(np.float16))
    unused = GemmWeights(np.zeros((case.experts, case.n // 2, case.k), np.uint8), None, np.zeros((1, 1, 1), np.float16))
    inputs = LayerInputs(
        drawn.x.astype(np.float16), drawn.ids, np.ones(drawn.ids.shape, np.float32), {"w13": w13, "w2": unused},
        case.group_size, np.arange(case.experts, dtype=np.int32),
    )  # fmt: skip
    known = {
        order: align(drawn.ids, case.experts, case.block_size, golden.arrival(order, drawn.ids.size))
        for order in golden.ORDERS
    }
    with np.load(GOLDEN / "h200_corners.npz") as stored:
        output = stored[f"{name}.st"].view(np.float16)
    grids = sorted({case.launch[2], 246, 528})
    candidates = [Candidate(p, s) for p in known for s in settings(case.block_size, [(case.n, case.k)], grids)]
    found = identify(inputs, "w13", output, known, candidates)
    plain = by_brute_force(inputs, "w13", output, known, candidates)
    assert set(found.reproduce) == {c for c, wrong in plain.items() if wrong is None}
    assert dict(found.excluded) == {c: wrong for c, wrong in plain.items() if wrong is not None}
    truth = {(c.setting.launch, c.setting.architecture, c.setting.fp32_reduce) for c in found.reproduce}
    assert (case.launch, "hopper", case.fp32_reduce) in truth
