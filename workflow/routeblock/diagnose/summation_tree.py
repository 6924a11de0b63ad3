# SPDX-License-Identifier: Apache-2.0
"""The additions that make one element of the packed MoE GEMM, as a tree, evaluated in exact integers.

Every value is an integer in units of 2^-scale, the last bit that any product of the element has: no sum, cut or
rounding of the kernel makes a lower one. So each addition's exact sum, what it cuts off and its result are at hand, and
an addition can be carried exactly to see what its rounding did. The twin's own arithmetic is floating point; tests hold
the two against each other on bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.moe.partition import Partition
from routeblock.twin.tensor_core import OperandType, TensorCore

SINGLE_BITS, SINGLE_LAST = 24, -149  # float32: bits of a significand, exponent of the last bit of a subnormal
STEP = 16  # products of one m16n8k16 instruction


class Kind(StrEnum):
    """What an inner node of the tree adds or rounds."""

    STEP = "tensor-core step"
    WARPS = "addition of warps"
    SLICES = "addition of slices"
    BETWEEN = "rounding between slices"
    OUTPUT = "rounding to the output dtype"


@dataclass(frozen=True)
class Form:
    """All that decides the order and the roundings of an element's additions: elements of equal operands and equal
    forms have equal bits.

    slices: (first K-tile, one past the last), ascending; group and fraction_bits are the tensor core's L and F;
    rounds_between: sums of slices are rounded to the output dtype (never set with one slice, where nothing is).
    """

    thread_k: int
    slices: tuple[tuple[int, int], ...]
    group: int
    fraction_bits: int
    rounds_between: bool = False

    @property
    def warps(self) -> int:
        """Warps along K of a thread block."""
        return self.thread_k // 32


def form_of(
    cut: Partition, block: int, column: int, thread_k: int, thread_n: int, core: TensorCore, fp32: bool
) -> Form:
    """The form of the elements of a block at a column."""
    slices = tuple(cut.slices(block, column // thread_n))
    return Form(thread_k, slices, core.group, core.fraction_bits, not fp32 and len(slices) > 1)


@dataclass(frozen=True)
class Node:
    """One addition or rounding. `operands` are earlier nodes; a step that has none starts from zero.

    A step adds the products [first, stop) of K to its operand; for others [first, stop) is the K that they sum over.
    """

    kind: Kind
    operands: tuple[int, ...]
    first: int
    stop: int
    slice: int
    warp: int | None = None


@dataclass(frozen=True)
class SummationTree:
    """Nodes in an order in which operands come first: slices ascend, in each its steps by K, then its warps; then the
    sums of slices, from the largest k down; last the rounding to the output dtype.
    """

    form: Form
    nodes: tuple[Node, ...]

    @cached_property
    def parent(self) -> tuple[int, ...]:
        """The node that takes each node's result; -1 for the root."""
        parents = [-1] * len(self.nodes)
        for index, node in enumerate(self.nodes):
            for operand in node.operands:
                parents[operand] = index
        return tuple(parents)


def build(form: Form) -> SummationTree:
    """The tree of a form."""
    nodes: list[Node] = []

    def add(*node: Any) -> int:
        nodes.append(Node(*node))
        return len(nodes) - 1

    sums = []
    for number, (start, stop) in enumerate(form.slices):
        span = start * form.thread_k, stop * form.thread_k
        chains: dict[int, int] = {}
        for k0 in range(*span, STEP):
            warp = k0 % form.thread_k // (2 * STEP)
            for first in range(k0, k0 + STEP, form.group):
                before = (chains[warp],) if warp in chains else ()
                chains[warp] = add(Kind.STEP, before, first, first + form.group, number, warp)
        # w0 + w1, or w0 + (w1 + (w3 + w2)): operands as the kernel adds them, left then right.
        order = [*range(form.warps - 2), form.warps - 1, form.warps - 2] if form.warps > 2 else [0, 1]
        total = chains[order[-1]]
        for warp in order[-2::-1]:
            total = add(Kind.WARPS, (chains[warp], total), *span, number, warp)
        sums.append(total)
    total, end = sums[-1], form.slices[-1][1] * form.thread_k
    for number in range(len(sums) - 1, -1, -1):
        span = form.slices[number][0] * form.thread_k, end
        if number < len(sums) - 1:
            total = add(Kind.SLICES, (total, sums[number]), *span, number)
        if form.rounds_between and number > 0:
            total = add(Kind.BETWEEN, (total,), *span, number)
    add(Kind.OUTPUT, (total,), 0, end, 0)
    return SummationTree(form, tuple(nodes))


