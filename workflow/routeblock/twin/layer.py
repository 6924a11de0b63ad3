# SPDX-License-Identifier: Apache-2.0
"""The MoE layer, bit for bit: W13, silu_and_mul, W2 with the top-k weights, sum over the top-k routes.

Facts: recorded outputs of vLLM's silu_and_mul and moe_sum and of torch.sum on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan, check_plan
from routeblock.twin.gemm import Visits, moe_gemm
from routeblock.twin.tensor_core import operand_type_of

SURFACES = ("w13", "activation", "w2", "final")
NAN_BITS = 0x7FFF  # of a GPU multiplication in both dtypes


class GemmWeights(NamedTuple):
    """q uint8 [E, K, N], zeros uint8 [E, groups, N] or None for the fixed 8, scales [E, groups, N] of the layer's
    dtype.
    """

    q: NDArray[np.uint8]
    zeros: NDArray[np.uint8] | None
    scales: NDArray[Any]


def _canonical_nan(x: NDArray[Any]) -> NDArray[Any]:
    """`x`, 16 bits an element, with every NaN as the GPU writes it."""
    x.view(np.uint16)[np.isnan(x.astype(np.float32))] = NAN_BITS
    return x


def silu(x: NDArray[Any]) -> NDArray[Any]:
    """x / (1 + exp(-x)) with the bits of vLLM's silu, any shape, float16 or bfloat16; NaN comes out as 0x7fff.

    The exponential is rounded once from float64 to float32; addition and division are float32; one rounding at the end.
    """
    operand = operand_type_of(x.dtype, "silu")
    wide = x.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        exponential = np.exp(-wide.astype(np.float64)).astype(np.float32)
        return _canonical_nan((wide / (np.float32(1) + exponential)).astype(operand.dtype))


def silu_and_mul(gate_up: NDArray[Any]) -> NDArray[Any]:
    """silu(gate) * up of [rows, 2 * I] (gate first), rounded after each of the two operations; returns [rows, I]."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise InputError(
            f"shape {gate_up.shape}",
            where="silu_and_mul",
            limit="[rows, 2 * intermediate]",
            way_out="pass gate and up side by side",
        )
    half = gate_up.shape[1] // 2
    with np.errstate(over="ignore", invalid="ignore"):
        return _canonical_nan(np.asarray(silu(gate_up[:, :half]) * gate_up[:, half:]))


def combine(rows: NDArray[Any], form: Literal["fp32", "each"] = "fp32") -> NDArray[Any]:
    """Sum of rows [T, k, N] over k, returns [T, N] of the same dtype.

    "fp32" is torch.sum, the fused path's default: four float32 accumulators, route i to accumulator i mod 4, then
    ((a0 + a1) + a2) + a3 and one rounding. "each" is vLLM's moe_sum at k = 4: it rounds to the dtype after every
    addition. Raises InputError for a sum that is NaN: its bits are not recorded.
    """
    operand = operand_type_of(rows.dtype, "combine")
    if rows.ndim != 3 or form not in ("fp32", "each"):
        raise InputError(
            f"rows {rows.shape}, form {form!r}",
            where="combine",
            limit="rows [tokens, top_k, N], form fp32 or each",
            way_out="reshape the routed rows first",
        )
    tokens, top_k, n = rows.shape
    with np.errstate(over="ignore", invalid="ignore"):
        if form == "each":
            total = np.zeros((tokens, n), operand.dtype)
            for i in range(top_k):
                total = (total.astype(np.float32) + rows[:, i].astype(np.float32)).astype(operand.dtype)
            return _no_nan(total)
        parts = np.zeros((4, tokens, n), np.float32)
        for i in range(top_k):
            parts[i % 4] += rows[:, i].astype(np.float32)
        return _no_nan(np.asarray((((parts[0] + parts[1]) + parts[2]) + parts[3]).astype(operand.dtype)))


