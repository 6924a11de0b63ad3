# SPDX-License-Identifier: Apache-2.0
"""The named negative control: the superseded grid-240 prediction, with thread_k and thread_n swapped, starts no run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from routeblock.errors import InputError
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import seal
from routeblock.route_block.fixtures.fixture import SPEC, LayerFixture
from routeblock.route_block.prediction.predict import load_prediction
from routeblock.route_block.runs.lane import Computer, Outcome, Request
from routeblock.route_block.runs.run import run

NAME = "transposed_grid_240"


class _ArithmeticReachedError(Exception):
    pass


class _Tripwire:
    """A lane that computes nothing and raises when it is reached."""

    status = "control"
    modules = ()

    def prepare(self, fixture: LayerFixture) -> None:
        """Called before a device is touched."""
        raise _ArithmeticReachedError

    def computer(self) -> Computer:
        """Nothing computes here."""
        raise _ArithmeticReachedError

    def run(self, fixture: LayerFixture, request: Request) -> Outcome:
        """Called where arithmetic would begin."""
        raise _ArithmeticReachedError


def control(fixture_folder: Path, prediction_path: Path, lane: str, out: Path) -> bool:
    """Try to run `full_k` from a superseded prediction and write what happened; whether it was refused."""
    prediction, digest = load_prediction(prediction_path)
    found = next((c for c in prediction["controls"] if c["name"] == NAME), None)
    if found is None:
        raise InputError(
            "no transposed control in it",
            where=str(prediction_path),
            limit="the control belongs to the operating point `published`",
            way_out="predict --point published --superseded",
        )
    refusal = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(
                lane_name=lane,
                lane=_Tripwire(),
                fixture_folder=fixture_folder,
                prediction_path=prediction_path,
                cell="full_k",
                history="H0",
                replicate=1,
                out=Path(folder) / "run",
            )
        except InputError as e:
            refusal = {"what": e.what, "limit": e.limit, "way_out": e.way_out}
        except _ArithmeticReachedError:
            refusal = None
    document = {
        "format": "routeblock.control.v1",
        **found,
        "prediction": digest,
        "refused": refusal is not None,
        "refusal": refusal,
    }
    write_json(out, document)
    seal(
        out.with_suffix(".manifest.json"),
        rule="control",
        outputs=[out],
        inputs=[prediction_path, fixture_folder / SPEC],
        parameters={"lane": lane},
        modules=[__name__],
    )
    return refusal is not None
