# SPDX-License-Identifier: Apache-2.0
"""The packed-weight MoE GEMM, bit for bit: vLLM's `moe_wna16_marlin_gemm` on a CPU.

Order of additions (facts: recorded H200 outputs): inside a slice, warp w takes the two 16-deep steps at 32*w of every
K-tile into one float32 accumulator; the warps' sums are added as w0 + w1, or w0 + (w1 + (w3 + w2)); slices are added
from the largest k down; then one rounding to the output dtype, the column's scale, the top-k weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
from numba import prange
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.moe.partition import BLOCK_SIZES, Partition, partition, thread_sizes
from routeblock.moe.routing import AlignedPlan
from routeblock.twin.jit import address, bits_float32, float32_bits, jit
from routeblock.twin.tensor_core import OperandType, architecture_of, dot_general, exponent_of, operand_type_of
from routeblock.twin.vector import (
    CHUNK,
    EXPONENT_CEILING,
    EXPONENT_FLOOR,
    OPERAND_CEILING,
    ZERO_FIELD,
    expand_chunk,
    expand_chunk_subnormal,
    step_chunk8,
    step_chunk16,
)

NIBBLE = 15  # the largest stored weight or zero point
UNSIGNED_ZERO_POINT = 8  # of uint4b8: the stored nibble minus 8
PIECE = 4_000_000_000  # multiply-accumulates between two calls of `progress`
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
def widen(bits: Any, dropped_bits: Any) -> Any:
    """float32 of a finite 16-bit float (13 dropped bits: float16, 16: bfloat16)."""
    word = np.int32(bits)
    if dropped_bits == 16:
        return bits_float32(np.int32(word << 16))
    magnitude = bits_float32(np.int32((word & 0x7FFF) << 13)) * np.float32(2.0**112)
    return bits_float32(np.int32(float32_bits(magnitude) | ((word & 0x8000) << 16)))


@jit()
def expand_general(b: Any, q: Any, first: int, scale: Any, offset: Any, dropped_bits: Any) -> Any:
    """Weights of one 16-deep step for any finite scale: b[k, c] = round(q[k, first + c] * scale[c] + offset[c])."""
    seen = 0
    for k in range(16):
        for c in range(b.shape[1]):
            nibble = q[k, first + c]
            seen |= nibble
            b[k, c] = round_operand(np.float32(nibble) * scale[c] + offset[c], dropped_bits)
    return seen


@jit(parallel=True)
def _gemm(
    out: Any,
    seen: Any,
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
    fraction_bits: int,
    dropped_bits: int,
    min_exponent: int,
    vector: bool,
    subnormal: bool,
    round_slices: bool,
    visited_rows: Any,
    visited_experts: Any,
    visited_lengths: Any,
) -> None:
    for part in prange(bounds.size - 1):
        warps = thread_k // 32
        # One workspace that begins at a cache line: b, its exponent fields, scales, offsets, accumulators.
        space = np.empty(((16 + 8 + 2 + warps * rows.shape[1]) * thread_n + 16), np.float32)
        at = -(address(space, 0) // 4) % 16
        b = space[at : at + 16 * thread_n].reshape(16, thread_n)
        b_exp = at + 16 * thread_n
        terms = space[at + 24 * thread_n : at + 26 * thread_n].reshape(2, thread_n)
        acc = space[at + 26 * thread_n : at + (26 + warps * rows.shape[1]) * thread_n].reshape(-1, thread_n)
        column = np.empty(16, np.float32)
        result = np.empty((rows.shape[1], thread_n), np.float32)
        nibbles = 0
        for tile in range(bounds[part], bounds[part + 1]):
            block = tile // n_tiles
            n0 = (tile % n_tiles) * thread_n
            expert = expert_ids[block]
            real = 0
            while real < rows.shape[1] and rows[block, real] < num_routes:
                real += 1
            if real == 0:
                continue
            line, cut = 0, k_tiles
            if tile >= direct_tiles:
                line, cut = (tile - direct_tiles) * k_tiles, iters
            stop = line + k_tiles
            while stop > line:
                start = max(line, (stop - 1) // cut * cut)
                acc[:] = 0
                group = -1
                for step in range((start - line) * thread_k // 16, (stop - line) * thread_k // 16):
                    warp = step % (thread_k // 16) // 2
                    k0 = step * 16
                    if group != k0 // group_size:
                        group = k0 // group_size
                        for c in range(thread_n):
                            zero = np.float32(zeros[expert, group, n0 + c])
                            terms[0, c] = widen(scales[expert, group, n0 + c], dropped_bits)
                            terms[1, c] = -(zero * terms[0, c])
                    if not vector:
                        nibbles |= expand_general(b, q[expert, k0 : k0 + 16], n0, terms[0], terms[1], dropped_bits)
                    else:
                        for c in range(0, thread_n, CHUNK):
                            b_at, e_at = address(b, 0) + 4 * c, address(space, b_exp) + 2 * c
                            q_at, scale_at = address(q, expert) + k0 * q.shape[2] + n0 + c, address(terms, 0) + 4 * c
                            if subnormal:
                                nibbles |= expand_chunk_subnormal(
                                    b_at, e_at, thread_n, q_at, q.shape[2], scale_at, dropped_bits
                                )
                            else:
                                nibbles |= expand_chunk(b_at, e_at, thread_n, q_at, q.shape[2], scale_at, dropped_bits)
                    for r in range(real):
                        source = rows[block, r] // top_k
                        i = warp * real + r
                        if vector:
                            a_at, x_at = address(a, source) + 4 * k0, address(a_exp, source) + 4 * k0
                            for c in range(0, thread_n, CHUNK):
                                acc_at, b_at, e_at = (
                                    address(acc, i) + 4 * c, address(b, 0) + 4 * c, address(space, b_exp) + 2 * c
                                )  # fmt: skip
                                if core_group == 16:
                                    step_chunk16(acc_at, b_at, e_at, thread_n, a_at, x_at, fraction_bits)
                                else:
                                    step_chunk8(acc_at, b_at, e_at, thread_n, a_at, x_at, fraction_bits)
                            continue
                        for c in range(thread_n):
                            for k in range(16):
                                column[k] = b[k, c]
                            for h in range(0, 16, core_group):
                                acc[i, c] = dot_general(
                                    acc[i, c], a[source, k0 : k0 + 16], column, h, h + core_group, fraction_bits,
                                    min_exponent,
                                )  # fmt: skip
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
                visited_lengths[tile, start - line] += stop - start
                stop = start
            for r in range(real):
                out[rows[block, r], n0 : n0 + thread_n] = result[r]
            if n0 == 0:  # once a block: its other tiles may be another thread's
                visited_experts[block] = expert
                for r in range(real):
                    visited_rows[block, r] = rows[block, r]
        seen[part] = nibbles


@jit(parallel=True)
def _fields(x: Any, min_exponent: int) -> Any:
    """Exponent fields of A as the vector step wants them: unbiased, cut to 16 bits, twice in a word."""
    fields = np.empty(x.shape, np.int32)
    for i in prange(x.shape[0]):
        for k in range(x.shape[1]):
            e = exponent_of(x[i, k], min_exponent)
            field = np.int32(e if e > ZERO_FIELD else ZERO_FIELD) << 7
            fields[i, k] = np.int32((field << 16) | (field & 0xFFFF))
    return fields


@jit(parallel=True)
def _magnitudes(x: Any) -> Any:
    """Of each row of a 16-bit float array [rows, n]: the smallest nonzero and the largest magnitude, as bits, which
    order as the values do; (0x7FFF, 0) of zeros alone.
    """
    found = np.empty((x.shape[0], 2), np.uint16)
    for i in prange(x.shape[0]):
        low, high = np.uint16(0x7FFF), np.uint16(0)
        row = x[i]
        for j in range(row.size):
            magnitude = np.uint16(row[j] & np.uint16(0x7FFF))
            high = max(high, magnitude)
            low = min(low, magnitude if magnitude != 0 else np.uint16(0x7FFF))
        found[i, 0], found[i, 1] = low, high
    return found


@dataclass
class Visits:
    """What the loops of one GEMM went through, written by the loops; empty before.

    rows int32 [blocks, block size]: the route of each computed row, elsewhere -1; experts int32 [blocks]: the weights
    used, -1 where none; lengths int32 [tiles, K-tiles]: K-tiles of the slice that begins there, 0 where none does.
    """

    rows: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    experts: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    lengths: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))

    def slices(self) -> list[list[tuple[int, int]]]:
        """For each tile its slices as (first K-tile, one past the last), ascending."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.lengths]
        for tile, first in np.argwhere(self.lengths).tolist():
            found[tile].append((first, first + int(self.lengths[tile, first])))
        return found

    def plan(self, num_routes: int) -> AlignedPlan:
        """The plan that was gone through, experts as rows of the weights."""
        ids = np.where(self.rows < 0, num_routes, self.rows).astype(np.int32).reshape(-1)
        return AlignedPlan(ids, self.experts, ids.size, self.rows.shape[1], num_routes)


