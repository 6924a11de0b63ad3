# SPDX-License-Identifier: Apache-2.0
"""From a device's name to its backend, and from a rule to its stages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from routeblock.errors import InputError
from routeblock.grouped_schedule import protocol, record
from routeblock.grouped_schedule.campaigns import Planner
from routeblock.grouped_schedule.measure import Backend
from routeblock.timing.record import Record


def _backend(device: str, cubin: Path | None, threads: int, plan: protocol.Protocol) -> Backend:
    match = re.fullmatch(r"(cpu|gpu)(\d+)", device)
    if match is None or (match[1] == "cpu" and match[2] != "0"):
        raise InputError(f"device {device!r}", where="--device", limit="cpu0, or gpu0, gpu1, ...", way_out="name one")
    # Each lane needs packages that the other's machine may lack.
    if match[1] == "cpu":
        from routeblock.grouped_schedule.cpu_backend import CpuBackend

        return CpuBackend(device, threads)
    if cubin is None:
        raise InputError(
            "no cubin",
            where=device,
            limit="lane cuda launches a cubin",
            way_out="make it (routeblock gpu build-kernels), then name it with --cubin",
        )
    from routeblock.grouped_schedule.cuda_backend import CudaBackend

    return CudaBackend(device, int(match[2]), cubin, plan)


def run(rule: str, out: Path, device: str, protocol_file: Path, *, cubin: Path | None, threads: int) -> Record:
    """Run `rule` (sweep, confirmation, beyond) on `device` and write its folder. Raises InputError on bad input."""
    plan = protocol.load(protocol_file)
    backend = _backend(device, cubin, threads, plan)
    inputs = [protocol_file, *([cubin] if cubin else [])]
    if rule == "beyond" and backend.place.l2_bytes is None:
        raise InputError("lane cpu", where=rule, limit="it needs a GPU", way_out="name gpu0")
    stages = Planner(plan, backend.place).stages(rule)
    return record.write(out, backend, stages, plan, rule=rule, inputs=inputs, modules=[__name__], progress=_tell)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
