# SPDX-License-Identifier: Apache-2.0
"""Small layers and GEMMs that tests draw from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from routeblock.diagnose.layer_run import GemmProblem, LayerInputs, Run, Setting
from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan, align
from routeblock.twin.layer import GemmWeights


def weights(
    rng: np.random.Generator, experts: int, k: int, n: int, group_size: int, dtype: Any, zero_points: bool = True
) -> GemmWeights:
    groups = 1 if group_size == -1 else k // group_size
    q = rng.integers(0, 16, (experts, k, n), dtype=np.uint8)
    zeros = rng.integers(0, 16, (experts, groups, n), dtype=np.uint8) if zero_points else None
    scales = (0.002 + 0.006 * rng.random((experts, groups, n))).astype(np.float32).astype(dtype)
    return GemmWeights(q, zeros, scales)


def problem(
    rng: np.random.Generator,
    *,
    tokens: int,
    top_k: int,
    experts: int,
    k: int,
    n: int,
    group_size: int,
    dtype: Any,
    zero_points: bool = True,
    weighted: bool = False,
) -> tuple[GemmProblem, np.ndarray[Any, Any]]:
    """A GEMM and the routing of its rows."""
    ids = np.stack([rng.choice(experts, top_k, replace=False) for _ in range(tokens)]).astype(np.int32)
    a = (rng.standard_normal((tokens, k)) * 2.0 ** rng.integers(-6, 4, (tokens, 1))).astype(np.float32).astype(dtype)
    w = weights(rng, experts, k, n, group_size, dtype, zero_points)
    topk_weights = rng.random((tokens, top_k)).astype(np.float32) if weighted else None
    return GemmProblem(a, w, group_size, top_k, topk_weights), ids


def layer(
    rng: np.random.Generator, *, tokens: int, top_k: int, experts: int, hidden: int, intermediate: int, group_size: int,
    dtype: Any = np.float16,
) -> LayerInputs:  # fmt: skip
    ids = np.stack([rng.choice(experts, top_k, replace=False) for _ in range(tokens)]).astype(np.int32)
    return LayerInputs(
        (rng.standard_normal((tokens, hidden)) * 0.5).astype(np.float32).astype(dtype),
        ids,
        rng.random((tokens, top_k)).astype(np.float32),
        {
            "w13": weights(rng, experts, hidden, 2 * intermediate, group_size, dtype),
            "w2": weights(rng, experts, intermediate, hidden, group_size, dtype),
        },
        group_size,
        np.arange(experts, dtype=np.int32),
    )


def run(inputs: LayerInputs, name: str, plan: AlignedPlan, launch: Launch, architecture: str = "hopper") -> Run:
    return Run(name, inputs, plan, dict.fromkeys(("w13", "w2"), Setting(launch, architecture)))


def plans(inputs: LayerInputs, block_size: int, seed: int) -> tuple[AlignedPlan, AlignedPlan]:
    """The stable plan and one of a drawn arrival."""
    experts = len(inputs.expert_rows)
    order = np.random.default_rng(seed).permutation(inputs.topk_ids.size)
    return align(inputs.topk_ids, experts, block_size), align(inputs.topk_ids, experts, block_size, order)
