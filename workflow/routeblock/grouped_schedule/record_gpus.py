# SPDX-License-Identifier: Apache-2.0
"""Everything that one machine's GPUs can tell, in one command without Snakemake: for a borrowed machine.

One process a GPU, all GPUs at once; then the sanitizer, which is not timed; then one archive of sealed folders.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from routeblock.cuda import telemetry
from routeblock.errors import InputError
from routeblock.evidence.archive import pack

ARCHIVE = "grouped_schedule.tar.gz"
STEPS = {"sweep": "sweep", "confirm": "confirmation", "beyond": "beyond"}  # command: folder


def _fails(*commands: list[str]) -> list[str]:
    """Run commands of `routeblock` at once and wait; the ones that failed, as text."""
    started = [(c, subprocess.Popen([sys.executable, "-m", "routeblock", *c])) for c in commands]
    return [" ".join(command) for command, process in started if process.wait()]


def run(out: Path, protocol: Path, *, sanitizer: bool = True) -> Path:
    """Record all GPUs into folders below `out` and pack them into `{ARCHIVE}`, whose path is returned.

    A step that fails does not stop the others; what there is gets packed. Then raises InputError.
    """
    gpus = {f"gpu{index}": arch for index, arch in enumerate(telemetry.architectures())}
    cubins = {arch: out / "build" / arch / "q6k_schedules.cubin" for arch in gpus.values()}
    missing = [arch for arch, cubin in cubins.items() if not cubin.is_file()]
    failed = _fails(*(["gpu", "build-kernels", "--arch", arch, "--out", str(cubins[arch].parent)] for arch in missing))
    steps = {**STEPS, "sanitize": "sanitizer"} if sanitizer else STEPS
    for command, kind in steps.items():
        work = []
        for gpu, arch in gpus.items():
            options = {"device": gpu, "cubin": cubins[arch], "protocol": protocol, "out": out / "cuda" / gpu / kind}
            work.append(
                ["study-b", command, *(text for name, value in options.items() for text in (f"--{name}", str(value)))]
            )
        failed += _fails(*work)
    files = sorted(p for folder in ("build", "cuda") for p in (out / folder).rglob("*") if p.is_file())
    pack(out / ARCHIVE, {p.relative_to(out).as_posix(): p for p in files})
    if failed:
        raise InputError(
            f"{len(failed)} steps failed, first: {failed[0]}",
            where="study-b record",
            limit="every step of every GPU must end well",
            way_out=f"read its own line above; {ARCHIVE} holds what there is",
        )
    return out / ARCHIVE
