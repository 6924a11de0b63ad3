# SPDX-License-Identifier: Apache-2.0
"""Launches that need no grid probe, with it and without: the probe must not change a bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.record import restored_list

SOURCE_FORMAT, FORMAT = "routeblock.unassisted.v1", "routeblock.probe_control.v1"


def compare(lane: str, folder: Path, out: Path) -> list[str]:
    """Compare with_probe.json and without_probe.json of `folder` launch by launch, sealed; the launches that differ.

    Raises InputError unless one was made with the probe and one without, on one fixture and GPU, by one extension.
    """
    assisted, alone = folder / "with_probe.json", folder / "without_probe.json"
    with_probe, without = _read(assisted), _read(alone)
    same = ("fixture", "sms")
    extensions = {d["identity"]["environment"]["extension_sha256"] for d in (with_probe, without)}
    if not with_probe["probed"] or without["probed"] or len(extensions) != 1:
        raise InputError(
            f"probed: {with_probe['probed']} and {without['probed']}, {len(extensions)} extensions",
            where=f"{assisted}, {alone}",
            limit="one run with the probe and one without, by one extension",
            way_out="run routeblock study-a unassisted with and without ROUTEBLOCK_PROBE",
        )
    if any(with_probe[key] != without[key] for key in same):
        raise InputError(
            "they are of different fixtures or GPUs",
            where=f"{assisted}, {alone}",
            limit="one fixture on one GPU",
            way_out="run both on one machine",
        )
    theirs = {(row["plan"], *row["launch"]): row for row in without["launches"]}
    rows = []
    for row in with_probe["launches"]:
        other = theirs.get((row["plan"], *row["launch"]))
        equal = [s for s, digest in row["surfaces"].items() if other and other["surfaces"].get(s) == digest]
        rows.append(
            {
                "plan": row["plan"],
                "launch": row["launch"],
                "recorded_grids": row["launched"],
                "equal": equal,
                "same": len(equal) == len(row["surfaces"]) and set(row["launched"].values()) == {row["launch"][2]},
            }
        )
    document = {
        "format": FORMAT,
        "lane": lane,
        "fixture": {"name": with_probe["fixture_name"], "sha256": with_probe["fixture"]},
        "gpu": with_probe["identity"]["environment"]["gpu"],
        "sms": with_probe["sms"],
        "launches": rows,
    }
    write_json(out, document)
    seal(
        out.with_suffix(SUFFIX),
        rule="probe_comparison",
        outputs=[out],
        inputs=[assisted, alone, *restored_list(folder)],
        parameters={"lane": lane},
        modules=[__name__],
    )
    return [f"{row['launch']} with the plan of {row['plan']}" for row in rows if not row["same"]]


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != SOURCE_FORMAT:
            raise ValueError(f"format {document['format']}")
        return dict(document)
    except UNREADABLE as e:
        raise InputError(
            f"not readable: {e}",
            where=str(path),
            limit=f"canonical JSON of {SOURCE_FORMAT}",
            way_out="make it again (routeblock study-a unassisted)",
        ) from e