@dataclass(frozen=True)
class Span:
    """Magnitudes of a 16-bit float array: the smallest nonzero, the largest, their exponents (0 if none)."""

    largest: float
    low: int
    high: int


def _span(x: NDArray[Any]) -> Span | None:
    """None where an element is not finite; x C-contiguous."""
    if x.size == 0:
        return Span(0.0, 0, 0)
    found = _magnitudes(x.view(np.uint16).reshape(-1, x.shape[-1]))
    ends = np.array([found[:, 0].min(), found[:, 1].max()], np.uint16).view(x.dtype).astype(np.float64)
    if not np.isfinite(ends[1]):
        return None
    if ends[1] == 0:
        return Span(0.0, 0, 0)
    low, high = (int(np.frexp(end)[1]) - 1 for end in ends)
    return Span(float(ends[1]), low, high)


@dataclass(frozen=True)
class Weights:
    """Quantised weights of one GEMM as the twin wants them: zeros uint8 and scales 16-bit floats [E, groups, N]."""

    zeros: NDArray[np.uint8]
    scales: NDArray[Any]
    span: Span  # of the scales
    column_scales: NDArray[Any] | None  # [E, N] in the operand dtype where the operator sees no groups


def _refuse(what: str, limit: str, way_out: str) -> InputError:
    return InputError(what, where="moe_gemm", limit=limit, way_out=way_out)


