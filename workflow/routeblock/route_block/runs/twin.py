# SPDX-License-Identifier: Apache-2.0
"""The lanes on the CPU twin. `native` replays the history's stored plan: a CPU has no atomics race to observe."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.evidence.digest import code_digest, sha256_json
from routeblock.evidence.record import BY_LOOPS
from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan
from routeblock.route_block.facts import threads_of
from routeblock.route_block.fixtures.fixture import LayerFixture
from routeblock.route_block.operating_point import GEMMS, lane_facts
from routeblock.route_block.runs.lane import Computer, Outcome, Request

if TYPE_CHECKING:  # the twin imports numba, whose pool of threads is made by the first import
    from routeblock.twin.gemm import Visits
    from routeblock.twin.weights import Weights

PACKAGES = ("numpy", "numba", "llvmlite", "ml_dtypes")


def compute(
    fixture: LayerFixture,
    weights: Mapping[str, Weights],
    plan: AlignedPlan,
    launches: Mapping[str, Launch],
    architecture: str,
    visits: Mapping[str, Visits] | None = None,
) -> dict[str, NDArray[Any]]:
    """The four surfaces of a fixture under a plan with global expert ids; `weights` of each GEMM by `unpack`.

    `visits`: of each GEMM, filled with what its loops went through.
    """
    from routeblock.twin.layer import moe_layer

    return moe_layer(
        fixture.hidden,
        fixture.topk_ids,
        fixture.topk_weights,
        weights["w13"],
        weights["w2"],
        fixture.compact(plan),
        architecture=architecture,
        w13_launch=launches["w13"],
        w2_launch=launches["w2"],
        group_size=fixture.spec["group_size"],
        expert_map=fixture.expert_rows,
        visits=visits,
    )


class TwinLane:
    """A lane computed by the twin, with the tensor cores of one architecture."""

    def __init__(self, name: str) -> None:
        self.facts = lane_facts(name)
        self.status = self.facts.status
        self.modules = (__name__,)

    def prepare(self, fixture: LayerFixture) -> None:
        """Nothing: no other process waits for a CPU."""

    def computer(self) -> Computer:
        """The twin's code with what compiles it, and the packages that it computes with."""
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        code = code_digest("routeblock.twin.layer")
        binary = sha256_json({"code": code, "numba": versions["numba"], "llvmlite": versions["llvmlite"]})
        return Computer(binary, versions)

    def run(self, fixture: LayerFixture, request: Request) -> Outcome:
        """The four surfaces on the number of threads that the replicate asks for."""
        threads = threads_of(request.replicate)
        if "numba" not in sys.modules:  # it fixes the size of its pool when it is first imported
            asked = int(os.environ.get("NUMBA_NUM_THREADS", "1"))
            os.environ["NUMBA_NUM_THREADS"] = str(max(threads, asked, os.cpu_count() or 1))
        import numba

        from routeblock.twin.gemm import Visits
        from routeblock.twin.weights import unpack

        numba.set_num_threads(threads)
        plan = request.plan or fixture.plans[request.history]
        weights = {gemm: unpack(fixture, gemm) for gemm in GEMMS}
        visits = {gemm: Visits() for gemm in GEMMS}
        surfaces = compute(fixture, weights, plan, request.launches, self.facts.architecture, visits)
        return Outcome(
            surfaces=surfaces,
            plan=_visited(fixture, visits),
            grids={gemm: launch.grid for gemm, launch in request.launches.items()},
            prelude=False,
            computer=self.computer(),
            consumption=BY_LOOPS,
            slices={gemm: seen.slices() for gemm, seen in visits.items()},
            telemetry={"threads": threads},
        )


def _visited(fixture: LayerFixture, visits: Mapping[str, Visits]) -> AlignedPlan:
    """The one plan that the loops of both GEMMs went through, with global expert ids."""
    first, second = (visits[gemm].plan(fixture.topk_ids.size) for gemm in GEMMS)
    for part in ("sorted_token_ids", "expert_ids"):
        if not np.array_equal(getattr(first, part), getattr(second, part)):
            raise InputError(
                f"the loops of {' and '.join(GEMMS)} went through other {part}",
                where="twin",
                limit="both GEMMs read one plan",
                way_out="report this: the twin is broken",
            )
    return fixture.expand(first)
