# SPDX-License-Identifier: Apache-2.0
"""How fast the twin's GEMM is, as ratios to float32 references on the same work, measured in one run.

    python bench/twin.py [OUT.json]

The work: W13 of the default fixture (M=21, k=8, 46 experts in use, N=1536, K=2048, float16, groups of 128). `good`
dequantises in parallel to float32 and multiplies with BLAS, `plain` does the same in plain numpy. Rounds alternate the
arms; the twin stands twice (A/A). The references have other bits: the share of elements that differ is printed.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import njit, prange
from rich.console import Console
from rich.table import Table

from routeblock.moe.routing import AlignedPlan, align
from routeblock.route_block.fixtures import published_geometry as geometry
from routeblock.route_block.fixtures.fixture import load_fixture
from routeblock.twin.gemm import moe_gemm
from routeblock.twin.weights import unpack

ROUNDS = 12
GOALS = {"hopper (64, 128)": 6e9, "ampere (64, 128)": 5e9}  # multiply-accumulates a second, 2 cores with AVX-512
TOKENS = (1, 4, 16, 21, 64, 256, 1024)


@njit(parallel=True, cache=False)
def dequantise(q: Any, zeros: Any, scales: Any, group: int, out: Any) -> None:
    for k in prange(q.shape[0]):
        weights, zero, scale, row = q[k], zeros[k // group], scales[k // group], out[k]
        for n in range(row.size):
            row[n] = (np.float32(np.int32(weights[n])) - zero[n]) * scale[n]


def good(x: Any, q: Any, zeros: Any, scales: Any, plan: AlignedPlan, top_k: int) -> Any:
    """Each expert's weights to float32 once, by all cores; one BLAS product an expert."""
    out = np.zeros((plan.num_routes, q.shape[2]), np.float32)
    w = np.empty(q.shape[1:], np.float32)
    for expert in np.unique(plan.expert_ids):
        routes = plan.rows[plan.expert_ids == expert].reshape(-1)
        routes = routes[routes < plan.num_routes]
        dequantise(q[expert], zeros[expert], scales[expert], q.shape[1] // scales.shape[1], w)
        out[routes] = x[routes // top_k] @ w
    return out


def plain(x: Any, q: Any, zeros: Any, scales: Any, plan: AlignedPlan, top_k: int) -> Any:
    """The same with numpy alone."""
    out = np.zeros((plan.num_routes, q.shape[2]), np.float32)
    group = q.shape[1] // scales.shape[1]
    for expert in np.unique(plan.expert_ids):
        routes = plan.rows[plan.expert_ids == expert].reshape(-1)
        routes = routes[routes < plan.num_routes]
        steps = q[expert].astype(np.float32) - np.repeat(zeros[expert], group, axis=0)
        out[routes] = x[routes // top_k] @ (steps * np.repeat(scales[expert], group, axis=0))
    return out


def rounds(arms: dict[str, Callable[[], Any]], count: int) -> dict[str, list[float]]:
    """Seconds of each arm, arms in turn, one warm-up before."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm()
    order = list(arms.items())
    rng = np.random.default_rng(0)
    for _ in range(count):
        # Shuffled: an arm's time depends on what ran before it.
        for name, arm in (order[i] for i in rng.permutation(len(order))):
            start = time.perf_counter()
            arm()
            times[name].append(time.perf_counter() - start)
    return times


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        geometry.write(Path(folder), 20250314)
        fixture = load_fixture(Path(folder))
        q, zeros, scales = unpack(fixture, "w13")
    assert zeros is not None
    plan = fixture.compact(fixture.plans["H0"])
    wide_zeros, wide_scales = zeros.astype(np.float32), scales.astype(np.float32)
    x = fixture.hidden.astype(np.float32)

    def twin(architecture: str, thread_k: int, thread_n: int, grid: int) -> Callable[[], Any]:
        return lambda: moe_gemm(
            fixture.hidden, q, zeros, scales, plan, top_k=8, architecture=architecture,
            thread_k=thread_k, thread_n=thread_n, grid=grid, group_size=128,
        )  # fmt: skip

    arms: dict[str, Callable[[], Any]] = {
        "hopper (64, 128)": twin("hopper", 64, 128, 246),
        "hopper (64, 128), again": twin("hopper", 64, 128, 246),
        "hopper (128, 64)": twin("hopper", 128, 64, 528),
        "ampere (64, 128)": twin("ampere", 64, 128, 246),
        "good reference": lambda: good(x, q, wide_zeros, wide_scales, plan, 8),
        "plain reference": lambda: plain(x, q, wide_zeros, wide_scales, plan, 8),
    }
    times = rounds(arms, ROUNDS)
    work = plan.num_routes * q.shape[1] * q.shape[2]
    ours = arms["hopper (64, 128)"]()
    reference = arms["good reference"]().astype(np.float16)
    other_bits = float((ours.view(np.uint16) != reference.view(np.uint16)).mean())
    growth = []
    for tokens in TOKENS:
        rng = np.random.default_rng(tokens)
        ids = np.stack([rng.choice(len(q), 8, replace=False) for _ in range(tokens)])
        some = align(ids, len(q), 8)
        hidden = (rng.standard_normal((tokens, q.shape[1])) * 0.5).astype(np.float16)
        wide = hidden.astype(np.float32)
        pair = rounds(
            {
                "twin": partial(
                    moe_gemm, hidden, q, zeros, scales, some, top_k=8, architecture="hopper", thread_k=64,
                    thread_n=128, grid=246, group_size=128,
                ),
                "good": partial(good, wide, q, wide_zeros, wide_scales, some, 8),
            },
            3,
        )  # fmt: skip
        medians = {name: statistics.median(values) for name, values in pair.items()}
        growth.append({"tokens": tokens, "blocks": some.num_blocks, **medians})

    table = Table(title=f"W13, {work / 1e6:.0f} M multiply-accumulates, {numba.get_num_threads()} threads")
    for column in ("arm", "median s", "fastest s", "1e9 MAC/s (median)", "goal", "x good", "x plain"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, values in times.items():
        ratios = {}
        for against in ("good reference", "plain reference"):
            ratios[against] = statistics.median(a / b for a, b in zip(values, times[against], strict=True))
        median = statistics.median(values)
        goal = f"{GOALS[name] / 1e9:.0f}" if name in GOALS else ""
        table.add_row(
            name, f"{median:.4f}", f"{min(values):.4f}", f"{work / median / 1e9:.2f}", goal,
            f"{ratios['good reference']:.2f}", f"{ratios['plain reference']:.2f}",
        )  # fmt: skip
    by_tokens = Table(title="Growth with M (46 experts, top-8, random routing; medians of 3)")
    for column in ("M", "blocks of 8", "twin s", "good s", "ratio", "1e9 MAC/s"):
        by_tokens.add_column(column, justify="right")
    for row in growth:
        rate = row["tokens"] * 8 * q.shape[1] * q.shape[2] / row["twin"] / 1e9
        by_tokens.add_row(
            str(row["tokens"]), str(row["blocks"]), f"{row['twin']:.4f}", f"{row['good']:.4f}",
            f"{row['twin'] / row['good']:.2f}", f"{rate:.2f}",
        )  # fmt: skip
    console = Console(width=110)
    console.print(table, by_tokens)
    console.print(f"elements in which the float32 reference has other bits: {other_bits:.1%}")
    if len(sys.argv) > 1:
        document = {"seconds": times, "work": work, "other_bits": other_bits, "growth": growth}
        Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
