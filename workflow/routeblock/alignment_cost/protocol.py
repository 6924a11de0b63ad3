# SPDX-License-Identifier: Apache-2.0
"""The committed protocol: what is timed at which points, in which order, and when a repetition counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from routeblock.moe.routing import block_size_for
from routeblock.timing import protocol as timing
from routeblock.timing.protocol import Bootstrap, Count, Natural, Seed, Strict, Whole, each_once, read


class Arm(StrEnum):
    """Who aligns."""

    NATIVE = "native"
    CANONICAL = "canonical"
    SORT = "sort"
    FULL_K = "full_k"


class Campaign(StrEnum):
    """What is timed: the alignment alone, or the layer around it."""

    OPERATOR = "operator"
    LAYER = "layer"


class Mode(StrEnum):
    """How calls reach the device, and whose clock is read."""

    GRAPH = "graph"
    STREAM = "stream"
    HOST = "host"


class Role(StrEnum):
    """Whether the targets bind at a point."""

    BOUND = "bound"
    REPORTED = "reported"


class Build(Strict):
    vllm: str
    extension_sha256: str


class Series(Strict):
    """One side of a comparison: a name of its own, so that an arm can stand beside itself."""

    name: str
    arm: Arm


class Points(Strict):
    role: Role
    experts: Count
    top_k: Count
    tokens: tuple[Count, ...]
    repetitions: Count
    calls: Count | None = None
    pause_ms: Natural = 0


class Calls(Strict):
    graph: Count
    stream: Count


class OperatorPlan(Strict):
    points: tuple[Points, ...]
    routings: Count
    calls: Calls


class LayerPlan(OperatorPlan):
    """`group_size` rows of K share a scale and a zero point."""

    hidden: Count
    intermediate: Count
    group_size: Count
    dtype: Literal["float16"]
    stages: str


class Margins(Strict):
    operator: float
    layer: float


class Target(Strict):
    """`ratio` bounds the median ratio to the baseline at points of up to so many tokens; the first that fits counts."""

    campaign: Campaign
    role: Role
    mode: Mode
    series: str
    up_to_tokens: Count
    ratio: float


class Acceptance(timing.Acceptance):
    extra_repetitions: Natural
    pause_ms: Natural

    @property
    def rest_s(self) -> float:
        return self.pause_ms / 1000

    @property
    def retries(self) -> int | None:
        return self.extra_repetitions


class Protocol(Whole):
    """The whole protocol; see fixtures/protocols/alignment_cost.json for what its words mean."""

    name: Literal["alignment_cost"]
    version: int
    builds: tuple[Build, ...]
    arms: dict[Arm, str]
    series: tuple[Series, ...]
    baseline: str
    floor: str
    order: str
    seed: Seed
    operator: OperatorPlan
    layer: LayerPlan
    modes: dict[Mode, str]
    warmups: Count
    statistic: str
    bootstrap: Bootstrap
    minimum_pairs: float
    margins: Margins
    verdicts: dict[str, str]
    targets: tuple[Target, ...]
    acceptance: Acceptance

    def plan(self, campaign: Campaign) -> OperatorPlan:
        return self.layer if campaign is Campaign.LAYER else self.operator


@dataclass(frozen=True)
class Point:
    """One operating point of a campaign. calls: of a batch, by mode."""

    campaign: Campaign
    role: Role
    experts: int
    top_k: int
    tokens: int
    repetitions: int
    graph_calls: int
    stream_calls: int
    routings: int
    pause_ms: int

    @property
    def block_size(self) -> int:
        """The one that vLLM's Marlin path takes."""
        return block_size_for(self.tokens, self.top_k, self.experts)

    @property
    def label(self) -> str:
        return f"{self.campaign} E={self.experts} k={self.top_k} M={self.tokens}"


def points(protocol: Protocol, campaign: Campaign) -> Iterator[Point]:
    """The points of a campaign, in the protocol's order."""
    plan = protocol.plan(campaign)
    for group in plan.points:
        for tokens in group.tokens:
            yield Point(
                campaign,
                group.role,
                group.experts,
                group.top_k,
                tokens,
                group.repetitions,
                group.calls or plan.calls.graph,
                group.calls or plan.calls.stream,
                plan.routings,
                group.pause_ms,
            )


def planned(protocol: Protocol) -> list[Point]:
    """All points in the order of timing: those that the targets bind first, the operator before the layer."""
    every = [*points(protocol, Campaign.OPERATOR), *points(protocol, Campaign.LAYER)]
    return [p for p in every if p.role is Role.BOUND] + [p for p in every if p.role is not Role.BOUND]


def load(path: Path) -> Protocol:
    """Read a protocol. Raises InputError if it cannot be read, has unknown keys, or a series that does not exist."""
    protocol = read(path, Protocol, "alignment_cost")
    named = (protocol.baseline, protocol.floor, *(t.series for t in protocol.targets))
    each_once([s.name for s in protocol.series], named, path, "alignment_cost")
    return protocol
