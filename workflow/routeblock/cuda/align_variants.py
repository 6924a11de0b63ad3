# SPDX-License-Identifier: Apache-2.0
"""The instances of align.cu: what each can take, what it needs, and which one serves which size."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_EXPERTS = 1024
# Shared memory that every GPU gives a block without being asked for more, bytes.
PLAIN_SHARED_BYTES = 48 * 1024


class Kind(StrEnum):
    """How many launches an instance takes, and how its blocks learn of each other."""

    SINGLE = "single"
    CLUSTER = "cluster"
    TILES = "tiles"


@dataclass(frozen=True)
class Problem:
    """The sizes that decide: routes = tokens * top_k, global experts, block size."""

    routes: int
    experts: int
    block_size: int

    @property
    def bound(self) -> int:
        """The most slots that routes and padding can take, whole blocks."""
        most = min(self.routes * self.block_size, self.routes + self.experts * (self.block_size - 1))
        return most // self.block_size * self.block_size


@dataclass(frozen=True)
class Gpu:
    """What an instance may use: compute capability (major, minor) and shared memory that a block can ask for, bytes."""

    capability: tuple[int, int]
    shared_bytes: int

    @property
    def architecture(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class Variant:
    """One instance: threads a block, routes a thread, blocks a cluster; see align.cu for the rest."""

    kind: Kind
    threads: int
    items: int
    cluster: int = 1
    staged: bool = False
    ballot: bool = False

    @property
    def name(self) -> str:
        """The name that align.cu gives it, without launch and id type."""
        lead = {Kind.SINGLE: "staged_" if self.staged else "direct_", Kind.TILES: "tiles_"}
        front = lead.get(self.kind, f"cluster_{self.cluster}x")
        return f"{front}{self.threads}x{self.items}{'b' if self.ballot else ''}"

    @property
    def launches(self) -> int:
        return 2 if self.kind is Kind.TILES else 1

    @property
    def capacity(self) -> int | None:
        """The most routes it takes; None: any number."""
        return None if self.kind is Kind.TILES else self.threads * self.items * self.cluster

    def parts(self, problem: Problem) -> int:
        """Blocks of its grid, or of its cluster."""
        if self.kind is not Kind.TILES:
            return self.cluster
        return max(1, -(-problem.routes // (self.threads * self.items)))

    def slots(self, problem: Problem) -> int:
        """Slots of the output that it stages in shared memory, a multiple of 4."""
        return -(-problem.bound // 4) * 4 if self.staged else 0

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block: the layout of `Shared` in align.cu."""
        bins = 4 * ((problem.experts + 4) // 4)
        rows = self.threads // 32 + (self.cluster if self.kind is Kind.CLUSTER else 0)
        sums = 8 * 4 * (-(-problem.experts // 4)) if self.kind is Kind.TILES else 0
        return 4 * (4 * bins + 32) + 2 * rows * bins + 2 * self.slots(problem) + sums

    def workspace_ints(self, problem: Problem) -> int:
        """int32 entries that the caller lends it."""
        return self.parts(problem) * 4 * (-(-problem.experts // 4)) if self.kind is Kind.TILES else 0

    def takes(self, problem: Problem, gpu: Gpu) -> bool:
        """Whether it is right for these sizes on this GPU."""
        return (
            (self.capacity is None or problem.routes <= self.capacity)
            and -(-problem.experts // 4) <= self.threads
            and self.shared_bytes(problem) <= gpu.shared_bytes
            # Clusters of 16 are there on data-centre Hopper and Blackwell; consumer parts stop at 8.
            and (self.kind is not Kind.CLUSTER or gpu.capability[0] in (9, 10))
            # The count launch asks for one int32 a bin.
            and (self.kind is not Kind.TILES or 4 * (problem.experts + 4) <= PLAIN_SHARED_BYTES)
        )


# First fit: the first that takes the sizes serves them. The order follows times on an H200; the clusters need Hopper or
# data-centre Blackwell, so elsewhere staged_512x4 stands in up to 2,048 routes and tiles above.
VARIANTS = {
    v.name: v
    for v in (
        Variant(Kind.SINGLE, 512, 1, staged=True, ballot=True),
        Variant(Kind.CLUSTER, 256, 1, 8),
        Variant(Kind.CLUSTER, 512, 1, 8),
        Variant(Kind.CLUSTER, 512, 1, 16),
        Variant(Kind.CLUSTER, 1024, 1, 16),
        Variant(Kind.SINGLE, 512, 4, staged=True),
        Variant(Kind.TILES, 1024, 1),
        Variant(Kind.TILES, 512, 4),
    )
}


def serving(problem: Problem, gpu: Gpu) -> Variant:
    """The variant that serves these sizes on this GPU. tiles_512x4 takes whatever no other does."""
    return next(v for v in VARIANTS.values() if v.takes(problem, gpu))
