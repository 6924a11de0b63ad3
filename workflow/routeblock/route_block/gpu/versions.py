# SPDX-License-Identifier: Apache-2.0
"""Versions of the extension on the recorded layer: same bits at a fixed launch? same automatic launch?"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.archive import listed
from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal

SOURCE_FORMAT, FORMAT = "routeblock.first_contact.v1", "routeblock.versions.v1"
FIXED = {"g246": (64, 128, 246), "g200": (64, 128, 200)}  # launches asked for
AUTOMATIC = "auto"  # the launch that the selector chose with vLLM 0.24.0, asked for
DIGESTS = "h200_sha256.json"
SURFACES = {"w13": "w13", "activation": "act", "w2": "w2", "final": "fin"}  # ours to the recording's
ORDERS = ("stable", "rev")


def compare(results: Sequence[Path], golden: Path, out: Path, *, contents: Path | None = None) -> None:
    """Write, for each result (its file is named after the version), surfaces that are the recorded ones, sealed.

    contents: the list of committed results with their SHA-256, which have to be exactly these. Raises InputError if a
    result cannot be read, comes twice, or is not the one listed.
    """
    if contents is not None:
        _listed(results, contents)
    recorded = json.loads((golden / DIGESTS).read_bytes())
    rows: dict[str, dict[str, Any]] = {}
    for path in results:
        if path.stem in rows:
            raise _refuse(path, "this version comes twice", "one result a version", "rename one")
        rows[path.stem] = _row(_read(path), recorded)
    document = {
        "format": FORMAT,
        "versions": [{"version": version, **rows[version]} for version in sorted(rows, key=_order)],
    }
    write_json(out, document)
    seal(
        out.with_suffix(SUFFIX),
        rule="versions",
        outputs=[out],
        inputs=[*results, golden / DIGESTS, *([contents] if contents else [])],
        parameters={},
        modules=[__name__],
    )


def _listed(results: Sequence[Path], contents: Path) -> None:
    known = listed(contents)
    given = {Path(os.path.relpath(path, contents.parent)).as_posix(): path for path in results}
    for name in sorted(known.keys() | given.keys()):
        if name not in given:
            raise _refuse(contents.parent / name, "not given", f"{contents.name} lists it", "name it too")
        if name not in known:
            raise _refuse(given[name], "not listed", f"{contents.name} lists what is committed", "list it or remove it")
        if not given[name].is_file() or sha256_file(given[name]) != known[name]:
            raise _refuse(given[name], "not the bytes that are listed", f"see {contents.name}", "restore the file")


def _order(version: str) -> tuple[list[int], str]:
    return [int(part) for part in version.split(".") if part.isdigit()], version


def _row(document: dict[str, Any], recorded: dict[str, str]) -> dict[str, Any]:
    same: dict[str, list[str]] = {}
    compared: dict[str, int] = {}
    for launch in (*FIXED, AUTOMATIC):
        found = {
            f"{order} {ours}": document[f"layer {launch} {order}"][ours] == recorded[f"{launch}.{order}.{theirs}"]
            for order in ORDERS
            for ours, theirs in SURFACES.items()
        }
        same[launch] = sorted(name for name, equal in found.items() if equal)
        compared[launch] = len(found)
    chosen = document["automatic launch"]
    environment = document["environment"]
    return {
        "extension": environment["extension"],
        "extension_sha256": environment["extension_sha256"],
        "gpu": environment["gpu"],
        "torch": environment["torch"],
        "compared": compared,
        "same": same,
        "automatic": {gemm: [launch["launch"] for launch in chosen[gemm]] for gemm in ("w13", "w2")},
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != SOURCE_FORMAT:
            raise ValueError(f"format {document['format']}")
        for key in ("environment", "automatic launch"):
            if key not in document:
                raise ValueError(f"no {key!r}: the check did not come to its end")
        return dict(document)
    except UNREADABLE as e:
        raise _refuse(path, f"not readable: {e}", f"JSON of {SOURCE_FORMAT}", "run tests/gpu/first_contact.py") from e


def _refuse(path: Path, what: str, limit: str, way_out: str) -> InputError:
    return InputError(what, where=str(path), limit=limit, way_out=way_out)