def _no_nan(total: NDArray[Any]) -> NDArray[Any]:
    if np.isnan(total).any():
        token, column = (int(i) for i in np.argwhere(np.isnan(total))[0])
        raise InputError(
            f"the sum of token {token} at column {column} is NaN",
            where="combine",
            limit="rows without NaN and without infinities of both signs: what a GPU makes of them is not recorded",
            way_out="find where they arose",
        )
    return total


def _check_activation(w13: NDArray[Any], activation: NDArray[Any]) -> None:
    """W2 takes finite values only: name the surface on which others arose."""
    for name, x in (("w13", w13), ("activation", activation)):
        if not np.isfinite(x).all():
            row, column = (int(i) for i in np.argwhere(~np.isfinite(x))[0])
            raise InputError(
                f"{name} is {x[row, column]} at route {row}, column {column}",
                where="moe_layer",
                limit=f"W2 needs finite inputs, and {x.dtype} did not hold this one",
                way_out="check hidden states and scales",
            )


def moe_layer(
    hidden: NDArray[Any],
    topk_ids: NDArray[Any],
    topk_weights: NDArray[np.float32],
    w13: GemmWeights | tuple[Any, Any, Any],
    w2: GemmWeights | tuple[Any, Any, Any],
    plan: AlignedPlan,
    *,
    architecture: str,
    w13_launch: Launch | tuple[int, int, int],
    w2_launch: Launch | tuple[int, int, int],
    group_size: int = 128,
    expert_map: NDArray[np.int32] | None = None,
    progress: Callable[[float], None] | None = None,
    visits: Mapping[str, Visits] | None = None,
) -> dict[str, NDArray[Any]]:
    """One layer's four surfaces, with the bits of the GPU path.

    hidden [M, H] float16 or bfloat16; topk_ids [M, k]; topk_weights float32 [M, k]; w13 and w2 as `GemmWeights` (W13
    gate rows first, N = 2 * I); plan from `align`; launches (thread_k, thread_n, grid).
    expert_map: int32 [global experts] -> row of the weights or -1, when the plan's experts are such rows; default: ids
    are rows. visits: of `w13` and `w2`, filled with what the loops went through.
    Returns w13 [M*k, 2I], activation [M*k, I], w2 [M*k, H] (top-k weights multiplied in), final [M, H].
    Raises InputError as `moe_gemm` does, and when plan, ids and weights do not belong together.
    """
    if topk_ids.ndim != 2 or topk_weights.shape != topk_ids.shape or topk_ids.size != plan.num_routes:
        raise InputError(
            f"topk_ids {topk_ids.shape}, topk_weights {topk_weights.shape}, plan of {plan.num_routes} routes",
            where="moe_layer",
            limit="one shape [tokens, top_k], one route per entry",
            way_out="use the plan and weights of this routing",
        )
    check_plan(plan, topk_ids, len(w13[0]) if expert_map is None else len(expert_map), expert_map, where="moe_layer")
    tokens, top_k = topk_ids.shape
    steps = (lambda part: lambda done: progress((part + done) / 2)) if progress else (lambda part: None)
    seen = visits or {"w13": Visits(), "w2": Visits()}
    surfaces: dict[str, NDArray[Any]] = {}
    surfaces["w13"] = moe_gemm(
        hidden, w13[0], w13[1], w13[2], plan, top_k=top_k, architecture=architecture, thread_k=w13_launch[0],
        thread_n=w13_launch[1], grid=w13_launch[2], group_size=group_size, progress=steps(0), visits=seen["w13"],
    )  # fmt: skip
    surfaces["activation"] = silu_and_mul(surfaces["w13"])
    _check_activation(surfaces["w13"], surfaces["activation"])
    surfaces["w2"] = moe_gemm(
        surfaces["activation"], w2[0], w2[1], w2[2], plan, top_k=1, architecture=architecture, thread_k=w2_launch[0],
        thread_n=w2_launch[1], grid=w2_launch[2], group_size=group_size, topk_weights=topk_weights, progress=steps(1),
        visits=seen["w2"],
    )  # fmt: skip
    surfaces["final"] = combine(surfaces["w2"].reshape(tokens, top_k, -1))
    return surfaces
