# SPDX-License-Identifier: Apache-2.0
"""Files that are generated from the code: JSON schemas, captions, and the README's lists of tables and figures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from routeblock.config import Config
from routeblock.declared import Declared
from routeblock.errors import InputError
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import Manifest
from routeblock.report.catalogue import FIGURES, TABLES

MODELS: dict[str, type[BaseModel]] = {"config": Config, "manifest": Manifest}
README, SCHEMAS, CAPTIONS = "README.md", "workflow/schemas", "workflow/report"
_BEGIN, _END = "<!-- list of {}s: made by `routeblock workflow generate` -->", "<!-- end of the list of {}s -->"


def files(root: Path) -> dict[str, str]:
    """Every generated file of the checkout at `root`, by its path. Raises InputError for a README without marks."""
    made = {f"{SCHEMAS}/{name}.schema.json": schema(model) for name, model in MODELS.items()}
    made |= {f"{CAPTIONS}/table_{name}.rst": table.caption for name, table in TABLES.items()}
    made |= {f"{CAPTIONS}/figure_{name}.rst": figure.caption for name, figure in FIGURES.items()}
    text = (root / README).read_text(encoding="utf-8")
    for kind, found in (("table", TABLES.values()), ("figure", FIGURES.values())):
        text = _with_list(text, kind, found)
    return made | {README: text}


def schema(model: type[BaseModel]) -> str:
    """The schema of `model` as indented JSON."""
    return json.dumps(model.model_json_schema(), indent=2, sort_keys=True) + "\n"


def _with_list(text: str, kind: str, found: Iterable[Declared]) -> str:
    begin, end = _BEGIN.format(kind), _END.format(kind)
    if (text.count(begin), text.count(end)) != (1, 1):
        raise InputError(f"no place for {kind}s", where=README, limit=f"one {begin} and one {end}", way_out="add them")
    head, rest = text.split(begin)
    lines = [f"| {kind} | question |", "|---|---|", *(f"| `{one.name}` | {one.question} |" for one in found)]
    return "\n".join([f"{head}{begin}", "", *lines, "", end]) + rest.split(end)[1]


def write(root: Path) -> None:
    """Write every generated file of the checkout at `root`."""
    for name, text in files(root).items():
        with atomic_file(root / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
