# SPDX-License-Identifier: Apache-2.0
"""The rule `fixture`: a fixture's folder, whole or not at all, sealed."""

from __future__ import annotations

from pathlib import Path

from routeblock.errors import InputError
from routeblock.evidence.files import atomic_folder
from routeblock.evidence.manifest import seal
from routeblock.route_block import published_geometry
from routeblock.route_block.fixture import SPEC, TENSOR_FILES

MAKERS = {published_geometry.NAME: published_geometry.write}


def make(name: str, seed: int, out: Path, *, code: str) -> None:
    """Write the fixture `name` drawn from `seed` to the folder `out`. Raises InputError for an unknown name."""
    if name not in MAKERS:
        raise InputError(
            f"fixture {name!r} is not known",
            where="fixture",
            limit=f"known are {', '.join(MAKERS)}",
            way_out="choose one",
        )
    with atomic_folder(out) as folder:
        MAKERS[name](folder, seed)
        seal(
            folder / "fixture.manifest.json",
            rule="fixture",
            outputs=[folder / f for f in (SPEC, *TENSOR_FILES)],
            inputs=[],
            parameters={"name": name, "seed": seed},
            code=code,
        )
