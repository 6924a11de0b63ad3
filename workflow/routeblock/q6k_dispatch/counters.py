# SPDX-License-Identifier: Apache-2.0
"""Hardware counters by ncu, of our calls and of study B's products, and their times without it. A refusal is recorded.

Run as `python -m routeblock.q6k_dispatch.counters PROTOCOL CUBIN SCHEDULES` it is what ncu watches: a graph of calls of
every shape and side, replayed twice; the second replay counts, as one workload.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.evidence.digest import PACKAGE_ROOT
from routeblock.q6k_dispatch.protocol import Protocol, Shape, Side, load, shape_of

TIMEOUT_S = 240


def cases(protocol: Protocol) -> list[tuple[Shape, Side]]:
    """What is counted, in order: shapes of one matrix together."""
    plan, bound = protocol.counters, protocol.threshold.roles
    every = [(m, shape_of(m, role, protocol)) for role in bound for m in getattr(protocol.shapes, role)]
    every.sort(key=lambda both: (both[1].rows, both[1].cols, -both[1].pool))
    whole = tuple(dict.fromkeys((*plan.everywhere, *plan.sides)))
    return [(shape, side) for m, shape in every for side in (whole if m in plan.shapes else plan.everywhere)]


def count(protocol_path: Path, cubin: Path, schedules: Path, gpu: Any) -> dict[str, Any]:
    """What ncu read: `outcome` counted, refused or absent, lines that tell why, and a row for every case.

    gpu: see `gpu_session.Gpu`; it times the same graphs without ncu.
    """
    program = shutil.which("ncu")
    if program is None:
        return {"outcome": "absent", "lines": ["ncu is not on PATH"], "rows": []}
    protocol = load(protocol_path)
    plan = protocol.counters
    metrics = [*plan.metrics.values(), *plan.stalls.values()]
    command = [program, "--clock-control", "none", "--cache-control", "none", "--csv", "--page", "raw"]
    command += ["--metrics", ",".join(metrics), "--print-units", "base"]
    command += ["--graph-profiling", "graph", "--profile-from-start", "off"]
    command += [sys.executable, "-m", "routeblock.q6k_dispatch.counters", *map(str, (protocol_path, cubin, schedules))]
    paths = [str(PACKAGE_ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"outcome": "refused", "lines": [f"not done after {TIMEOUT_S} s"], "rows": []}
    lines = [line for line in done.stdout.splitlines() if line.startswith("==")] + done.stderr.splitlines()[-5:]
    try:
        rows = parse(done.stdout, protocol)
    except ValueError as e:
        return {"outcome": "refused", "lines": [str(e), *lines[:20]], "rows": []}
    for row, time_us in zip(rows, replays(gpu, protocol), strict=True):
        row["replay_us"] = time_us
    return {"outcome": "counted", "lines": [line for line in lines if "WARNING" in line], "rows": rows}


def parse(output: str, protocol: Protocol) -> list[dict[str, Any]]:
    """Rows of ncu's CSV in base units, a graph each. Raises ValueError if it does not hold every case once."""
    plan, wanted = protocol.counters, cases(protocol)
    text = "\n".join(line for line in output.splitlines() if line.startswith('"'))
    table = list(csv.DictReader(io.StringIO(text)))
    graphs = [row for row in table if row.get("ID", "").strip()]  # the row under the head holds units
    if len(graphs) != len(wanted):
        raise ValueError(f"{len(graphs)} graphs were counted, {len(wanted)} ran")
    found = []
    for row, (shape, side) in zip(graphs, wanted, strict=True):
        values, stalls = (
            {name: float(row[metric].replace(",", "")) for name, metric in metrics.items()}
            for metrics in (plan.metrics, plan.stalls)
        )
        where = {"slots": shape.slots, "pool": shape.pool, "rows": shape.rows, "cols": shape.cols}
        found.append({"role": str(shape.role), **where, "side": str(side), **values, "stalls": stalls})
    return found


def replays(gpu: Any, protocol: Protocol) -> list[float]:
    """Microseconds of one call of every case, by graphs as they are counted, without a profiler."""
    plan, found = protocol.counters, []
    for session, side in _sessions(gpu, protocol):
        graph = gpu.graph(session.counted(side), protocol.warmups, plan.calls)
        found.append(float(np.median([graph.replay() for _ in range(plan.replays)])) / plan.calls)
    return found


def _sessions(gpu: Any, protocol: Protocol) -> Iterator[tuple[Any, Side]]:
    opened: dict[Shape, Any] = {}
    for shape, side in cases(protocol):
        if shape not in opened:
            for session in opened.values():
                session.close()
            opened = {shape: gpu.session(shape)}
        yield opened[shape], side
    for session in opened.values():
        session.close()


def main(arguments: list[str]) -> int:
    """Replay a graph of every case twice, the second time for the profiler."""
    import torch

    from routeblock.q6k_dispatch.gpu_session import Gpu

    protocol_path, cubin, schedules = map(Path, arguments)
    protocol = load(protocol_path)
    gpu = Gpu(protocol, cubin.read_bytes(), schedules.read_bytes(), None, None)
    for session, side in _sessions(gpu, protocol):
        call = session.counted(side)
        with torch.cuda.stream(gpu.stream):
            call()
            gpu.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=gpu.stream):
                for _ in range(protocol.counters.calls):
                    call()
            graph.replay()
            gpu.stream.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            graph.replay()
            gpu.stream.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
