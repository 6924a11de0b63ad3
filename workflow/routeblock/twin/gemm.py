# SPDX-License-Identifier: Apache-2.0
"""The packed-weight MoE GEMM, bit for bit: vLLM's `moe_wna16_marlin_gemm` on a CPU.

Order of additions (facts: recorded H200 outputs): inside a slice, warp w takes the two 16-deep steps at 32*w of every
K-tile into one float32 accumulator; the warps' sums are added as w0 + w1, or w0 + (w1 + (w3 + w2)); slices are added
from the largest k down; then one rounding to the output dtype, the column's scale, the top-k weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba import prange
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.moe.partition import BLOCK_SIZES, Partition, partition, thread_sizes
from routeblock.moe.routing import AlignedPlan
from routeblock.twin.jit import (
    address,
    bits_float32,
    float32_bits,
    jit,
    load_float32,
    load_uint8,
    store_float32,
    store_int16,
    store_int32,
)
from routeblock.twin.tensor_core import (
    A_CEILING,
    EXPONENT_CEILING,
    EXPONENT_FLOOR,
    FLOOR_BIASED,
    OperandType,
    accumulate,
    architecture_of,
    dot_general,
    exponent_of,
    exponents8,
    operand_type_of,
    products8,
)

NIBBLE = 15  # the largest stored weight or zero point
UNSIGNED_ZERO_POINT = 8  # of uint4b8: the stored nibble minus 8
CHUNK = 4_000_000_000  # multiply-accumulates between two calls of `progress`
EXPANSION_COST = 1.3  # of a tile's weights, in rows


@jit()
def round_operand(value: Any, dropped_bits: Any) -> Any:
    """float32 rounded to nearest even into a 16-bit format (13 dropped bits: float16, 16: bfloat16), kept as
    float32.
    """
    bits = float32_bits(value)
    magnitude = bits & 0x7FFFFFFF
    if dropped_bits == 13:
        if magnitude < 0x38800000:  # below 2^-14 float16 is fixed point, with steps of 2^-24: those of 0.75's binade
            small = (bits_float32(np.int32(magnitude)) + np.float32(0.75)) - np.float32(0.75)
            return bits_float32(np.int32(float32_bits(small) | (bits ^ magnitude)))
        if magnitude >= 0x477FF000 and magnitude <= 0x7F800000:
            return bits_float32(np.int32(0x7F800000 | (bits ^ magnitude)))
    half = (1 << (dropped_bits - 1)) - 1
    rounded = (magnitude + half + ((magnitude >> dropped_bits) & 1)) >> dropped_bits << dropped_bits
    return bits_float32(np.int32(rounded | (bits ^ magnitude)))


@jit()
def expand(b: Any, b_exp: Any, q: int, q_stride: int, zero: int, scale: int, dropped_bits: Any) -> None:
    """Weights of one 16-deep step, results normal in the format or zero.

    b[k, c] = round((q[k, c] - zero[c]) * scale[c]) in float32, b_exp[k, c] its biased exponent; q, zero and scale are
    the addresses of the step's first column.
    """
    half = np.int32((1 << (dropped_bits - 1)) - 1)
    keep = np.int32(-(1 << dropped_bits))
    for k in range(16):
        b_row, e_row, q_row = address(b, k), address(b_exp, k), q + k * q_stride
        for c in range(b.shape[1]):
            steps = np.float32(np.int32(load_uint8(q_row, c))) - load_float32(zero, c)
            bits = float32_bits(steps * load_float32(scale, c))
            odd = np.int32(np.int32(bits >> dropped_bits) & np.int32(1))
            bits = np.int32(np.int32(np.int32(bits + half) + odd) & keep)
            store_float32(b_row, c, bits_float32(bits))
            store_int16(e_row, c, np.int16(np.int32(bits >> 23) & np.int32(255)))


@jit()
def expand_subnormal(
    b: Any, b_exp: Any, q: int, q_stride: int, zero: int, scale: int, dropped_bits: Any, low: Any
) -> None:
    """As `expand`, for results that may be subnormal in the format, whose lowest exponent is `low`."""
    for k in range(16):
        for c in range(b.shape[1]):
            steps = np.float32(np.int32(load_uint8(q + k * q_stride, c))) - load_float32(zero, c)
            b[k, c] = round_operand(steps * load_float32(scale, c), dropped_bits)
            b_exp[k, c] = 0 if b[k, c] == 0 else np.int16(exponent_of(b[k, c], low) + 127)


@jit()
def step_vector(
    acc: int, acc_exp: int, scratch: Any, b: Any, b_exp: Any, a: int, a_exp: int, group: Any, F: Any
) -> None:
    """One 16-deep tensor-core step of one row on all columns of a tile; rows are addresses."""
    n = b.shape[1]
    low, high, top, mid = address(scratch, 0), address(scratch, 1), address(scratch, 2), address(scratch, 3)
    if group == 16:
        exponents8(n, mid, acc_exp, b_exp, 0, a_exp)
        exponents8(n, top, mid, b_exp, 8, a_exp + 16)
        products8(n, low, top, F, b, 0, a)
        products8(n, high, top, F, b, 8, a + 32)
        accumulate(n, acc, acc_exp, low, high, top, F)
    else:
        for c in range(n):
            store_int32(high, c, np.int32(0))
        for h in range(0, 16, 8):
            exponents8(n, top, acc_exp, b_exp, h, a_exp + 2 * h)
            products8(n, low, top, F, b, h, a + 4 * h)
            accumulate(n, acc, acc_exp, low, high, top, F)


@jit(parallel=True)
def _gemm(
    out: Any,
    bounds: Any,
    a: Any,
    a_exp: Any,
    q: Any,
    zeros: Any,
    scales: Any,
    rows: Any,
    expert_ids: Any,
    num_routes: int,
    top_k: int,
    thread_k: int,
    thread_n: int,
    n_tiles: int,
    k_tiles: int,
    direct_tiles: int,
    iters: int,
    group_size: int,
    core_group: int,
    F: Any,
    dropped_bits: int,
    min_exponent: int,
    vector: bool,
    subnormal: bool,
    round_slices: bool,
) -> None:
    for part in prange(bounds.size - 1):
        scratch = np.empty((4, thread_n), np.int32)
        b = np.empty((16, thread_n), np.float32)
        b_exp = np.empty((16, thread_n), np.int16)
        column = np.empty(16, np.float32)
        acc = np.empty((thread_k // 32 * rows.shape[1], thread_n), np.float32)
        acc_exp = np.empty(acc.shape, np.int16)
        result = np.empty((rows.shape[1], thread_n), np.float32)
        for tile in range(bounds[part], bounds[part + 1]):
            block = tile // n_tiles
            n0 = (tile % n_tiles) * thread_n
            expert = expert_ids[block]
            real = 0
            while real < rows.shape[1] and rows[block, real] < num_routes:
                real += 1
            if expert < 0 or real == 0:
                continue
            line, cut = 0, k_tiles
            if tile >= direct_tiles:
                line, cut = (tile - direct_tiles) * k_tiles, iters
            stop = line + k_tiles
            while stop > line:
                start = max(line, (stop - 1) // cut * cut)
                acc[:] = 0
                acc_exp[:] = FLOOR_BIASED
                for step in range((start - line) * thread_k // 16, (stop - line) * thread_k // 16):
                    warp = step % (thread_k // 16) // 2
                    k0 = step * 16
                    q_row = address(q, expert) + k0 * q.shape[2] + n0
                    group = (k0 // group_size) * q.shape[2] + n0
                    zero, scale = address(zeros, expert) + 4 * group, address(scales, expert) + 4 * group
                    if subnormal:
                        expand_subnormal(b, b_exp, q_row, q.shape[2], zero, scale, dropped_bits, min_exponent)
                    else:
                        expand(b, b_exp, q_row, q.shape[2], zero, scale, dropped_bits)
                    for r in range(real):
                        source = rows[block, r] // top_k
                        i = warp * real + r
                        if vector:
                            step_vector(
                                address(acc, i), address(acc_exp, i), scratch, b, b_exp,
                                address(a, source) + 4 * k0, address(a_exp, source) + 2 * k0, core_group, F,
                            )  # fmt: skip
                            continue
                        for c in range(thread_n):
                            for k in range(16):
                                column[k] = b[k, c]
                            for h in range(0, 16, core_group):
                                acc[i, c] = dot_general(
                                    acc[i, c], a[source, k0 : k0 + 16], column, h, h + core_group, F, min_exponent
                                )
                for r in range(real):
                    for c in range(thread_n):
                        total = acc[r, c] + acc[real + r, c]
                        if thread_k == 128:
                            total = acc[r, c] + (acc[real + r, c] + (acc[3 * real + r, c] + acc[2 * real + r, c]))
                        if stop < line + k_tiles:
                            total = result[r, c] + total
                        if round_slices and start > line:
                            total = round_operand(total, dropped_bits)
                        result[r, c] = total
                stop = start
            for r in range(real):
                out[rows[block, r], n0 : n0 + thread_n] = result[r]


@jit(parallel=True)
def _exponents(x: Any, min_exponent: int) -> Any:
    e = np.empty(x.shape, np.int16)
    for i in prange(x.shape[0]):
        for k in range(x.shape[1]):
            e[i, k] = np.int16(exponent_of(x[i, k], min_exponent))
    return e


@dataclass(frozen=True)
class Weights:
    """Quantised weights of one GEMM as the twin wants them: q uint8 [E, K, N], zeros and scales float32 [E, groups,
    N].
    """

    q: NDArray[np.uint8]
    zeros: NDArray[np.float32]
    scales: NDArray[np.float32]
    column_scales: NDArray[Any] | None  # [E, N] in the operand dtype where there are no groups


def _refuse(what: str, limit: str, way_out: str) -> InputError:
    return InputError(what, where="moe_gemm", limit=limit, way_out=way_out)


def _check_weights(
    operand: OperandType, q: NDArray[Any], zeros: NDArray[Any] | None, scales: NDArray[Any], group_size: int
) -> Weights:
    if q.dtype != np.uint8 or q.ndim != 3:
        raise _refuse(f"q {q.dtype} {q.shape}", "uint8 [experts, K, N]", "unpack the weights with routeblock.moe.awq")
    experts, k, n = q.shape
    if group_size != -1 and (group_size < 16 or group_size % 16 or k % group_size):
        raise _refuse(f"group size {group_size}", f"-1, or a multiple of 16 that divides K={k}", "check the checkpoint")
    if q.size and q.max() > NIBBLE:
        raise _refuse(f"a weight of {q.max()}", f"0 to {NIBBLE}", "unpack the weights with routeblock.moe.awq")
    groups = 1 if group_size == -1 else k // group_size
    if scales.dtype != operand.dtype or scales.shape != (experts, groups, n):
        raise _refuse(
            f"scales {scales.dtype} {scales.shape}",
            f"{operand.name} [{experts}, {groups}, {n}] for group size {group_size}",
            "check dtype and group size",
        )
    if zeros is not None and (zeros.dtype != np.uint8 or zeros.shape != scales.shape):
        raise _refuse(
            f"zeros {zeros.dtype} {zeros.shape}", f"uint8 {scales.shape} or None", "unpack them with routeblock.moe.awq"
        )
    if zeros is not None and zeros.size and zeros.max() > NIBBLE:
        raise _refuse(f"a zero point of {zeros.max()}", f"0 to {NIBBLE}", "unpack them with routeblock.moe.awq")
    # The kernel reads by address: rows of columns, whatever order the arrays came in.
    wide = np.ascontiguousarray(scales, np.float32)
    if not np.isfinite(wide).all():
        expert, group, column = (int(i) for i in np.argwhere(~np.isfinite(wide))[0])
        raise _refuse(
            f"scale {wide[expert, group, column]} at expert {expert}, group {group}, column {column}",
            "finite scales",
            "repair the checkpoint",
        )
    if zeros is None:
        zero = np.full(scales.shape, UNSIGNED_ZERO_POINT, np.float32)
    else:
        zero = np.ascontiguousarray(zeros, np.float32)
    if group_size != -1 and wide.size:
        largest = (np.maximum(zero, NIBBLE - zero) * np.abs(wide)).astype(np.float64).max()
        if largest > operand.largest:
            raise _refuse(
                f"a scale with which a weight can reach {largest:.4g}",
                f"weights up to {operand.largest:.5g}, the largest {operand.name}",
                "repair the checkpoint: what the kernel makes of infinite weights is not recorded",
            )
    if group_size == -1:
        return Weights(q, zero, np.ones_like(wide), scales[:, 0, :])
    return Weights(q, zero, wide, None)


def _check_structure(plan: AlignedPlan) -> None:
    """What the kernel takes on trust: lengths, ranges, each route once, sentinels last in their block."""
    b, padded = plan.block_size, plan.num_tokens_post_padded
    if b not in BLOCK_SIZES or padded < 0 or padded % b:
        raise _refuse(f"a plan of {padded} rows in blocks of {b}", f"whole blocks of {BLOCK_SIZES}", "use align")
    if plan.sorted_token_ids.size < padded or plan.expert_ids.size < padded // b:
        raise _refuse(
            f"a plan of {padded} rows with {plan.sorted_token_ids.size} ids and {plan.expert_ids.size} experts",
            f"{padded} ids and {padded // b} experts",
            "use align",
        )
    real = plan.rows < plan.num_routes
    used = plan.rows[real]
    if (plan.rows < 0).any() or (plan.rows > plan.num_routes).any() or np.unique(used).size != used.size:
        raise _refuse("a plan that repeats a route or names none", f"0 to {plan.num_routes}, each once", "use align")
    if (real[:, 1:] & ~real[:, :-1]).any():
        raise _refuse("a plan with a sentinel before a route", "sentinels last in a block", "use align")


def _exponent_range(*arrays: NDArray[np.float32]) -> tuple[int, int]:
    """Lowest and highest possible sum of the exponents of one nonzero finite value of each array; (0, 0) if none."""
    low = high = 0
    for x in arrays:
        magnitude = np.abs(x[x != 0])
        if magnitude.size == 0:
            return 0, 0
        low += int(np.frexp(magnitude.min())[1]) - 1
        high += int(np.frexp(magnitude.max())[1]) - 1
    return low, high


def moe_gemm(
    a: NDArray[Any],
    q: NDArray[np.uint8],
    zeros: NDArray[np.uint8] | None,
    scales: NDArray[Any],
    plan: AlignedPlan,
    *,
    top_k: int,
    architecture: str,
    thread_k: int,
    thread_n: int,
    grid: int,
    group_size: int,
    topk_weights: NDArray[np.float32] | None = None,
    fp32_reduce: bool = True,
    full_k: bool = False,
    progress: Callable[[float], None] | None = None,
) -> NDArray[Any]:
    """One packed MoE GEMM with the bits of the GPU kernel.

    a [rows, K] float16 or bfloat16, route r reads row r // top_k; q uint8 [E, K, N] nibbles; zeros uint8
    [E, K/group_size, N], or None for the fixed zero point 8 (uint4b8); scales [E, K/group_size, N] of a's dtype
    (group_size -1: one scale per column, [E, 1, N]). topk_weights float32 [M, top_k] of the layer, one per route,
    rounded to the dtype before they multiply. fp32_reduce False rounds to the dtype between slices. full_k is the
    batch-invariant mode of newer builds. `progress` is called with the share done of a long call.
    Returns [plan.num_routes, N] of a's dtype; rows of routes that take no slot are zero (the GPU does not write them).
    Raises InputError for wrong dtypes, shapes, thread sizes or experts, and for values that are not finite.
    """
    core = architecture_of(architecture)
    operand = operand_type_of(a.dtype, "moe_gemm input")
    if (thread_k, thread_n) not in thread_sizes(plan.block_size):
        raise _refuse(
            f"thread sizes ({thread_k}, {thread_n}) with block size {plan.block_size}",
            f"kernels exist for {thread_sizes(plan.block_size)}",
            "choose one of them",
        )
    _check_structure(plan)
    weights = _check_weights(operand, q, zeros, scales, group_size)
    experts, k, n = q.shape
    if a.ndim != 2 or a.shape[1] != k or a.shape[0] * top_k != plan.num_routes:
        raise _refuse(
            f"input {a.shape} with top_k {top_k}",
            f"[{plan.num_routes} / top_k, {k}] for this plan and these weights",
            "check plan, top_k and K",
        )
    ids = plan.expert_ids[: plan.num_blocks]
    if ids.size and (ids.max() >= experts or ids.min() < -1):
        raise _refuse(f"expert ids {ids.min()} to {ids.max()}", f"-1 to {experts - 1}", "align to the local experts")
    wide = np.ascontiguousarray(a, dtype=np.float32)
    if not np.isfinite(wide).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(wide))[0])
        raise _refuse(f"input {wide[row, column]} at [{row}, {column}]", "finite inputs", "find where it arose")
    if topk_weights is not None:
        if topk_weights.dtype != np.float32 or topk_weights.size != plan.num_routes:
            raise _refuse(
                f"topk_weights {topk_weights.dtype} {topk_weights.shape}",
                f"float32, {plan.num_routes} of them",
                "pass the router's weights",
            )
        if not np.isfinite(topk_weights).all():
            raise _refuse("a top-k weight is not finite", "finite weights", "check the router")
    cut: Partition = partition(plan.num_blocks, n, k, thread_n, thread_k, grid, group_size, full_k)
    a_low, a_high = _exponent_range(wide)
    s_low, s_high = _exponent_range(weights.scales)
    highest = a_high + s_high + 4  # |q - z| is below 16
    vector = a_low + s_low >= EXPONENT_FLOOR and highest <= EXPONENT_CEILING and a_high <= A_CEILING
    out = np.zeros((plan.num_routes, n), np.float32)
    a_exp = _exponents(wide, operand.min_exponent)
    cost = np.repeat((plan.rows < plan.num_routes).sum(1) + EXPANSION_COST, cut.n_tiles).cumsum() * (thread_n * k)
    pieces = -(-int(cost[-1]) // CHUNK) if progress and cost.size else 1
    threads = numba.get_num_threads()
    edges = np.searchsorted(cost, np.linspace(0, cost[-1] if cost.size else 0, pieces * threads + 1))
    edges[-1] = cut.tiles
    for piece in range(pieces):
        _gemm(
            out, edges[piece * threads : (piece + 1) * threads + 1], wide, a_exp, np.ascontiguousarray(q),
            weights.zeros, weights.scales, np.ascontiguousarray(plan.rows), ids, plan.num_routes, top_k, thread_k,
            thread_n, cut.n_tiles, cut.k_tiles, cut.direct_tiles, cut.iters, k if group_size == -1 else group_size,
            core.group, np.int32(core.fraction_bits), operand.dropped_bits, operand.min_exponent, vector,
            s_low < operand.min_exponent, not fp32_reduce,
        )  # fmt: skip
        if progress:
            progress((piece + 1) / pieces)
    if not np.isfinite(out).all():
        raise _refuse("a sum beyond float32", "finite sums: others are not recorded", "check inputs and scales")
    with np.errstate(over="ignore"):  # the kernel's conversion gives infinity too
        result = out.astype(operand.dtype)
    used = plan.sorted_token_ids[: plan.num_tokens_post_padded]
    owner = np.repeat(ids, plan.block_size)
    written = (used < plan.num_routes) & (owner >= 0)
    routes, owner = used[written], owner[written]
    if weights.column_scales is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            result[routes] = result[routes] * weights.column_scales[owner]
    if topk_weights is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            result[routes] = result[routes] * topk_weights.reshape(-1)[routes, None].astype(operand.dtype)
    return result
