# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over the hostile jobs of `exercise`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from routeblock.cuda.sanitizer import Report, run_tool
from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import seal

TOOLS = ("memcheck", "synccheck", "racecheck")
EXERCISE = "routeblock.grouped_schedule.exercise"


def write(out: Path, device: str, cubin: Path, protocol: Path, *, code: str) -> list[Report]:
    """Run every tool on `device` (gpu0, ...) and write `sanitizer.json` with its manifest to `out`."""
    index = int(device.removeprefix("gpu"))
    reports = [run_tool(tool, EXERCISE, [str(index), str(cubin), str(protocol)]) for tool in TOOLS]
    path = out / "sanitizer.json"
    write_json(path, {"device": device, "cubin_sha256": sha256_file(cubin), "tools": [asdict(r) for r in reports]})
    seal(
        out / "sanitizer.manifest.json",
        rule="sanitizer",
        outputs=[path],
        inputs=[cubin, protocol],
        parameters={"device": device},
        code=code,
    )
    return reports
