# SPDX-License-Identifier: Apache-2.0
"""Hardware counters of the products, by ncu, of study B's schedules and of our paths. A refusal is recorded.

Run as `python -m routeblock.q6k_dispatch.counters PROTOCOL CUBIN SCHEDULES` it is what ncu watches: every shape, every
side, each twice; of the two the second counts.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from routeblock.evidence.digest import PACKAGE_ROOT
from routeblock.q6k_dispatch.protocol import Protocol, Role, Shape, Side, load, shape_of

PRODUCTS = "regex:^(dispatch_even|dispatch_odd|job_major|grouped)$"
RUNS, TIMEOUT_S = 2, 240
_FACTOR = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}


def cases(protocol: Protocol) -> list[tuple[Shape, Side]]:
    """What is counted, in order."""
    plan = protocol.counters
    every = [shape_of(m, Role.TUNED, protocol) for m in plan.shapes]
    return [(shape, side) for shape in every for side in plan.sides]


def count(protocol_path: Path, cubin: Path, schedules: Path) -> dict[str, Any]:
    """What ncu read: `outcome` counted, refused or absent, lines that tell why, and a row for every case."""
    program = shutil.which("ncu")
    if program is None:
        return {"outcome": "absent", "lines": ["ncu is not on PATH"], "rows": []}
    protocol = load(protocol_path)
    metrics = protocol.counters.metrics
    command = [program, "--clock-control", "none", "--cache-control", "none", "--csv", "--page", "raw"]
    command += ["--metrics", ",".join(metrics.values()), "--kernel-name", PRODUCTS, "--print-units", "base"]
    command += [sys.executable, "-m", "routeblock.q6k_dispatch.counters", *map(str, (protocol_path, cubin, schedules))]
    paths = [str(PACKAGE_ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"outcome": "refused", "lines": [f"not done after {TIMEOUT_S} s"], "rows": []}
    lines = [line for line in done.stdout.splitlines() if line.startswith("==")] + done.stderr.splitlines()[-5:]
    try:
        rows = parse(done.stdout, metrics, cases(protocol))
    except ValueError as e:
        return {"outcome": "refused", "lines": [str(e), *lines[:20]], "rows": []}
    return {"outcome": "counted", "lines": [line for line in lines if "WARNING" in line], "rows": rows}


def parse(output: str, metrics: dict[str, str], wanted: list[tuple[Shape, Side]]) -> list[dict[str, Any]]:
    """Rows of ncu's CSV in base units. Raises ValueError if it does not hold every case so many times."""
    text = "\n".join(line for line in output.splitlines() if line.startswith('"'))
    table = list(csv.DictReader(io.StringIO(text)))
    kernels = [row for row in table if row.get("ID", "").strip()]  # the row under the head holds units
    if len(kernels) != RUNS * len(wanted):
        raise ValueError(f"{len(kernels)} kernels were counted, {RUNS * len(wanted)} ran")
    found = []
    for i, (shape, side) in enumerate(wanted):
        row = kernels[RUNS * i + RUNS - 1]
        values = {name: float(row[metric].replace(",", "")) for name, metric in metrics.items()}
        where = {"slots": shape.slots, "pool": shape.pool, "rows": shape.rows, "cols": shape.cols}
        found.append({**where, "side": str(side), "kernel": row["Kernel Name"].split("(")[0], **values})
    return found


def main(arguments: list[str]) -> int:
    """Run every case `RUNS` times."""
    import torch

    from routeblock.q6k_dispatch.rig import Rig

    protocol_path, cubin, schedules = map(Path, arguments)
    protocol = load(protocol_path)
    rig = Rig(protocol, cubin.read_bytes(), schedules.read_bytes(), None, None)
    sessions: dict[Shape, Any] = {}
    for shape, side in cases(protocol):
        if shape not in sessions:
            sessions = {shape: rig.open(shape)}
        for _ in range(RUNS):
            sessions[shape].call(side)()
            torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
