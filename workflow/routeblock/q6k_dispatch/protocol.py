# SPDX-License-Identifier: Apache-2.0
"""The committed protocol: shapes, sides, order, thresholds, counters; frozen before the measurement."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routeblock.cuda.q6k_plan import Sizes
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_json


class Side(StrEnum):
    """Who computes."""

    AUTO = "auto"
    DP4A = "dp4a"
    TENSOR = "tensor"
    VLLM_VEC = "vllm_vec"
    VLLM_BATCHED = "vllm_batched"
    LLAMA_CPP = "llama_cpp"
    JOB_MAJOR = "job_major"
    EXPERT_SORTED = "expert_sorted"
    BAND4 = "band4"
    BAND32 = "band32"
    BAND128 = "band128"
    BAND512 = "band512"
    READ = "read"
    EMPTY = "empty"


OURS = (Side.AUTO, Side.DP4A, Side.TENSOR)
LIMITS = (Side.READ, Side.EMPTY)  # they give no output


class Role(StrEnum):
    """What a shape is for."""

    TUNED = "tuned"
    HELD_OUT = "held_out"
    STUDY = "study"


class Reason(StrEnum):
    """Why a repetition was rejected."""

    THROTTLED = "throttled"
    OTHER_PROCESS = "other_process"
    INCORRECT = "incorrect"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Count = Annotated[int, Field(ge=1)]


class Matrix(_Strict):
    slots: Count
    pool: Count
    rows: Count
    cols: Count


class Shapes(_Strict):
    tuned: tuple[Matrix, ...]
    held_out: tuple[Matrix, ...]
    study: tuple[Matrix, ...]


class Series(_Strict):
    """A name of its own, so that a side can stand beside itself."""

    name: str
    side: Side


class Plugin(_Strict):
    package: str
    version: str
    sha256: str


class LlamaCpp(_Strict):
    package: str
    version: str
    build: str
    nodes: Count


class Bootstrap(_Strict):
    seed: int
    resamples: Count
    confidence: float


class Threshold(_Strict):
    ratio: float
    roles: tuple[Role, ...]
    rule: str


class Limit(_Strict):
    """Series whose times no call can go below."""

    series: tuple[str, ...]
    rule: str


class Correctness(_Strict):
    samples: Count
    peer_error: float
    rule: str


class BatchBits(_Strict):
    pool: Count
    rows: Count
    cols: Count
    tokens: tuple[Count, ...]


class Ceilings(_Strict):
    dram_bytes: Count
    l2_bytes: Count
    rule: str


class Counters(_Strict):
    """`sides` are counted at `shapes`, those of `everywhere` at every shape that the threshold binds."""

    sides: tuple[Side, ...]
    shapes: tuple[Matrix, ...]
    everywhere: tuple[Side, ...]
    calls: Count
    replays: Count
    metrics: dict[str, str]
    stalls: dict[str, str]
    binds_from: float
    rule: str


class Acceptance(_Strict):
    attempts: Count
    pause_ms: int
    throttle_reasons: tuple[str, ...]
    reject: dict[Reason, str]
    rule: str


class Protocol(_Strict):
    """The whole protocol; see fixtures/protocols/q6k_dispatch.json for what its words mean."""

    name: Literal["q6k_dispatch"]
    version: int
    seed: int
    top_k: Count
    shapes: Shapes
    roles: dict[Role, str]
    sides: dict[Side, str]
    series: tuple[Series, ...]
    candidate: str
    floor: str
    peers: tuple[str, ...]
    plugin: Plugin
    llama_cpp: LlamaCpp
    scope: str
    repetitions: Count
    launches: Count
    warmups: int
    order: str
    mode: str
    statistic: str
    bootstrap: Bootstrap
    threshold: Threshold
    limit: Limit
    correctness: Correctness
    batch_bits: BatchBits
    ceilings: Ceilings
    counters: Counters
    acceptance: Acceptance

    def digest(self) -> str:
        """SHA-256 of the canonical JSON: what a record carries."""
        return sha256_json(self.model_dump(mode="json"))


@dataclass(frozen=True)
class Shape:
    """One operating point."""

    role: Role
    slots: int
    pool: int
    rows: int
    cols: int
    top_k: int

    @property
    def label(self) -> str:
        return f"{self.role} {self.slots}/{self.pool} {self.rows}x{self.cols}"

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.slots, self.pool, self.top_k, self.rows, self.cols)


def shape_of(matrix: Matrix, role: Role, protocol: Protocol) -> Shape:
    """A shape of the protocol in one of its roles."""
    top_k = 1 if role is Role.STUDY else protocol.top_k
    return Shape(role, matrix.slots, matrix.pool, matrix.rows, matrix.cols, top_k)


def shapes(protocol: Protocol) -> Iterator[Shape]:
    """Every shape, in the protocol's order."""
    for role in Role:
        for matrix in getattr(protocol.shapes, role):
            yield shape_of(matrix, role, protocol)


def ordered(series: tuple[Series, ...], repetition: int) -> tuple[Series, ...]:
    """The order of series in one repetition."""
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
    for name in (protocol.candidate, protocol.floor, *protocol.peers, *protocol.limit.series):
        if names.count(name) != 1:
            raise _refuse(f"series {name!r} is there {names.count(name)} times", path, f"series are {', '.join(names)}")
    for role in (Role.TUNED, Role.HELD_OUT):
        for matrix in getattr(protocol.shapes, role):
            if matrix.slots % protocol.top_k or matrix.pool < protocol.top_k:
                raise _refuse(
                    f"{matrix.slots} slots over a pool of {matrix.pool}",
                    path,
                    f"every token has {protocol.top_k} distinct experts",
                )
    return protocol


def _refuse(what: str, path: Path, limit: str) -> InputError:
    return InputError(what, where=str(path), limit=limit, way_out="start from fixtures/protocols/q6k_dispatch.json")
