# SPDX-License-Identifier: Apache-2.0
"""The control of the grid probe: grids that are multiples of the SM count need none, so both ways must give one bit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from routeblock.cuda.gpu_lock import Turn
from routeblock.cuda.operators import MAX_BLOCKS_PER_SM
from routeblock.evidence.digest import code_digest, sha256_array
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.moe.launches import Launch
from routeblock.route_block.facts import HISTORIES
from routeblock.route_block.fixtures.fixture import INPUTS, LAYER, PLANS, SPEC, load_fixture
from routeblock.route_block.operating_point import GEMMS
from routeblock.route_block.runs.cuda import CudaLane

FORMAT = "routeblock.unassisted.v1"
THREAD_SIZES = ((64, 128), (128, 64))


def launch_multiples(lane: CudaLane, fixture_folder: Path, out: Path, *, turn: Turn) -> None:
    """Write the SHA-256 of every surface at 1 to 4 blocks per SM, both stored plans, both thread sizes.

    Which of both ways this was (`probed`) and whether grids were recorded or computed stands in the document.
    """
    fixture = load_fixture(fixture_folder)
    lane.prepare(fixture)
    turn.take()
    session = lane.open(fixture, HISTORIES[0])
    rows: list[dict[str, Any]] = []
    for thread_k, thread_n in THREAD_SIZES:
        for blocks_per_sm in range(1, MAX_BLOCKS_PER_SM + 1):
            launch = Launch(thread_k, thread_n, session.device.sms * blocks_per_sm)
            for history in HISTORIES:
                surfaces, found = session.layer(fixture.plans[history], dict.fromkeys(GEMMS, launch))
                rows.append(
                    {
                        "plan": history,
                        "launch": list(launch),
                        "launched": {gemm: kernel.blocks for gemm, kernel in found.items()},
                        "surfaces": {name: sha256_array(x) for name, x in surfaces.items()},
                    }
                )
    document = {
        "format": FORMAT,
        "fixture": fixture.digest,
        "fixture_name": fixture.spec["name"],
        "probed": lane.probed,
        "sms": session.device.sms,
        "launches": rows,
        "identity": {"source": code_digest(__name__, *lane.modules), **asdict(session.computer())},
    }
    write_json(out, document)
    seal(
        out.with_suffix(SUFFIX),
        rule="unassisted",
        outputs=[out],
        inputs=[fixture_folder / name for name in (SPEC, LAYER, INPUTS, PLANS)],
        parameters={"probed": lane.probed},
        modules=[__name__, *lane.modules],
    )
