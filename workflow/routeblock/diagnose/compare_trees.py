# SPDX-License-Identifier: Apache-2.0
"""Two summation trees of one element: where they part, what their roundings add up to, which roundings matter.

All of it is exact integer arithmetic (`summation_tree`), and every claim is recomputed before it is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from routeblock.diagnose.summation_tree import STEP, Element, Kind

PAIRS_AT_MOST = 80_000  # evaluations of pairs of roundings: a few seconds

Candidate = tuple[int | None, int | None]  # a rounding: its node in the first tree, in the second, or in both


@dataclass(frozen=True)
class Parting:
    """The first node, in order of K, at which two trees do not do the same on the same values: its index in each tree
    (None: the other tree has no such node).
    """

    first: int | None
    second: int | None


@dataclass(frozen=True)
class SmallestSet:
    """Roundings that, each replaced by the exact sum of its operands, make the two outputs equal.

    tried: sets of each size that were tried, by size. smallest: no smaller set does, all were tried; where it is False,
    no member can be left out alone. alike: how many sets of this size do, 0 where they were not all tried.
    """

    members: tuple[Candidate, ...]
    output: int
    tried: tuple[tuple[int, int], ...]
    smallest: bool
    alike: int


def _key(element: Element, index: int, step: int) -> tuple[Any, ...] | None:
    """What a node is called in both trees; None for the first half of a 16-deep step where only whole ones compare."""
    node = element.tree.nodes[index]
    if node.kind == Kind.STEP:
        return (node.kind, node.stop) if node.stop % step == 0 else None
    if node.kind == Kind.WARPS:
        return node.kind, node.first, node.stop, node.warp, element.tree.form.thread_k
    return (node.kind, node.stop) if node.kind == Kind.OUTPUT else (node.kind, node.first, node.stop)


@dataclass(frozen=True)
class _Effect:
    """Of one rounding carried exactly, in one tree: the nodes that change, those that were looked at, the output."""

    changed: frozenset[int]
    reads: frozenset[int]
    output: int

    def apart(self, other: _Effect) -> bool:
        """Whether the two do together what each does alone."""
        return (
            self.changed.isdisjoint(other.changed)
            and self.changed.isdisjoint(other.reads)
            and other.changed.isdisjoint(self.reads)
        )


def _effect(element: Element, node: int | None) -> _Effect:
    if node is None:
        return _Effect(frozenset(), frozenset(), element.output)
    reads: set[int] = set()
    changed = element.replaced({}, [node], reads)
    return _Effect(frozenset(changed), frozenset(reads), changed.get(len(element.tree.nodes) - 1, element.output))


class Comparison:
    """Two elements in one scale."""

    def __init__(self, first: Element, second: Element) -> None:
        if first.scale != second.scale:
            raise ValueError(f"elements in scales {first.scale} and {second.scale}")
        self.sides = first, second
        known: dict[Any, int] = {}
        shapes: dict[Any, int] = {}
        self.ids = [self._identities(e, known, with_values=True) for e in self.sides]
        self._shapes = [self._identities(e, shapes, with_values=False) for e in self.sides]

    @staticmethod
    def _identities(element: Element, known: dict[Any, int], *, with_values: bool) -> list[int]:
        """A number for every subtree: equal where the same is done, and with `with_values` on the same products."""
        found: list[int] = []
        form = element.tree.form
        for node in element.tree.nodes:
            key: tuple[Any, ...] = (node.kind, *(found[i] for i in node.operands))
            if node.kind == Kind.STEP:
                key += (node.first, node.stop, form.fraction_bits)
                if with_values:
                    a, w = (x[node.first : node.stop].tobytes() for x in (element.terms.a, element.terms.w))
                    key += (a, w)
            found.append(known.setdefault(key, len(known)))
        return found

    @property
    def same_shape(self) -> bool:
        """Whether both trees do the same operations on the same places of K."""
        return self._shapes[0][-1] == self._shapes[1][-1]

    @property
    def same_products(self) -> bool:
        """Whether both elements have the same operands."""
        first, second = (e.terms for e in self.sides)
        return first.a.tobytes() == second.a.tobytes() and first.w.tobytes() == second.w.tobytes()

    @property
    def same_output(self) -> bool:
        """Whether the rounded sums have equal bits."""
        return bool(self.sides[0].rounded().tobytes() == self.sides[1].rounded().tobytes())

    @cached_property
    def _step(self) -> int:
        """Products of the steps that compare: 16 where one tree takes them at once and the other in two groups."""
        return STEP if self.compares_whole_steps else self.sides[0].tree.form.group

    @property
    def compares_whole_steps(self) -> bool:
        """Whether one tree adds 16 products at once and the other in two groups."""
        return len({e.tree.form.group for e in self.sides}) > 1

    def _pairs(self) -> Iterator[tuple[int | None, int | None]]:
        """Nodes of the same name in both trees: steps by K, then the rest in the order of the trees."""
        names: list[dict[Any, int]] = []
        for element in self.sides:
            keys = {_key(element, i, self._step): i for i in range(len(element.tree.nodes))}
            names.append({k: i for k, i in keys.items() if k is not None})
        first, second = names
        steps = sorted(k for k in first.keys() & second.keys() if k[0] == Kind.STEP)
        rest = [k for k in (*first, *(k for k in second if k not in first)) if k[0] not in (Kind.STEP, Kind.OUTPUT)]
        for key in (*steps, *rest):
            yield first.get(key), second.get(key)

    def parting(self) -> Parting | None:
        """Where the trees part; None if they are the same on the same values, and so their outputs."""
        for a, b in self._pairs():
            if a is None or b is None or self.ids[0][a] != self.ids[1][b]:
                return Parting(a, b)
        if self.ids[0][-1] == self.ids[1][-1]:
            return None
        return Parting(len(self.ids[0]) - 1, len(self.ids[1]) - 1)

    def first_other_rounding(self) -> Parting | None:
        """The first addition at which what is rounded off differs: other errors, or in one tree alone and not exact."""
        for a, b in self._pairs():
            errors = [0 if i is None else e.addition(i).error for e, i in zip(self.sides, (a, b), strict=True)]
            if errors[0] != errors[1]:
                return Parting(a, b)
        return None

    def shared(self) -> dict[int, int]:
        """Nodes of the first tree that the second has too, with the same values below: first to second."""
        second = {identity: i for i, identity in enumerate(self.ids[1])}
        return {i: second[identity] for i, identity in enumerate(self.ids[0]) if identity in second}

    def candidates(self) -> list[Candidate]:
        """Every addition but the last rounding: shared ones once, then those of each tree. An addition that is exact
        here counts too: with other operands it may round.
        """
        shared = self.shared()
        taken = set(shared.values())
        nodes = [range(len(e.tree.nodes) - 1) for e in self.sides]
        every: list[Candidate] = [*shared.items()]
        every += [(i, None) for i in nodes[0] if i not in shared]
        every += [(None, j) for j in nodes[1] if j not in taken]
        last = len(self.ids[0]) - 1
        return [c for c in every if c[0] != last]

    def _error(self, candidate: Candidate) -> int:
        side = 0 if candidate[0] is not None else 1
        index = candidate[side]
        assert index is not None
        return self.sides[side].addition(index).error

    def outputs(self, chosen: Sequence[Candidate]) -> tuple[int, int]:
        """Both rounded sums when some roundings are replaced by exact sums."""
        found = []
        for side, element in enumerate(self.sides):
            nodes = [c[side] for c in chosen if c[side] is not None]
            found.append(element.replaced({}, [n for n in nodes if n is not None]).get(len(self.ids[side]) - 1))
        return (
            self.sides[0].output if found[0] is None else found[0],
            self.sides[1].output if found[1] is None else found[1],
        )

    def ledger(self) -> tuple[int, int, int]:
        """Sums of the errors of shared additions, of those of the first tree alone, of those of the second alone."""
        sums = [0, 0, 0]
        for candidate in self.candidates():
            side = 0 if None not in candidate else 1 if candidate[0] is not None else 2
            sums[side] += self._error(candidate)
        return sums[0], sums[1], sums[2]

    def smallest_set(self) -> SmallestSet:
        """A smallest set of roundings without which the outputs are equal; both elements have the same products.

        Sets of one and of two are all tried (of two only while they are at most PAIRS_AT_MOST). Beyond that: the
        smallest of a few sets from which no member can be left out.
        """
        if not self.same_products:
            raise ValueError("roundings alone do not make elements of other operands equal")
        candidates = self.candidates()
        tried: list[tuple[int, int]] = []
        for size, total in ((1, len(candidates)), (2, len(candidates) * (len(candidates) - 1) // 2)):
            if size == 2 and total > PAIRS_AT_MOST:
                break
            found = self._sets_of_one(candidates) if size == 1 else self._sets_of_two(candidates)
            tried.append((size, total))
            if found:
                return SmallestSet(found[0], self.outputs(found[0])[0], tuple(tried), True, len(found))
        best = min((self._pruned(start) for start in self._starts(candidates)), key=len)
        best.sort(key=candidates.index)
        smallest = len(best) == tried[-1][0] + 1  # every smaller size was tried in full
        return SmallestSet(tuple(best), self.outputs(best)[0], tuple(tried), smallest, 0)

    def _starts(self, candidates: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        """Sets that make the outputs equal, to take members from: all, and of each tree the errors that hold its sum
        back from the other's, the largest first, until they suffice.
        """
        yield list(candidates)
        totals = [e.total for e in self.sides]
        for side in range(2):
            up = totals[1 - side] > totals[side]
            own = [c for c in candidates if c[1 - side] is None and (self._error(c) < 0) == up]
            own.sort(key=lambda c: -abs(self._error(c)))
            for count in range(1, len(own) + 1):
                first, second = self.outputs(own[:count])
                if first == second:
                    yield own[:count]
                    break

    def _pruned(self, start: Sequence[Candidate]) -> list[Candidate]:
        """A subset that makes the outputs equal and loses that with any one member."""
        chosen = sorted(start, key=lambda c: abs(self._error(c)))
        for candidate in tuple(chosen):
            without = [c for c in chosen if c != candidate]
            first, second = self.outputs(without)
            if first == second:
                chosen = without
        return chosen if len(chosen) == len(start) else self._pruned(chosen)

    def _sets_of_one(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, ...]]:
        return [(c,) for c in candidates if len(set(self.outputs([c]))) == 1]

    def _sets_of_two(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, ...]]:
        """Where neither of two roundings reads what the other changes, each does what it does alone, and at most one
        of them reaches the output; only the others are recomputed together.
        """
        found: list[tuple[Candidate, ...]] = []
        effects = {c: [_effect(e, c[side]) for side, e in enumerate(self.sides)] for c in candidates}
        for a, b in combinations(candidates, 2):
            outputs = []
            for side, element in enumerate(self.sides):
                one, other = effects[a][side], effects[b][side]
                if one.apart(other):
                    outputs.append(other.output if one.output == element.output else one.output)
                else:
                    outputs.append(self.outputs([a, b])[side])
            if outputs[0] == outputs[1]:
                found.append((a, b))
        return found

    def operand_nodes(self) -> list[int]:
        """In trees of one shape: the nodes whose own products differ."""
        first, second = (e.terms for e in self.sides)
        differs = (first.a != second.a) | (first.w != second.w)
        nodes = enumerate(self.sides[0].tree.nodes)
        return [i for i, n in nodes if n.kind == Kind.STEP and differs[n.first : n.stop].any()]

    def with_results_of_the_first(self, nodes: Sequence[int]) -> int:
        """The second tree's rounded sum when these nodes' results are those of the first, trees of one shape."""
        given = {i: self.sides[0].values[i] for i in nodes}
        return self.sides[1].replaced(given).get(len(self.ids[1]) - 1, self.sides[1].output)
