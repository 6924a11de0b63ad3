# SPDX-License-Identifier: Apache-2.0
"""The lanes on the CPU twin. `native` replays the history's stored plan: a CPU has no atomics race to observe."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.evidence.digest import code_digest, sha256_json
from routeblock.moe.launches import Launch
from routeblock.moe.partition import partition
from routeblock.moe.routing import AlignedPlan
from routeblock.route_block.facts import threads_of
from routeblock.route_block.fixtures.fixture import LayerFixture
from routeblock.route_block.operating_point import GEMMS, lane_facts
from routeblock.route_block.runs.lane import Outcome, Request

Weights = tuple[NDArray[np.uint8], NDArray[np.uint8] | None, NDArray[Any]]
PACKAGES = ("numpy", "numba", "llvmlite", "ml_dtypes")


def unpack(fixture: LayerFixture, gemm: str) -> Weights:
    """(q uint8 [E, K, N], zeros uint8 [E, K/g, N] or None, scales [E, K/g, N]) of the experts in use, gate before
    up.
    """
    from routeblock.twin.weights import unpack_into

    n, k = fixture.shape(gemm)
    experts = len(fixture.experts)
    q = np.empty((experts, k, n), np.uint8)
    zeros: NDArray[np.uint8] | None = None
    scales: NDArray[Any] | None = None
    for row, projections in enumerate(fixture.packed(gemm)):
        at = 0
        for packed in projections:
            groups, width = packed.scales.shape
            if scales is None:
                scales = np.empty((experts, groups, n), packed.scales.dtype)
                zeros = None if packed.qzeros is None else np.empty(scales.shape, np.uint8)
            unpack_into(packed.qweight, q[row], at)
            scales[row, :, at : at + width] = packed.scales
            if zeros is not None:
                assert packed.qzeros is not None
                unpack_into(packed.qzeros, zeros[row], at)
            at += width
    assert scales is not None
    return q, zeros, scales


def compute(
    fixture: LayerFixture,
    weights: Mapping[str, Weights],
    plan: AlignedPlan,
    launches: Mapping[str, Launch],
    architecture: str,
) -> dict[str, NDArray[Any]]:
    """The four surfaces of a fixture under a plan with global expert ids; `weights` as `unpack` gives them."""
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
    )


class TwinLane:
    """A lane computed by the twin, with the tensor cores of one architecture."""

    def __init__(self, name: str) -> None:
        self.facts = lane_facts(name)
        self.status = self.facts.status
        self.modules = (__name__,)

    def prepare(self, fixture: LayerFixture) -> None:
        """Nothing: no other process waits for a CPU."""

    def run(self, fixture: LayerFixture, request: Request) -> Outcome:
        """The four surfaces on the number of threads that the replicate asks for."""
        threads = threads_of(request.replicate)
        if "numba" not in sys.modules:  # it fixes the size of its pool when it is first imported
            asked = int(os.environ.get("NUMBA_NUM_THREADS", "1"))
            os.environ["NUMBA_NUM_THREADS"] = str(max(threads, asked, os.cpu_count() or 1))
        import numba

        numba.set_num_threads(threads)
        plan = request.plan or fixture.plans[request.history]
        weights = {gemm: unpack(fixture, gemm) for gemm in GEMMS}
        surfaces = compute(fixture, weights, plan, request.launches, self.facts.architecture)
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        code = code_digest("routeblock.twin.layer")
        return Outcome(
            surfaces=surfaces,
            plan=plan,
            grids={gemm: self._grid(fixture, plan.num_blocks, request, gemm) for gemm in GEMMS},
            prelude=False,
            binary=sha256_json({"code": code, "numba": versions["numba"], "llvmlite": versions["llvmlite"]}),
            environment=versions,
            telemetry={"threads": threads},
        )

    @staticmethod
    def _grid(fixture: LayerFixture, blocks: int, request: Request, gemm: str) -> int:
        n, k = fixture.shape(gemm)
        launch = request.launches[gemm]
        return partition(blocks, n, k, launch.thread_n, launch.thread_k, launch.grid, fixture.spec["group_size"]).grid
