# SPDX-License-Identifier: Apache-2.0
"""The rule `prediction`: written and sealed before any arithmetic, and an input of every run."""

from __future__ import annotations

from pathlib import Path

from routeblock.evidence.digest import canonical_json
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal
from routeblock.route_block.fixture import PLANS, SPEC, load_fixture
from routeblock.route_block.predict import predict
from routeblock.route_block.predict import superseded as supersede


def freeze(
    fixture_folder: Path, lane: str, point: str, plan_source: str, out: Path, *, superseded: bool = False, code: str
) -> None:
    """Write the prediction for a lane at a point to the file `out`, and its manifest beside it."""
    fixture = load_fixture(fixture_folder)
    document = predict(fixture, lane, point, plan_source, fixture.plans)
    with atomic_file(out) as temporary:
        temporary.write_bytes(canonical_json(supersede(document) if superseded else document))
    seal(
        out.with_suffix(".manifest.json"),
        rule="prediction",
        outputs=[out],
        inputs=[fixture_folder / SPEC, fixture_folder / PLANS],
        parameters={"lane": lane, "point": point, "plan_source": plan_source, "superseded": superseded},
        code=code,
    )