@dataclass(frozen=True)
class Terms:
    """The operands of one element: a row of A and a column of the rounded weights, float32 [K] that hold the 16-bit
    format `operand`.
    """

    a: NDArray[np.float32]
    w: NDArray[np.float32]
    operand: OperandType

    @cached_property
    def _parts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of every product: an integer and the exponent of its unit, trailing zeros taken off."""
        significands, exponents = np.ones(self.a.size, np.int64), np.zeros(self.a.size, np.int64)
        for x in (self.a, self.w):
            m, e = np.frexp(x.astype(np.float64))
            significands *= (m * 2.0**11).astype(np.int64)  # float16 has 11 bits, bfloat16 8
            exponents += e - 11
        zeros = np.zeros_like(significands)
        live = significands != 0
        lowest = (significands & -significands)[live]
        zeros[live] = np.round(np.log2(lowest.astype(np.float64))).astype(np.int64)
        return significands >> zeros, exponents + zeros

    @cached_property
    def scale(self) -> int:
        """Products are multiples of 2^-scale."""
        significands, exponents = self._parts
        live = significands != 0
        return max(0, -int(exponents[live].min())) if live.any() else 0

    @cached_property
    def exponent(self) -> list[int | None]:
        """The exponent that the tensor core takes for each product; None for a zero operand."""
        ends = []
        for x in (self.a, self.w):
            ends.append(np.maximum(np.frexp(x.astype(np.float64))[1] - 1, self.operand.min_exponent))
        total = ends[0] + ends[1]
        live = (self.a != 0) & (self.w != 0)
        return [int(e) if on else None for e, on in zip(total, live, strict=True)]

    def products(self, scale: int) -> list[int]:
        """Every product in units of 2^-scale."""
        significands, exponents = self._parts
        return [int(m) << (int(e) + scale) if m else 0 for m, e in zip(significands, exponents, strict=True)]


def cut_toward_zero(value: int, shift: int) -> int:
    """`value` to a multiple of 2^shift, toward zero."""
    if shift <= 0:
        return value
    magnitude = abs(value) >> shift << shift
    return magnitude if value >= 0 else -magnitude


def _last_bit(value: int, scale: int, bits: int, last: int) -> int:
    """Of a nonzero value: how far above 2^-scale the last bit lies that a format keeps."""
    return max(abs(value).bit_length() - bits, last + scale)


def toward_zero(value: int, scale: int) -> int:
    """`value` to float32, toward zero."""
    return cut_toward_zero(value, _last_bit(value, scale, SINGLE_BITS, SINGLE_LAST)) if value else 0


def to_nearest(value: int, scale: int, bits: int = SINGLE_BITS, last: int = SINGLE_LAST) -> int:
    """`value` to a format of `bits` bits whose subnormals end at 2^last: to nearest, ties to even."""
    shift = _last_bit(value, scale, bits, last) if value else 0
    if shift <= 0:
        return value
    magnitude, rest = divmod(abs(value), 1 << shift)
    half = 1 << (shift - 1)
    if rest > half or (rest == half and magnitude & 1):
        magnitude += 1
    return (magnitude if value >= 0 else -magnitude) << shift


def as_number(value: int, scale: int) -> float:
    """The nearest float64 of a value in units of 2^-scale."""
    return value / (1 << scale)


@dataclass(frozen=True)
class Addition:
    """One node in numbers, integers in units of 2^-scale: operands (of a step: its accumulator), the exact sum of
    operands and products, what the operation makes of it.

    unit: the exponent of the multiples to which a tensor-core step cuts its terms; None for other nodes and where all
    terms are zero.
    """

    operands: tuple[int, ...]
    exact: int
    result: int
    unit: int | None

    @property
    def error(self) -> int:
        """Result minus exact sum."""
        return self.result - self.exact


class Element:
    """Terms and their tree: values of all nodes, and what becomes of them when some are replaced."""

    def __init__(self, tree: SummationTree, terms: Terms, scale: int | None = None) -> None:
        if tree.nodes[-1].stop != terms.a.size:
            raise ValueError(f"a tree over {tree.nodes[-1].stop} products and {terms.a.size} terms")
        self.tree, self.terms = tree, terms
        self.scale = terms.scale if scale is None else scale
        self._products = terms.products(self.scale)
        self._tops = terms.exponent
        operand = terms.operand
        self._bits = SINGLE_BITS - operand.dropped_bits
        self._last = operand.min_exponent - self._bits + 1
        self._cuts: dict[tuple[int, int], int] = {}
        self.values: list[int] = []
        for index in range(len(tree.nodes)):
            self.values.append(self._result(index, self.values)[0])

    @cached_property
    def _group_tops(self) -> dict[int, int | None]:
        """Of every step: the largest exponent among its products; None where all are zero."""
        steps = [(i, n) for i, n in enumerate(self.tree.nodes) if n.kind == Kind.STEP]
        return {i: max((e for e in self._tops[n.first : n.stop] if e is not None), default=None) for i, n in steps}

    def _exact(self, index: int, values: Sequence[int] | Mapping[int, int]) -> int:
        node = self.tree.nodes[index]
        total = sum(values[i] for i in node.operands)
        return total + sum(self._products[node.first : node.stop]) if node.kind == Kind.STEP else total

    def _result(self, index: int, values: Sequence[int] | Mapping[int, int]) -> tuple[int, int | None]:
        """The value of a node, and the exponent of the unit to which a step cuts."""
        node = self.tree.nodes[index]
        if node.kind != Kind.STEP:
            exact = sum(values[i] for i in node.operands)
            if node.kind in (Kind.WARPS, Kind.SLICES):
                result = to_nearest(exact, self.scale)
            else:
                result = to_nearest(exact, self.scale, self._bits, self._last)
            return result, None
        accumulator = values[node.operands[0]] if node.operands else 0
        top = self._group_tops[index]
        if accumulator:
            own = max(abs(accumulator).bit_length() - 1 - self.scale, -126)
            top = own if top is None else max(top, own)
        if top is None:
            return 0, None
        unit = top - self.tree.form.fraction_bits
        shift = unit + self.scale
        key = node.first, max(shift, 0)
        if key not in self._cuts:
            self._cuts[key] = sum(cut_toward_zero(p, shift) for p in self._products[node.first : node.stop])
        total = self._cuts[key] + cut_toward_zero(accumulator, shift)
        return toward_zero(total, self.scale), unit

    def addition(self, index: int) -> Addition:
        """A node in numbers."""
        result, unit = self._result(index, self.values)
        operands = tuple(self.values[i] for i in self.tree.nodes[index].operands)
        return Addition(operands, self._exact(index, self.values), result, unit)

    @property
    def total(self) -> int:
        """The float32 sum that is rounded to the output dtype."""
        return self.values[self.tree.nodes[-1].operands[0]]

    @property
    def output(self) -> int:
        """The rounded sum, before any column scale or top-k weight."""
        return self.values[-1]

    def rounded(self) -> NDArray[Any]:
        """The rounded sum in the output dtype, one element."""
        value = np.array([as_number(self.output, self.scale)]).astype(self.terms.operand.dtype)
        return -value if self.output == 0 and self._is_negative_zero(len(self.tree.nodes) - 1) else value

    def _is_negative_zero(self, index: int) -> bool:
        """A zero keeps the sign of what was cut to it, and of its operands if all of them are such zeros."""
        operands = self.tree.nodes[index].operands
        exact = self._exact(index, self.values)
        if self.values[index] or exact > 0:
            return False
        added = self.tree.nodes[index].kind != Kind.STEP
        return exact < 0 or (added and all(not self.values[i] and self._is_negative_zero(i) for i in operands))

    def replaced(
        self, given: Mapping[int, int], exact: Iterable[int] = (), reads: set[int] | None = None
    ) -> dict[int, int]:
        """New values of every node that changes when some results are given, or are the exact sums of their operands
        (`exact`); a node's later operands see what came before. `reads` gets the nodes whose values were looked at.
        """
        carried = set(exact)
        new = _Overlay(self.values)
        waiting = [*carried, *given]
        heapify(waiting)
        done = -1
        while waiting:
            index = heappop(waiting)
            if index == done:
                continue
            done = index
            if reads is not None:
                reads.update(self.tree.nodes[index].operands)
            if index in given:
                value = given[index]
            elif index in carried:
                value = self._exact(index, new)
            else:
                value = self._result(index, new)[0]
            if value != self.values[index]:
                new[index] = value
                if self.tree.parent[index] >= 0:
                    heappush(waiting, self.tree.parent[index])
        return dict(new)


class _Overlay(dict[int, int]):
    def __init__(self, below: Sequence[int]) -> None:
        super().__init__()
        self._below = below

    def __missing__(self, index: int) -> int:
        return self._below[index]


def common_scale(*terms: Terms) -> int:
    """A scale in which the values of several elements are integers."""
    return max(t.scale for t in terms)


def overflows(element: Element) -> bool:
    """Whether the sum is beyond the output dtype."""
    return bool(abs(np.ldexp(float(element.output), -element.scale)) > element.terms.operand.largest)


def refuse_overflow(element: Element, where: str) -> None:
    """InputError for an element that the dtype does not hold: there is no rounding to speak about."""
    if overflows(element):
        raise InputError(
            "the sum is beyond the output dtype",
            where=where,
            limit=f"sums up to {element.terms.operand.largest:.5g}",
            way_out="choose another element",
        )
