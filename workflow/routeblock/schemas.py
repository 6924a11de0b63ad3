# SPDX-License-Identifier: Apache-2.0
"""JSON schemas, generated from the models that check the files."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from routeblock.config import Config
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import Manifest

MODELS: dict[str, type[BaseModel]] = {"config": Config, "manifest": Manifest}


def render(model: type[BaseModel]) -> str:
    """The schema of `model` as indented JSON."""
    return json.dumps(model.model_json_schema(), indent=2, sort_keys=True) + "\n"


def write(folder: Path) -> None:
    """Write `{name}.schema.json` of every model to `folder`."""
    for name, model in MODELS.items():
        with atomic_file(folder / f"{name}.schema.json") as tmp:
            tmp.write_text(render(model), encoding="utf-8")
