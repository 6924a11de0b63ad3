# SPDX-License-Identifier: Apache-2.0
"""The rule `prediction`: written and sealed before any arithmetic, and an input of every run."""

from __future__ import annotations

from pathlib import Path

from routeblock.errors import InputError
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import seal
from routeblock.route_block.fixtures.fixture import PLANS, SPEC, captured_plans, load_fixture
from routeblock.route_block.prediction.predict import CAPTURED, predict
from routeblock.route_block.prediction.predict import superseded as supersede


def freeze(
    fixture_folder: Path,
    lane: str,
    point: str,
    plan_source: str,
    out: Path,
    *,
    plans_path: Path | None = None,
    superseded: bool = False,
) -> None:
    """Write the prediction for a lane at a point to the file `out`, and its manifest beside it.

    `plans_path`: the captured plans, with plan source `captured` and with no other. Raises InputError if they and the
    plan source do not fit.
    """
    if (plans_path is not None) != (plan_source == CAPTURED):
        raise InputError(
            f"plan source {plan_source} {'with' if plans_path else 'without'} a file of plans",
            where="prediction",
            limit="captured plans come from a file, stored ones from the fixture",
            way_out="name the captured plans with --plans, and no others",
        )
    fixture = load_fixture(fixture_folder)
    plans = captured_plans(fixture, plans_path) if plans_path else fixture.plans
    document = predict(fixture, lane, point, plan_source, plans)
    write_json(out, supersede(document) if superseded else document)
    seal(
        out.with_suffix(".manifest.json"),
        rule="prediction",
        outputs=[out],
        inputs=[fixture_folder / SPEC, plans_path or fixture_folder / PLANS],
        parameters={"lane": lane, "point": point, "plan_source": plan_source, "superseded": superseded},
        modules=[__name__],
    )
