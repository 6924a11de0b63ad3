# SPDX-License-Identifier: Apache-2.0
"""Which routes show their class: the twin computes each in a block of either class and compares the bits.

Most routes give the same bits in both, since a few of thousands of sums round differently. The published study chose
its pair from outputs too ("prior H0/H1 data"). A pair chosen this way says so; no prediction depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from numpy.typing import NDArray

from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan, exchange
from routeblock.route_block.cells import SURFACES
from routeblock.route_block.fixture import LayerFixture
from routeblock.route_block.lane_twin import unpack
from routeblock.route_block.operating_point import lane_facts, operating_point
from routeblock.twin.layer import combine, moe_layer

ROUNDS = 4  # of exchanges: a short second block then leaves some routes of the first untried

Shown = Mapping[int, frozenset[str]]


class Layer:
    """A fixture's layer on the twin at one operating point."""

    def __init__(self, fixture: LayerFixture, point: str, lane: str) -> None:
        self.fixture = fixture
        self.launches: Mapping[str, Launch] = operating_point(point, lane, fixture.spec).launches
        self.architecture = lane_facts(lane).architecture
        self.weights = {gemm: unpack(fixture, gemm) for gemm in ("w13", "w2")}

    def surfaces(self, plan: AlignedPlan) -> dict[str, NDArray[Any]]:
        """The four surfaces under a plan."""
        f = self.fixture
        return dict(
            moe_layer(
                f.hidden,
                f.topk_ids,
                f.topk_weights,
                self.weights["w13"],
                self.weights["w2"],
                f.compact(plan),
                architecture=self.architecture,
                w13_launch=self.launches["w13"],
                w2_launch=self.launches["w2"],
                group_size=f.spec["group_size"],
                expert_map=f.expert_rows,
            )
        )


def shown(layer: Layer, canonical: AlignedPlan, block_pairs: Sequence[tuple[int, int]]) -> Shown:
    """For each route of these block pairs (disjoint), the surfaces that change when it alone moves to the other block.

    A route that was not tried, or changes nothing, is not in it.
    """
    before = layer.surfaces(canonical)
    found: dict[int, frozenset[str]] = {}
    for exchanges in _rounds(canonical, block_pairs):
        plan = canonical
        for pair in exchanges:
            plan = exchange(plan, *pair)
        after = layer.surfaces(plan)
        for route in {r for pair in exchanges for r in pair} - found.keys():
            changed = _changed(before, after, route, canonical.num_routes // layer.fixture.hidden.shape[0])
            if changed:
                found[route] = changed
    return found


def _rounds(plan: AlignedPlan, block_pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Sets of exchanges, no route twice in one, until every route was in one of them or ROUNDS is reached."""
    todo = [(plan.members(a), plan.members(b)) for a, b in block_pairs]
    most = max((-(-len(one) // len(two)) for one, two in todo), default=0)
    for r in islice(range(most), ROUNDS):
        yield [
            (one[(i + r * len(two)) % len(one)], other) for one, two in todo for i, other in enumerate(two[: len(one)])
        ]


def _changed(
    before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]], route: int, top_k: int
) -> frozenset[str]:
    names = {s for s in SURFACES if s != "final" and before[s][route].tobytes() != after[s][route].tobytes()}
    token = route // top_k
    rows = before["w2"][token * top_k : (token + 1) * top_k].copy()
    rows[route % top_k] = after["w2"][route]
    if combine(rows[None])[0].tobytes() != before["final"][token].tobytes():
        names.add("final")
    return frozenset(names)
