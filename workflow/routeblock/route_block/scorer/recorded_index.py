# SPDX-License-Identifier: Apache-2.0
"""Whether runs filed as recorded are those of the evidence beside the expected identity, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_bytes, sha256_file
from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY, TELEMETRY_MANIFEST, TENSORS
from routeblock.route_block.scorer.inputs import CAPTURED_PLANS, PREDICTION, Study, first_line

INDEX, LINES = "evidence.json", ".jsonl"
FILES = (RECORD, RECORD_MANIFEST, TELEMETRY, TELEMETRY_MANIFEST, TENSORS)


class _Group(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    sha256: str


class _Index(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    groups: dict[str, _Group]


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    folder: str
    sha256: dict[str, str]
    documents: dict[str, Any] = {}


def check_recorded(study: Study, runs: Path, names: list[str]) -> None:
    """Refuse runs filed as recorded of which the index beside the expected identity does not name each file, their
    prediction and captured plans among them.

    `names`: the folders of the runs below `runs`. A recorded lane is let off what its records are too old to hold, so
    only committed evidence may be called that. A run that is not there is left to the audit. Raises InputError.
    """
    if not study.is_recorded:
        return
    named = {line.folder: line.sha256 for line in _lines(study)}
    frozen = {PREDICTION: study.prediction_digest}
    if CAPTURED_PLANS in study.files:
        frozen["plans.safetensors"] = study.files[CAPTURED_PLANS]
    for name, digest in frozen.items():
        if named.get(".", {}).get(name) != digest:
            raise _other(study, study.prediction_path.with_name(name))
    for path in (runs / name / file for name in names for file in FILES):
        at = path.relative_to(runs)
        if path.is_file() and named.get(at.parent.as_posix(), {}).get(at.name) != sha256_file(path):
            raise _other(study, path)


def index_files(study: Study) -> list[Path]:
    """The files by which runs filed as recorded are known: the index of the evidence, and the lines of their group."""
    return [study.identity_path.with_name(name) for name in (INDEX, f"{_group(study)}{LINES}")]


def _group(study: Study) -> str:
    return f"{study.prediction.point}.{study.prediction.plan_source}"


def _other(study: Study, path: Path) -> InputError:
    return InputError(
        "not the file of the recorded evidence",
        where=str(path),
        limit=f"{study.lane} is said of the files that {study.identity_path.with_name(INDEX)} names",
        way_out=f"restore them with routeblock study-a restore-evidence, or file them as {study.prediction.lane}",
    )


def read_backs(study: Study) -> dict[str, Any]:
    """Folder of a run to the `consumption` that its record has in the evidence; None where the evidence has none.

    Of runs that are not filed as recorded nothing is held. Raises InputError where there is no evidence.
    """
    if not study.is_recorded:
        return {}
    records = {line.folder: line.documents.get(RECORD) for line in _lines(study)}
    return {folder: record.get("consumption") for folder, record in records.items() if isinstance(record, dict)}


def _lines(study: Study) -> list[_Line]:
    path, group = study.identity_path.with_name(INDEX), _group(study)
    try:
        index = _Index.model_validate_json(path.read_bytes())
        if group not in index.groups:
            raise ValueError(f"no group {group}")
        data = path.with_name(f"{group}{LINES}").read_bytes()
        if sha256_bytes(data) != index.groups[group].sha256:
            raise ValueError(f"{group}{LINES} is not the file that it names")
        return [_Line.model_validate(json.loads(line)) for line in data.splitlines()]
    except (OSError, ValueError, ValidationError, RecursionError) as e:
        raise InputError(
            f"no readable evidence: {first_line(e)}",
            where=str(path),
            limit=f"runs filed as {study.lane} are named by an index beside their expected identity",
            way_out=f"name the identity beside the evidence, or file the runs as {study.prediction.lane}",
        ) from e
