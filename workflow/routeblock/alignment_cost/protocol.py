# SPDX-License-Identifier: Apache-2.0
"""The committed protocol: what is timed at which points, in which order, and when a repetition counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from routeblock.cuda.telemetry import CLOCK_EVENTS
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_json
from routeblock.moe.routing import block_size_for


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


class Reason(StrEnum):
    """Why a repetition was rejected."""

    THROTTLED = "throttled"
    OTHER_PROCESS = "other_process"
    LATE = "late"
    INCORRECT = "incorrect"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def _known_event(name: str) -> str:
    if name not in CLOCK_EVENTS:
        raise ValueError(f"{name!r} is none of {', '.join(CLOCK_EVENTS)}")
    return name


class Build(_Strict):
    vllm: str
    extension_sha256: str


class Series(_Strict):
    """One side of a comparison: a name of its own, so that an arm can stand beside itself."""

    name: str
    arm: Arm


class Points(_Strict):
    role: Role
    experts: Count
    top_k: Count
    tokens: tuple[Count, ...]
    repetitions: Count
    calls: Count | None = None
    pause_ms: Natural = 0


class Calls(_Strict):
    graph: Count
    stream: Count


class OperatorPlan(_Strict):
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


class Bootstrap(_Strict):
    seed: Seed
    resamples: Count
    confidence: Annotated[float, Field(gt=0, lt=1)]


class Margins(_Strict):
    operator: float
    layer: float


class Target(_Strict):
    """`ratio` bounds the median ratio to the baseline at points of up to so many tokens; the first that fits counts."""

    campaign: Campaign
    role: Role
    mode: Mode
    series: str
    up_to_tokens: Count
    ratio: float


class Acceptance(_Strict):
    attempts: Count
    extra_repetitions: Natural
    pause_ms: Natural
    throttle_reasons: tuple[Annotated[str, AfterValidator(_known_event)], ...]
    reject: dict[Reason, str]
    rule: str


class Protocol(_Strict):
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

    def digest(self) -> str:
        """SHA-256 of the canonical JSON: what a record carries."""
        return sha256_json(self.model_dump(mode="json"))

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


def ordered(series: tuple[Series, ...], repetition: int) -> tuple[Series, ...]:
    """The order of series in one repetition: after 2n repetitions of n series each has stood in each place twice."""
    start = repetition // 2 % len(series)
    order = series[start:] + series[:start]
    return order[::-1] if repetition % 2 else order


def load(path: Path) -> Protocol:
    """Read a protocol. Raises InputError if it cannot be read, has unknown keys, or a series that does not exist."""
    try:
        protocol = Protocol.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as e:
        detail = e.errors()[0] if isinstance(e, ValidationError) else None
        what = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" if detail else str(e)
        raise _refuse(f"not a protocol: {what}", path, "the fields of Protocol and no others are allowed") from e
    names = [s.name for s in protocol.series]
    for name in (protocol.baseline, protocol.floor, *(t.series for t in protocol.targets)):
        if names.count(name) != 1:
            raise _refuse(f"series {name!r} is there {names.count(name)} times", path, f"series are {', '.join(names)}")
    return protocol


def _refuse(what: str, path: Path, limit: str) -> InputError:
    return InputError(what, where=str(path), limit=limit, way_out="start from fixtures/protocols/alignment_cost.json")
