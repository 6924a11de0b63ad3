# SPDX-License-Identifier: Apache-2.0
"""Recorded evidence: runs of the lane cuda packed into a small folder, and rebuilt from it bit for bit.

A group is what was made together: a study (`published.stored`), a point's census (`published.census`), the control of
the grid probe. Each is a file of lines; all share one store of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import canonical_json, sha256_file, sha256_json
from routeblock.evidence.files import atomic_folder, is_temporary, write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.packed import Line, Tensors, pack, read_lines, unpack, write_lines
from routeblock.evidence.record import RECORD, RESTORED
from routeblock.evidence.tensor_store import read_store, write_store
from routeblock.route_block.facts import CELLS
from routeblock.route_block.fixtures.fixture import load_fixture
from routeblock.route_block.operating_point import CUDA

FORMAT, RESTORED_FORMAT = "routeblock.recorded.v1", "routeblock.restored.v1"
INDEX, STORE = "evidence.json", "tensors.xz"
LINES_SUFFIX = ".jsonl"
CENSUS, PROBE_CONTROL = "census", "probe_control"
# What a study's folder holds besides its runs, and is evidence; scores and tables are made again from it.
PLAN_FILES = ("prediction.json", "prediction.manifest.json", "plans.json", "plans.safetensors", "plans.manifest.json")


def pack_evidence(results: Sequence[Path], add: Sequence[Path], out: Path) -> None:
    """Write the evidence of results folders, and that of folders packed before, to the folder `out`, sealed.

    Raises InputError when there is none, when a group comes with two contents, and when fixtures
    differ.
    """
    tensors: Tensors = {}
    groups: dict[str, list[Line]] = {}
    facts: dict[str, Any] = {}
    fixtures: dict[str, str] = {}
    sources = [*(_collect(folder, tensors) for folder in results), *(_read(folder, tensors) for folder in add)]
    for name, lines, about, fixture in (entry for source in sources for entry in source):
        if groups.get(name, lines) != lines:
            raise _refuse(str(out), f"group {name} comes twice", "a group is packed once", "leave one out")
        groups[name], facts[name] = lines, about
        fixtures[fixture["sha256"]] = fixture["name"]
    if len(fixtures) != 1:
        found = ", ".join(f"{name} {digest[:12]}" for digest, name in fixtures.items()) or "nothing"
        raise _refuse(str(out), f"evidence of {found}", "runs of one fixture on lane cuda", "name other folders")
    (digest, fixture_name), *_ = fixtures.items()
    with atomic_folder(out) as folder:
        for name, lines in groups.items():
            write_lines(folder / f"{name}{LINES_SUFFIX}", lines)
        write_store(folder / STORE, tensors)
        document = {
            "format": FORMAT,
            "lane": CUDA,
            "fixture": {"name": fixture_name, "sha256": digest},
            "groups": {
                name: {**facts[name], "sha256": sha256_file(folder / f"{name}{LINES_SUFFIX}")} for name in groups
            },
            "tensors": sha256_file(folder / STORE),
        }
        (folder / INDEX).write_bytes(canonical_json(document))
        seal(
            folder / f"evidence{SUFFIX}",
            rule="pack_evidence",
            outputs=[folder / INDEX, folder / STORE, *(folder / f"{name}{LINES_SUFFIX}" for name in groups)],
            inputs=[],
            parameters={},
            modules=[__name__],
        )


def _collect(results: Path, tensors: Tensors) -> Iterator[tuple[str, list[Line], dict[str, Any], dict[str, str]]]:
    """Each group below a results folder: name, lines, facts, fixture."""
    machine = {
        name: json.loads(path.read_bytes())
        for name, path in (
            ("environment", results / "environment" / "environment.json"),
            ("probe", results / "probe" / "grid_probe.manifest.json"),
        )
        if path.is_file()
    }
    for lane in sorted((results / "route_block").glob(f"*/{CUDA}")):
        spec = results / "fixtures" / lane.parent.name / "fixture.json"
        fixture = {"name": lane.parent.name, "sha256": sha256_file(spec)}
        for name, root, files in _groups(lane):
            lines = list(pack(root, files, tensors))
            if lines:
                yield name, lines, {"machine": machine, **_facts(lines)}, fixture


def _groups(lane: Path) -> Iterator[tuple[str, Path, list[Path]]]:
    yield PROBE_CONTROL, lane / PROBE_CONTROL, _below(lane / PROBE_CONTROL)
    for point in sorted(p for p in lane.iterdir() if p.is_dir() and p.name != PROBE_CONTROL):
        yield f"{point.name}.{CENSUS}", point / CENSUS, _below(point / CENSUS)
        for study in sorted(p for p in point.iterdir() if p.is_dir() and p.name != CENSUS):
            files = [study / name for name in PLAN_FILES if (study / name).is_file()]
            files += [p for name in ("capture", *CELLS) for p in _below(study / name)]
            yield f"{point.name}.{study.name}", study, files


def _below(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and not any(is_temporary(part) for part in p.parts))


def read_index(folder: Path) -> dict[str, Any]:
    """The index of packed evidence. Raises InputError if it is missing or not of this version."""
    path = folder / INDEX
    try:
        data = path.read_bytes()
        document = json.loads(data)
        if document["format"] != FORMAT or canonical_json(document) != data:
            raise ValueError("not canonical JSON of this version")
    except UNREADABLE as e:
        raise _refuse(str(path), f"not readable evidence: {e}", f"format {FORMAT}", "restore the folder") from e
    return dict(document)


def _group(folder: Path, index: dict[str, Any], name: str) -> list[Line]:
    path = folder / f"{name}{LINES_SUFFIX}"
    if name not in index["groups"]:
        known = ", ".join(sorted(index["groups"]))
        raise _refuse(str(folder), f"no recorded group {name}", f"recorded are {known}", "choose one of them")
    lines = read_lines(path)
    if sha256_file(path) != index["groups"][name]["sha256"]:
        raise _refuse(str(path), "its bytes are not those of the index", "recorded evidence", "restore the folder")
    stated, found = _counts(index["groups"][name]), _counts(_facts(lines))
    if stated != found:
        raise _refuse(str(folder / INDEX), f"{name} has {stated}", f"{path.name} has {found}", "restore the folder")
    return lines


def _facts(lines: Sequence[Line]) -> dict[str, int]:
    return {"folders": len(lines), "runs": sum(RECORD in line["sha256"] for line in lines)}


def _counts(facts: Mapping[str, Any]) -> str:
    return f"{facts['runs']} runs in {facts['folders']} folders"


def _store(folder: Path, index: dict[str, Any]) -> Tensors:
    path = folder / STORE
    if not path.is_file() or sha256_file(path) != index["tensors"]:
        raise _refuse(str(path), "its bytes are not those of the index", "recorded evidence", "restore the folder")
    return read_store(path)


def _read(folder: Path, tensors: Tensors) -> Iterator[tuple[str, list[Line], dict[str, Any], dict[str, str]]]:
    index = read_index(folder)
    tensors.update(_store(folder, index))
    for name, about in index["groups"].items():
        facts = {key: value for key, value in about.items() if key != "sha256"}
        yield name, _group(folder, index, name), facts, index["fixture"]


def restore(fixture_folder: Path, evidence: Path, group: str, out: Path) -> None:
    """Rebuild a recorded group in the folder `out`, restored.json with the digest of every file beside it.

    Raises InputError if the evidence is of another fixture, or if one byte is not as recorded.
    """
    index = read_index(evidence)
    fixture = load_fixture(fixture_folder)
    if index["fixture"]["sha256"] != fixture.digest:
        raise _refuse(
            str(evidence / INDEX),
            f"recorded on fixture {index['fixture']['name']} {index['fixture']['sha256'][:16]}",
            f"this is fixture {fixture.digest[:16]}",
            "use the seed of the given config.yaml, or take the lane recorded-h200 out of it",
        )
    lines, tensors = _group(evidence, index, group), _store(evidence, index)
    made = [path for line in lines for path in unpack(line, tensors, out, where=str(evidence))]
    document = {
        "format": RESTORED_FORMAT,
        "group": group,
        "evidence": sha256_json(index),
        "files": {path.relative_to(out).as_posix(): sha256_file(path) for path in made},
    }
    write_json(out / RESTORED, document)
    seal(
        out / f"restored{SUFFIX}",
        rule="restore_evidence",
        outputs=[out / RESTORED],
        # What it lists was made by processes elsewhere: as its input, so that it is made again with any of it.
        inputs=[*made, *(evidence / name for name in (INDEX, STORE, f"{group}{LINES_SUFFIX}"))],
        parameters={"group": group},
        modules=[__name__],
    )


def _refuse(where: str, what: str, limit: str, way_out: str) -> InputError:
    return InputError(what, where=where, limit=limit, way_out=way_out)
