# SPDX-License-Identifier: Apache-2.0
"""The committed protocol: shapes, sides, order, thresholds, counters; frozen before the measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from routeblock.cuda.q6k_plan import Sizes
from routeblock.timing import protocol as timing
from routeblock.timing.protocol import Bootstrap, Count, Natural, Seed, Strict, Whole, each_once, read, refuse


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


class Matrix(Strict):
    slots: Count
    pool: Count
    rows: Count
    cols: Count


class Shapes(Strict):
    tuned: tuple[Matrix, ...]
    held_out: tuple[Matrix, ...]
    study: tuple[Matrix, ...]


class Series(Strict):
    """A name of its own, so that a side can stand beside itself."""

    name: str
    side: Side


class Plugin(Strict):
    package: str
    version: str
    sha256: str


class LlamaCpp(Strict):
    package: str
    version: str
    build: str
    nodes: Count


class Threshold(Strict):
    ratio: float
    roles: tuple[Role, ...]
    rule: str


class Limit(Strict):
    """Series whose times no call can go below."""

    series: tuple[str, ...]
    rule: str


class Correctness(Strict):
    samples: Count
    peer_error: float
    rule: str


class BatchBits(Strict):
    pool: Count
    rows: Count
    cols: Count
    tokens: tuple[Count, ...]


class Ceilings(Strict):
    dram_bytes: Count
    l2_bytes: Count
    rule: str


class Counters(Strict):
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


class Acceptance(timing.Acceptance):
    pause_ms: Natural

    @property
    def rest_s(self) -> float:
        return self.pause_ms / 1000


class Protocol(Whole):
    """The whole protocol; see fixtures/protocols/q6k_dispatch.json for what its words mean."""

    name: Literal["q6k_dispatch"]
    version: int
    seed: Seed
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


def load(path: Path) -> Protocol:
    """Read a protocol. Raises InputError if it cannot be read, has unknown keys, or a series that does not exist."""
    protocol = read(path, Protocol, "q6k_dispatch")
    named = (protocol.candidate, protocol.floor, *protocol.peers, *protocol.limit.series)
    each_once([s.name for s in protocol.series], named, path, "q6k_dispatch")
    for matrix in (*protocol.shapes.tuned, *protocol.shapes.held_out):
        if matrix.slots % protocol.top_k or matrix.pool < protocol.top_k:
            what = f"{matrix.slots} slots over a pool of {matrix.pool}"
            raise refuse(what, path, f"every token has {protocol.top_k} distinct experts", "q6k_dispatch")
    return protocol
