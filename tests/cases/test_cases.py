# SPDX-License-Identifier: Apache-2.0
"""Situations that people reported in public, restated as inputs, with the right answer.

Two more stand elsewhere: neighbouring zero points and a zero point of 0 in tests/moe/test_awq.py; variants of
checkpoints in tests/checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import permutations
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from routeblock.cli import main
from routeblock.diagnose.routings import draw
from routeblock.errors import InputError
from routeblock.moe.launches import selected_launch
from routeblock.moe.partition import partition
from routeblock.moe.routing import AlignedPlan, align, block_size_for
from routeblock.route_block.prediction.predict import changed_routes, signatures
from routeblock.twin.gemm import moe_gemm
from routeblock.twin.layer import combine


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint16)


@pytest.fixture(scope="module")
def bfloat_case() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """ids [2048, 4] of 16 experts, x [2048, 1024], q [16, 1024, 512], scales [16, 8, 512], bfloat16."""
    rng = np.random.default_rng(3)
    ids = np.stack([rng.choice(16, 4, replace=False) for _ in range(2048)]).astype(np.int32)
    q = rng.integers(0, 16, (16, 1024, 512), dtype=np.uint8)
    scales = (rng.random((16, 8, 512)) * 0.006 + 0.002).astype(ml_dtypes.bfloat16)
    return ids, (rng.standard_normal((2048, 1024)) * 0.5).astype(ml_dtypes.bfloat16), q, scales


def test_two_legal_orders_differ_canonical_ones_do_not_and_garbage_in_the_tail_changes_nothing(
    bfloat_case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    ids, x, q, scales = bfloat_case

    def run(plan: AlignedPlan) -> np.ndarray:
        return bits(
            moe_gemm(
                x, q, None, scales, plan, top_k=4, architecture="hopper", thread_k=64, thread_n=128, grid=264,
                group_size=128,
            )
        )  # fmt: skip

    rng = np.random.default_rng(4)
    one, two = (align(ids, 16, 64, rng.permutation(ids.size)) for _ in range(2))
    first = run(one)
    changed = np.flatnonzero((first != run(two)).any(axis=1)).tolist()
    assert changed
    cut = partition(one.num_blocks, 512, 1024, 128, 64, 264, 128)
    assert set(changed) <= set(changed_routes(signatures(one, cut, 64), signatures(two, cut, 64)))
    garbage = np.concatenate([one.sorted_token_ids, rng.integers(0, 10**6, 640).astype(np.int32)])
    assert np.array_equal(first, run(dataclasses.replace(one, sorted_token_ids=garbage)))
    canonical = align(ids, 16, 64)
    assert canonical.fingerprint() == align(ids[:], 16, 64, arrival=np.arange(ids.size)).fingerprint()


def test_expert_parallelism_changes_the_block_size_and_with_it_the_launch() -> None:
    assert [block_size_for(128, 4, local) for local in (128, 16, 8)] == [8, 48, 64]
    alone = selected_launch("H200", 8, "float16", 128, 1536, 2048).launch
    assert alone != selected_launch("H200", 48, "float16", 128, 1536, 2048).launch


def test_rows_of_experts_elsewhere_are_zero_and_blocks_without_an_expert_are_refused() -> None:
    rng = np.random.default_rng(5)
    ids = np.array([[0, 2], [-1, 1], [3, 7], [2, 0]])
    q = rng.integers(0, 16, (2, 128, 128), dtype=np.uint8)
    scales = np.full((2, 1, 128), 0.01, np.float16)
    x = rng.standard_normal((4, 128)).astype(np.float16)
    plan = align(ids, 4, 8, expert_map=np.array([0, -1, 1, -1], np.int32))
    out = moe_gemm(
        x, q, None, scales, plan, top_k=2, architecture="hopper", thread_k=64, thread_n=128, grid=4, group_size=128
    )
    assert [bool(row.any()) for row in out] == [True, True, False, False, False, False, True, True]
    skipped = dataclasses.replace(plan, expert_ids=np.array([-1, 1], np.int32))
    with pytest.raises(InputError, match=r"expert id -1 in block 0.*reads before the weights"):
        moe_gemm(
            x, q, None, scales, skipped, top_k=2, architecture="hopper", thread_k=64, thread_n=128, grid=4,
            group_size=128,
        )  # fmt: skip


def test_each_step_uses_its_own_groups_zero_point_and_scale() -> None:
    rng = np.random.default_rng(6)
    q = rng.integers(0, 16, (1, 256, 128), dtype=np.uint8)
    zeros = rng.integers(0, 16, (1, 8, 128), dtype=np.uint8)
    scales = (rng.random((1, 8, 128)) * 0.01).astype(np.float16)
    plan = align(np.zeros((1, 1), np.int32), 1, 8)
    for k in range(0, 256, 16):  # one-hot inputs read single weights back
        x = np.zeros((1, 256), np.float16)
        x[0, k] = 1
        out = moe_gemm(
            x, q, zeros, scales, plan, top_k=1, architecture="hopper", thread_k=128, thread_n=128, grid=1, group_size=32
        )
        steps = q[0, k].astype(np.float32) - zeros[0, k // 32].astype(np.float32)
        want = (steps * scales[0, k // 32].astype(np.float32)).astype(np.float16)
        assert np.array_equal(out[0].astype(np.float32), want.astype(np.float32))


def test_rounding_every_term_of_the_top_k_sum_is_another_sum() -> None:
    rows = np.random.default_rng(7).standard_normal((64, 4, 256)).astype(ml_dtypes.bfloat16)
    share = float((bits(combine(rows, "fp32")) != bits(combine(rows, "each"))).mean())
    assert 0.1 < share < 0.5


def test_two_partial_sums_have_no_order_and_three_do() -> None:
    parts = np.random.default_rng(8).standard_normal((3, 4096)).astype(np.float32)
    two = {(parts[a] + parts[b]).tobytes() for a, b in permutations((0, 1))}
    three = {((parts[a] + parts[b]) + parts[c]).tobytes() for a, b, c in permutations((0, 1, 2))}
    assert (len(two), len(three) > 1) == (1, True)
    # The kernel fixes the order, so a plan matters by the cut alone: at one slice a tile nothing can differ.
    assert partition(50, 1536, 2048, 128, 64, 200, 128).is_single_slice


def test_a_tokens_bits_depend_on_the_batch_through_the_launch_and_full_k_alone_does_not_cure_it() -> None:
    rng = np.random.default_rng(9)
    experts, k, n = 16, 2048, 256
    q = rng.integers(0, 16, (experts, k, n), dtype=np.uint8)
    scales = (rng.random((experts, k // 128, n)) * 0.006 + 0.002).astype(np.float16)
    x = (rng.standard_normal((257, k)) * 0.5).astype(np.float16)
    ids = np.stack([rng.choice(experts, 8, replace=False) for _ in range(257)]).astype(np.int32)

    def token(m: int, *, thread_k: int | None, full_k: bool) -> bytes:
        block = block_size_for(m, 8, 128)  # as the published layer's 128 experts would have it
        chosen = selected_launch("H200", block, "float16", 128, 1536, 2048).launch
        depth = thread_k or chosen.thread_k
        width = 64 if depth == 128 else 128
        out = moe_gemm(
            x[:m], q, None, scales, align(ids[:m], experts, block), top_k=8, architecture="hopper", thread_k=depth,
            thread_n=width, grid=chosen.grid, group_size=128, full_k=full_k,
        )  # fmt: skip
        return bits(out[:8]).tobytes()

    batches = (1, 16, 64, 257)
    assert len({token(m, thread_k=None, full_k=False) for m in batches}) > 1
    assert len({token(m, thread_k=64, full_k=True) for m in batches}) == 1
    assert len({token(m, thread_k=None, full_k=True) for m in batches}) > 1


def predicted(folder: Path, ids: np.ndarray, *options: object) -> dict[str, Any]:
    """What `routeblock predict` says of a routing: the answer, and its exit code beside it."""
    np.save(folder / "ids.npy", ids)
    out = folder / "answer.json"
    code = main(["predict", "--routing", str(folder / "ids.npy"), "--out", str(out), *map(str, options)])
    return {"exit": code, **json.loads(out.read_bytes())}


SIZES = {"--hidden": "2048", "--intermediate": "768", "--group-size": "128", "--dtype": "float16"}
QWEN = ["--zero-points", *(word for pair in SIZES.items() for word in pair), "--gpu", "H200", "--vllm", "0.24.0"]


def test_random_arrival_gives_many_plans_stable_order_one_and_the_answer_names_the_blocks(tmp_path: Path) -> None:
    for tokens, top_k, experts in ((4097, 16, 128), (128, 2, 32)):
        ids, rng = draw(tokens, top_k, experts, 1)[0], np.random.default_rng(2)
        routes = np.arange(ids.size)
        stable = {align(ids, experts, 64, routes).fingerprint() for _ in range(3)}
        plans = [align(ids, experts, 64, rng.permutation(routes)) for _ in range(100)]
        sets = np.stack([np.sort(plan.rows, axis=1) for plan in plans])
        assert len(stable) == 1
        options = ["--experts", experts, "--top-k", top_k, "--block-size", 64]
        answer = predicted(tmp_path, ids, *QWEN, *options)
        ((part,),) = answer["detail"]["partition"]
        named = {
            block
            for expert in part["straddling_experts"]
            for block in range(expert["blocks"][0], expert["blocks"][1] + 1)
        }
        # Where no expert has a second block, no order changes a block's set, and the answer names none.
        assert (len({plan.tobytes() for plan in sets}) > 1) == bool(named)
        assert {*np.flatnonzero((sets != sets[0]).any(axis=(0, 2))).tolist()} == named


def test_two_legal_orders_of_a_large_batch_can_differ_and_canonical_ones_cannot(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    ids = np.stack([rng.choice(16, 4, replace=False) for _ in range(2048)]).astype(np.int32)
    layer = "--hidden 1024 --intermediate 256 --experts 16 --top-k 4 --group-size 128 --symmetric --dtype bfloat16"
    options = [*layer.split(), "--gpu", "H200", "--vllm", "0.24.0", "--launch", "64,128,264"]
    answer = predicted(tmp_path, ids, *options)
    assert (answer["exit"], answer["verdict"]) == (1, "can differ")
    assert answer["detail"]["partition"][0][0]["block_size"] == 64
    assert predicted(tmp_path, ids, *options, "--canonical")["verdict"] == "cannot differ"


def test_expert_parallelism_is_reported_to_change_the_block_size(tmp_path: Path) -> None:
    ids = draw(128, 4, 128, 1)[0]
    sizes = {
        (version, ranks): next(
            f["value"]
            for f in predicted(tmp_path, ids, *QWEN[:-1], version, "--experts", 128, "--top-k", 4, "--ep", ranks)[
                "facts"
            ]
            if f["name"] == "block size"
        )
        for version in ("0.24.0", "0.31.0")
        for ranks in (1, 8, 16)
    }
    assert [sizes["0.24.0", r] for r in (1, 8, 16)] == [8, 48, 64]
    assert [sizes["0.31.0", r] for r in (1, 8, 16)] == [8, 8, 8]  # counts a rank's own tokens since 0.26


def test_the_answer_says_from_the_shape_alone_whether_partial_sums_have_an_order(tmp_path: Path) -> None:
    ids = draw(21, 8, 128, 1)[0]
    most = {}
    for launch in ("64,128,200", "64,128,246", "64,128,4000"):
        answer = predicted(tmp_path, ids, *QWEN, "--experts", 128, "--top-k", 8, "--launch", launch)
        most[launch] = answer["detail"]["partition"][0][0]["gemms"]["w13"]["slices_at_most"]
    assert most["64,128,246"] == 2
    assert most["64,128,4000"] > 2


def test_a_token_is_said_to_follow_its_batch_unless_thread_k_is_held_and_k_is_whole(tmp_path: Path) -> None:
    ids = draw(257, 8, 128, 1)[0]
    options = ["--experts", 128, "--top-k", 8, "--between", "batches", "--batches", "1,16,64,257"]
    answer = predicted(tmp_path, ids, *QWEN, *options)
    assert (answer["exit"], answer["detail"]["batches"]["classes"] > 1) == (1, True)
    full = predicted(tmp_path, ids, *QWEN, *options, "--full-k")
    assert full["detail"]["batches"]["classes"] == 2  # thread_k 128 at blocks of 8, 64 above
    held = predicted(tmp_path, ids, *QWEN, *options, "--full-k", "--launch", "64,128,528")
    assert (held["exit"], held["detail"]["batches"]["classes"]) == (0, 1)
