# SPDX-License-Identifier: Apache-2.0
"""What a lane is: something that runs one cell of study A and reports what it really did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan
from routeblock.route_block.fixtures.fixture import LayerFixture


@dataclass(frozen=True)
class Request:
    """One cell to run: the plan to inject, or None for the lane's own alignment; the launch of each GEMM."""

    plan: AlignedPlan | None
    launches: Mapping[str, Launch]
    history: str
    replicate: int


@dataclass(frozen=True)
class Computer:
    """What does the arithmetic: SHA-256 over the binaries, and the versions and hardware around them."""

    binary: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """What came out: surfaces, what the GEMMs used, and what computed.

    plan: from the far side, never the requested one: what lay in the device's buffers after the run, or what the twin's
    loops went through; `consumption` says which. grids: the launched ones; a twin launches nothing and gives those of
    its request, for which `slices` has to be what its loops went through: of each GEMM and tile (first K-tile, one past
    the last). prelude: whether H1's tensors lie on the device, with the fixture's bytes.
    """

    surfaces: Mapping[str, NDArray[Any]]
    plan: AlignedPlan
    grids: Mapping[str, int]
    prelude: bool
    computer: Computer
    consumption: str
    slices: Mapping[str, Sequence[Sequence[tuple[int, int]]]] | None = None
    telemetry: Mapping[str, Any] = field(default_factory=dict)


class Turn(Protocol):
    """When a process may use its device."""

    def take(self) -> dict[str, Any]:
        """Wait for it; returns telemetry. Raises InputError when the wait outlasts its limit."""


class Lane(Protocol):
    """A place to run on."""

    status: str

    @property
    def modules(self) -> tuple[str, ...]:
        """Those whose code computes here, for the seal of a run."""

    def prepare(self, fixture: LayerFixture) -> None:
        """Do what needs no device (imports, packing), so that another process may use it meanwhile."""

    def computer(self) -> Computer:
        """What would compute here now; a run reports the same of itself."""

    def run(self, fixture: LayerFixture, request: Request) -> Outcome:
        """Run one cell; raises InputError where this machine cannot."""
