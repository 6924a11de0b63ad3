# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from routeblock import schemas

FOLDER = Path(__file__).resolve().parent.parent / "workflow" / "schemas"


def test_the_committed_schemas_are_those_of_the_models() -> None:
    committed = {p.name: p.read_text() for p in FOLDER.glob("*.json")}
    generated = {f"{name}.schema.json": schemas.render(model) for name, model in schemas.MODELS.items()}
    assert committed == generated, "run `routeblock schema`"
