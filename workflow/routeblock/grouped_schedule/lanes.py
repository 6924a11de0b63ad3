# SPDX-License-Identifier: Apache-2.0
"""From a device's name to its backend, and from a rule to its stages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from routeblock.errors import InputError
from routeblock.grouped_schedule import conform, protocol, record
from routeblock.grouped_schedule.measure import Backend


def _backend(device: str, cubin: Path | None, threads: int, plan: protocol.Protocol) -> tuple[Backend, int | None]:
    """The backend of `device`, and its L2 in bytes where it is a GPU."""
    match = re.fullmatch(r"(cpu|gpu)(\d+)", device)
    if match is None or (match[1] == "cpu" and match[2] != "0"):
        raise InputError(f"device {device!r}", where="--device", limit="cpu0, or gpu0, gpu1, ...", way_out="name one")
    # Each lane needs packages that the other's machine may lack.
    if match[1] == "cpu":
        from routeblock.grouped_schedule.cpu_backend import CpuBackend

        return CpuBackend(device, threads), None
    if cubin is None:
        raise InputError(
            "no cubin",
            where=device,
            limit="lane cuda launches a cubin",
            way_out="routeblock build-kernels, then --cubin",
        )
    from routeblock.grouped_schedule.cuda_backend import CudaBackend

    gpu = CudaBackend(device, int(match[2]), cubin, plan)
    return gpu, gpu.l2_bytes


def run(rule: str, out: Path, device: str, protocol_file: Path, *, cubin: Path | None, threads: int) -> record.Recorded:
    """Run `rule` (sweep, confirmation, beyond) on `device` and write its folder. Raises InputError on bad input."""
    plan = protocol.load(protocol_file)
    backend, l2_bytes = _backend(device, cubin, threads, plan)
    inputs = [protocol_file, *([cubin] if cubin else [])]
    if rule == "beyond" and l2_bytes is None:
        raise InputError("lane cpu", where=rule, limit="it needs a GPU", way_out="name gpu0")
    stages = conform.stages(rule, plan, l2_bytes)
    return record.write(out, backend, stages, plan, rule=rule, inputs=inputs, modules=[__name__], progress=_tell)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