def _not_nibbles(largest: int) -> InputError:
    return _refuse(f"a weight of {largest}", f"0 to {NIBBLE}", "unpack the weights with routeblock.moe.awq")


def _check_weights(
    operand: OperandType, q: NDArray[Any], zeros: NDArray[Any] | None, scales: NDArray[Any], group_size: int
) -> Weights:
    if q.dtype != np.uint8 or q.ndim != 3:
        raise _refuse(f"q {q.dtype} {q.shape}", "uint8 [experts, K, N]", "unpack the weights with routeblock.moe.awq")
    experts, k, n = q.shape
    if group_size != -1 and (group_size < 16 or group_size % 16 or k % group_size):
        raise _refuse(f"group size {group_size}", f"-1, or a multiple of 16 that divides K={k}", "check the checkpoint")
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
    scales = np.ascontiguousarray(scales)
    span = _span(scales)
    if span is None:
        wide = scales.astype(np.float32)
        expert, group, column = (int(i) for i in np.argwhere(~np.isfinite(wide))[0])
        raise _refuse(
            f"scale {wide[expert, group, column]} at expert {expert}, group {group}, column {column}",
            "finite scales",
            "repair the checkpoint",
        )
    zero = np.full(scales.shape, UNSIGNED_ZERO_POINT, np.uint8) if zeros is None else np.ascontiguousarray(zeros)
    if groups == 1:
        ones = np.ones(scales.shape, operand.dtype)
        return Weights(zero, ones, Span(1.0, 0, 0), scales[:, 0, :])
    if span.largest * NIBBLE > operand.largest:
        largest = (np.maximum(zero, NIBBLE - zero) * np.abs(scales.astype(np.float64))).max()
        if largest > operand.largest:
            raise _refuse(
                f"a scale with which a weight can reach {largest:.4g}",
                f"weights up to {operand.largest:.5g}, the largest {operand.name}",
                "repair the checkpoint: what the kernel makes of infinite weights is not recorded",
            )
    return Weights(zero, scales, span, None)


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
    experts = plan.expert_ids[: plan.num_blocks]
    if (experts < 0).any():
        block = int(np.flatnonzero(experts < 0)[0])
        raise _refuse(
            f"expert id {int(experts[block])} in block {block}",
            "expert ids from 0: the kernel does not skip such a block, it reads before the weights",
            "use align with the expert map: as the fused path does (ignore_invalid_experts), it makes no such block",
        )


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
    visits: Visits | None = None,
) -> NDArray[Any]:
    """One packed MoE GEMM with the bits of the GPU kernel.

    a [rows, K] float16 or bfloat16, route r reads row r // top_k; q uint8 [E, K, N] nibbles; zeros uint8
    [E, K/group_size, N], or None for the fixed zero point 8 (uint4b8); scales [E, K/group_size, N] of a's dtype
    (group_size -1: one scale per column, [E, 1, N]). One group over K, by -1 or by K itself, is one scale per column,
    applied once, after the sum is rounded. topk_weights float32 [M, top_k] of the layer, one per route,
    rounded to the dtype before they multiply, and finite there. fp32_reduce False rounds to the dtype between slices.
    full_k is the batch-invariant mode of newer builds. `progress` is called with the share done of a long call.
    `visits` is filled with what the loops went through.
    Returns [plan.num_routes, N] of a's dtype; rows of routes that take no slot are zero (the GPU does not write them).
    A finite sum beyond the dtype is an infinity, as on the GPU.
    Raises InputError for wrong dtypes, shapes, thread sizes or experts, for values that are not finite, and for a NaN.
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
    if ids.size and ids.max() >= experts:
        raise _refuse(f"expert ids {ids.min()} to {ids.max()}", f"0 to {experts - 1}", "align to the local experts")
    a = np.ascontiguousarray(a)
    wide = a.astype(np.float32)
    span = _span(a)
    if span is None:
        row, column = (int(i) for i in np.argwhere(~np.isfinite(wide))[0])
        raise _refuse(f"input {wide[row, column]} at [{row}, {column}]", "finite inputs", "find where it arose")
    if topk_weights is not None:
        if topk_weights.dtype != np.float32 or topk_weights.size != plan.num_routes:
            raise _refuse(
                f"topk_weights {topk_weights.dtype} {topk_weights.shape}",
                f"float32, {plan.num_routes} of them",
                "pass the router's weights",
            )
        with np.errstate(over="ignore"):
            rounded_weights = topk_weights.reshape(-1).astype(operand.dtype)
        if not np.isfinite(rounded_weights).all():
            worst = topk_weights.reshape(-1)[~np.isfinite(rounded_weights)][0]
            raise _refuse(
                f"top-k weight {worst:.6g} is not finite in {operand.name}", "finite weights", "check the router"
            )
    cut: Partition = partition(plan.num_blocks, n, k, thread_n, thread_k, grid, group_size, full_k)
    weight_high = weights.span.high + 4  # |q - z| is below 16
    vector = (
        span.low + weights.span.low >= EXPONENT_FLOOR
        and span.high + weight_high <= EXPONENT_CEILING
        and max(span.high, weight_high) <= OPERAND_CEILING
    )
    group = k if weights.column_scales is not None else group_size
    out = np.zeros((plan.num_routes, n), np.float32)
    fields = _fields(wide, operand.min_exponent)
    cost = np.repeat((plan.rows < plan.num_routes).sum(1) + EXPANSION_COST, cut.n_tiles).cumsum() * (thread_n * k)
    pieces = -(-int(cost[-1]) // PIECE) if progress and cost.size else 1
    threads = numba.get_num_threads()
    edges = np.searchsorted(cost, np.linspace(0, cost[-1] if cost.size else 0, pieces * threads + 1))
    edges[-1] = cut.tiles
    seen = np.zeros(threads, np.int64)
    visits = visits or Visits()
    visits.rows = np.full((plan.num_blocks, plan.block_size), -1, np.int32)
    visits.experts = np.full(plan.num_blocks, -1, np.int32)
    visits.lengths = np.zeros((cut.tiles, cut.k_tiles), np.int32)
    for piece in range(pieces):
        _gemm(
            out, seen, edges[piece * threads : (piece + 1) * threads + 1], wide, fields, np.ascontiguousarray(q),
            weights.zeros, weights.scales.view(np.uint16), np.ascontiguousarray(plan.rows), ids, plan.num_routes, top_k,
            thread_k, thread_n, cut.n_tiles, cut.k_tiles, cut.direct_tiles, cut.iters,
            group, core.group, core.fraction_bits, operand.dropped_bits, operand.min_exponent, vector,
            weights.span.low < operand.min_exponent, not fp32_reduce, visits.rows, visits.experts, visits.lengths,
        )  # fmt: skip
        if seen.max() > NIBBLE:
            raise _not_nibbles(int(q[ids].max()))
        if progress:
            progress((piece + 1) / pieces)
    if not np.isfinite(out).all():
        limit = "float32" if fp32_reduce else operand.name
        raise _refuse(f"a sum beyond {limit}", "finite sums: others are not recorded", "check inputs and scales")
    with np.errstate(over="ignore"):  # the kernel's conversion gives infinity too
        result = out.astype(operand.dtype)
    used = plan.sorted_token_ids[: plan.num_tokens_post_padded]
    owner = np.repeat(ids, plan.block_size)
    written = used < plan.num_routes
    routes, owner = used[written], owner[written]
    if weights.column_scales is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            result[routes] = result[routes] * weights.column_scales[owner]
    if topk_weights is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            result[routes] = result[routes] * rounded_weights[routes, None]
    if np.isnan(result).any():
        route, column = (int(i) for i in np.argwhere(np.isnan(result))[0])
        raise _refuse(
            f"an infinity times 0 at route {route}, column {column}",
            "no NaN: its bits are not recorded",
            "check inputs, scales and top-k weights",
        )
    return result
