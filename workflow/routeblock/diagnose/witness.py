# SPDX-License-Identifier: Apache-2.0
"""The smallest change of a plan that changes bits, or a proof that no legal plan changes them.

A legal plan may put a route into any block of its expert, and a row's bits depend on the form of its block alone. So
the classes of a route are the distinct forms of its expert's blocks; with each of them visited, every legal plan is.
The smallest change is one exchange: blocks keep their sizes, so no single route can move alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.layer_run import LayerInputs, Run, Setting, bits
from routeblock.diagnose.rows import Row, Rows
from routeblock.errors import InputError
from routeblock.moe.routing import AlignedPlan, exchange
from routeblock.twin.layer import SURFACES

COMBINATIONS_AT_MOST = 1 << 20  # of the classes of one token's routes

Element = tuple[int, int]  # row, column
Pair = tuple[int, int]


@dataclass(frozen=True)
class Witness:
    """What was searched and found.

    exchanges: pairs of routes that stand in different blocks of one expert; class_changing: those that change the form
    of a route that is looked at; changing: those that change the surface or element. pairs: the smallest witness, empty
    if none; changed: the elements that it changes, by surface, computed over the whole layer. classes: (route, form)
    visited beside the plan's own; combinations: of classes of one token's routes, for `final`. complete: everything was
    visited, so that without a witness no legal plan changes it.
    """

    surface: str
    element: Element | None
    exchanges: int
    class_changing: int
    changing: int
    pairs: tuple[Pair, ...]
    changed: Mapping[str, int]
    classes: int
    combinations: int
    complete: bool


class _Search:
    def __init__(
        self, inputs: LayerInputs, plan: AlignedPlan, settings: Mapping[str, Setting], surface: str,
        element: Element | None,
    ) -> None:  # fmt: skip
        self.inputs, self.plan, self.settings = inputs, plan, settings
        self.surface, self.element = surface, element
        self.routed_surface = "w2" if surface == "final" else surface
        self.rows = Rows(inputs)
        self.owner = plan.block_of()
        self.keys = self.rows.keys(self.routed_surface, plan, settings)
        self.blocks: dict[int, list[int]] = {}
        for block in range(plan.num_blocks):
            self.blocks.setdefault(int(plan.expert_ids[block]), []).append(block)
        self.combinations = 0
        self.complete = True

    def siblings(self, route: int) -> list[int]:
        """The blocks of the route's expert."""
        return self.blocks[int(self.plan.expert_ids[self.owner[route]])]

    def routes(self) -> list[int]:
        """The routes whose class can touch what is asked, ascending."""
        if self.element is None:
            return [r for r in range(self.plan.num_routes) if self.owner[r] >= 0]
        row, k = self.element[0], self.inputs.top_k
        every = range(row * k, (row + 1) * k) if self.surface == "final" else (row,)
        return [r for r in every if self.owner[r] >= 0]

    def classes(self, route: int) -> dict[tuple[int, ...], int]:
        """The forms that the route can take beside its own, each with the lowest block that has it."""
        own = self.keys[self.owner[route]]
        found: dict[tuple[int, ...], int] = {}
        for block in self.siblings(route):
            if self.keys[block] != own:
                found.setdefault(self.keys[block], block)
        return found

    def differs(self, first: Row, second: Row) -> bool:
        """Whether two rows differ in what is asked."""
        words = bits(first) != bits(second)
        return bool(words.any() if self.element is None else words[self.element[1]])

    def final(self, token: int, moved: Mapping[int, int]) -> Row:
        """The row of a token with some of its routes in other blocks."""
        k = self.inputs.top_k
        blocks = [moved.get(r, int(self.owner[r])) for r in range(token * k, (token + 1) * k)]
        return self.rows.final(self.plan, self.settings, token, blocks)

    def visit(self, classes: Mapping[int, Mapping[tuple[int, ...], int]]) -> set[tuple[int, tuple[int, ...]]]:
        """The (route, form) that change what is asked, each alone."""
        places = [(r, b) for r, found in classes.items() for b in (int(self.owner[r]), *found.values())]
        values = dict(zip(places, self.rows.routed(self.routed_surface, self.plan, self.settings, places), strict=True))
        changing = set()
        for route, found in classes.items():
            token = route // self.inputs.top_k
            for key, block in found.items():
                before, after = values[route, int(self.owner[route])], values[route, block]
                if self.surface == "final" and self.differs_anywhere(before, after):
                    before, after = self.final(token, {}), self.final(token, {route: block})
                if self.differs(before, after):
                    changing.add((route, key))
        return changing

    @staticmethod
    def differs_anywhere(first: Row, second: Row) -> bool:
        """Whether a bit differs."""
        return bool((bits(first) != bits(second)).any())

    def together(self, classes: Mapping[int, Mapping[tuple[int, ...], int]]) -> dict[int, int]:
        """The fewest routes of one token that change its final row together, each with its block; empty if none do."""
        best: dict[int, int] = {}
        k = self.inputs.top_k
        for token in sorted({r // k for r in classes}):
            routes = [r for r in range(token * k, (token + 1) * k) if classes.get(r)]
            choices = [[-1, *classes[r].values()] for r in routes]
            count = int(np.prod([len(c) for c in choices], dtype=np.float64))
            if count > COMBINATIONS_AT_MOST:
                self.complete = False
                continue
            before = self.final(token, {})
            for chosen in sorted(product(*choices), key=lambda c: sum(b >= 0 for b in c)):
                moved = {r: b for r, b in zip(routes, chosen, strict=True) if b >= 0}
                if len(moved) < 2:
                    continue
                if best and len(moved) >= len(best):
                    break
                self.combinations += 1
                if self.differs(before, self.final(token, moved)):
                    best = moved
        return best


def witness(
    inputs: LayerInputs,
    plan: AlignedPlan,
    settings: Mapping[str, Setting],
    surface: str,
    element: Element | None = None,
) -> Witness:
    """Search all classes for the smallest change of `plan` that changes a surface, or one element (row, column) of it.

    `plan` names experts by their rows in the weights. Raises InputError for an unknown surface or element.
    """
    _check(inputs, surface, element)
    search = _Search(inputs, plan, settings, surface, element)
    looked_at = search.routes()
    classes = {r: search.classes(r) for r in looked_at}
    classes = {r: found for r, found in classes.items() if found}
    changing = search.visit(classes)
    exchanges, class_changing, witnesses = 0, 0, []
    for first, second in _pairs(search, looked_at):
        exchanges += 1
        moves = [(first, search.keys[search.owner[second]]), (second, search.keys[search.owner[first]])]
        class_changing += any(r in classes and key in classes[r] for r, key in moves)
        if any(move in changing for move in moves):
            witnesses.append((first, second))
    pairs: tuple[Pair, ...] = (min(witnesses),) if witnesses else ()
    if not pairs and surface == "final":
        pairs = _exchanges(plan, search.together(classes))
    changed = _changed(inputs, plan, settings, pairs)
    if pairs:
        where = changed[surface] if element is None else changed[surface][element[0] : element[0] + 1, element[1]]
        if not where.any():
            raise AssertionError(f"exchange {pairs} does not change {surface}: the classes are wrong")
    return Witness(
        surface, element, exchanges, class_changing, len(witnesses), pairs,
        {name: int(found.sum()) for name, found in changed.items()}, sum(map(len, classes.values())),
        search.combinations, search.complete,
    )  # fmt: skip


def _pairs(search: _Search, looked_at: Sequence[int]) -> list[Pair]:
    """Every exchange that moves a route that is looked at, once."""
    members = {block: search.plan.members(block) for block in range(search.plan.num_blocks)}
    found = set()
    for route in looked_at:
        for block in search.siblings(route):
            if block != search.owner[route]:
                found |= {(min(route, other), max(route, other)) for other in members[block]}
    return sorted(found)


def _exchanges(plan: AlignedPlan, moved: Mapping[int, int]) -> tuple[Pair, ...]:
    """For each moved route an exchange with the lowest route of its new block."""
    return tuple((route, plan.members(block)[0]) for route, block in moved.items())


def _changed(
    inputs: LayerInputs, plan: AlignedPlan, settings: Mapping[str, Setting], pairs: Sequence[Pair]
) -> dict[str, NDArray[np.bool_]]:
    """Which elements of each surface the exchanges change, by computing the whole layer under both plans."""
    if not pairs:
        return {}
    edited = plan
    for first, second in pairs:
        edited = exchange(edited, first, second)
    before, after = Run("plan", inputs, plan, settings), Run("edited", inputs, edited, settings)
    return {name: bits(before.surfaces[name]) != bits(after.surfaces[name]) for name in SURFACES}


def _check(inputs: LayerInputs, surface: str, element: Element | None) -> None:
    ids = np.sort(inputs.topk_ids, axis=1)
    if surface == "final" and (ids[:, 1:] == ids[:, :-1]).any():
        raise InputError(
            f"token {int(np.argwhere(ids[:, 1:] == ids[:, :-1])[0][0])} names an expert twice",
            where="witness",
            limit="the routes of a token move independently only where their experts differ",
            way_out="ask about w2",
        )
    if surface not in SURFACES:
        raise InputError(f"surface {surface!r}", where="witness", limit=", ".join(SURFACES), way_out="name one of them")
    if element is None:
        return
    rows = int(inputs.topk_ids.shape[0]) if surface == "final" else inputs.topk_ids.size
    width: dict[str, int] = {"w13": inputs.weights["w13"].q.shape[2], "activation": inputs.weights["w2"].q.shape[1]}
    columns = width.get(surface, int(inputs.weights["w2"].q.shape[2]))
    if not (0 <= element[0] < rows and 0 <= element[1] < columns):
        raise InputError(
            f"element {element[0]}:{element[1]} of {surface}",
            where="witness",
            limit=f"rows 0 to {rows - 1}, columns 0 to {columns - 1}",
            way_out="name an element that exists",
        )


def document(found: Witness, plan: AlignedPlan) -> dict[str, Any]:
    """The witness as JSON."""
    return {
        "surface": found.surface,
        "element": None if found.element is None else list(found.element),
        "plan": plan.fingerprint(),
        "exchanges": found.exchanges,
        "exchanges_that_change_a_class": found.class_changing,
        "exchanges_that_change_it": found.changing,
        "classes_visited": found.classes,
        "combinations_visited": found.combinations,
        "witness": [list(pair) for pair in found.pairs],
        "elements_changed": dict(found.changed),
        "complete": found.complete,
        "minimality": minimality(found),
    }


def minimality(found: Witness) -> str:
    """What is proven about the size of the witness, or about there being none."""
    if len(found.pairs) == 1:
        return "smallest: blocks keep their sizes, so no change of members is smaller than one exchange"
    if found.pairs:
        short = "" if found.complete else " among the tokens whose combinations were all visited"
        return f"smallest: no single exchange changes it; {len(found.pairs)} of one token's routes have to move{short}"
    if not found.complete:
        return "no single exchange changes it; combinations of a token's routes were too many to visit all"
    return "no legal plan changes it: every class of every route was visited" + (
        ", in every combination of one token's routes" if found.surface == "final" else ""
    )
