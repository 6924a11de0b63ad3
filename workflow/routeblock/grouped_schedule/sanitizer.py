# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over the hostile jobs of `sanitizer_cases`."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from routeblock.cuda.sanitizer import Report, run_tool
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import seal

TOOLS = ("memcheck", "synccheck", "racecheck")
CASES = "routeblock.grouped_schedule.sanitizer_cases"


def write(out: Path, device: str, cubin: Path, protocol: Path) -> list[Report]:
    """Run every tool on `device` (gpu0, ...) and write `sanitizer.json` with its manifest to `out`.

    Raises InputError for another device and a missing file, before a tool is run.
    """
    match = re.fullmatch(r"gpu([0-9]{1,4})", device)
    if match is None:
        raise InputError(f"device {device!r}", where="--device", limit="gpu0, gpu1, ...", way_out="name one")
    for given in (cubin, protocol):
        if not given.is_file():
            raise InputError(
                "no such file",
                where=str(given),
                limit="the sanitizer runs a cubin over a protocol's jobs",
                way_out="make it (routeblock gpu build-kernels), name it with --cubin; name a committed --protocol",
            )
    digest = sha256_file(cubin)
    reports = [run_tool(tool, CASES, [match[1], str(cubin), str(protocol)]) for tool in TOOLS]
    path = out / "sanitizer.json"
    write_json(path, {"device": device, "cubin_sha256": digest, "tools": [asdict(r) for r in reports]})
    seal(
        out / "sanitizer.manifest.json",
        rule="sanitizer",
        outputs=[path],
        inputs=[cubin, protocol],
        parameters={"device": device},
        modules=[__name__, CASES],
    )
    return reports
