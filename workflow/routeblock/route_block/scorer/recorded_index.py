# SPDX-License-Identifier: Apache-2.0
"""Whether runs filed as recorded are those of the evidence beside the expected identity, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_bytes, sha256_file
from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY, TELEMETRY_MANIFEST, TENSORS
from routeblock.route_block.scorer.inputs import Study, first_line

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


def check_recorded(study: Study, runs: Path, names: list[str]) -> None:
    """Refuse runs filed as recorded of which the index beside the expected identity does not name each file.

    `names`: the folders of the runs below `runs`. A recorded lane is let off what its records are too old to hold, so
    only committed evidence may be called that. A run that is not there is left to the audit. Raises InputError.
    """
    if not study.is_recorded:
        return
    named = _named(study)
    for path in (runs / name / file for name in names for file in FILES):
        at = path.relative_to(runs)
        if path.is_file() and named.get(at.parent.as_posix(), {}).get(at.name) != sha256_file(path):
            raise InputError(
                "not the file of the recorded evidence",
                where=str(path),
                limit=f"{study.lane} is said of the runs that {study.identity_path.with_name(INDEX)} names",
                way_out="restore them with routeblock study-a restore-evidence,"
                f" or file them as {study.prediction.lane}",
            )


def index_files(study: Study) -> list[Path]:
    """The files by which runs filed as recorded are known: the index of the evidence, and the lines of their group."""
    return [study.identity_path.with_name(name) for name in (INDEX, f"{_group(study)}{LINES}")]


def _group(study: Study) -> str:
    return f"{study.prediction.point}.{study.prediction.plan_source}"


def _named(study: Study) -> dict[str, dict[str, str]]:
    """Folder to the SHA-256 of each of its files, as the evidence states them."""
    path, group = study.identity_path.with_name(INDEX), _group(study)
    try:
        index = _Index.model_validate_json(path.read_bytes())
        if group not in index.groups:
            raise ValueError(f"no group {group}")
        data = path.with_name(f"{group}{LINES}").read_bytes()
        if sha256_bytes(data) != index.groups[group].sha256:
            raise ValueError(f"{group}{LINES} is not the file that it names")
        lines = [_Line.model_validate(json.loads(line)) for line in data.splitlines()]
    except (OSError, ValueError, ValidationError, RecursionError) as e:
        raise InputError(
            f"no readable evidence: {first_line(e)}",
            where=str(path),
            limit=f"runs filed as {study.lane} are named by an index beside their expected identity",
            way_out=f"name the identity beside the evidence, or file the runs as {study.prediction.lane}",
        ) from e
    return {line.folder: line.sha256 for line in lines}
