# SPDX-License-Identifier: Apache-2.0
"""The machine that a study ran on. It differs between machines, so nothing else is made from it."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal
from routeblock.installed import versions

# Vector and conversion extensions that decide how fast the CPU twin runs; its bits do not depend on them.
CPU_FLAGS = ("avx", "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_fp16")


def write(folder: Path, pins: Path) -> None:
    """Write `environment.json` and its manifest to `folder`.

    `pins` is a requirements file whose packages are named, `code` the code digest for the manifest. Raises `InputError`
    if the folder does not take the files.
    """
    told = canonical_json(describe(pins))
    out = folder / "environment.json"
    with atomic_file(out) as tmp:
        tmp.write_bytes(told)
    seal(
        folder / "environment.manifest.json",
        rule="environment",
        outputs=[out],
        inputs=[pins],
        parameters={},
        modules=[__name__],
    )


def describe(pins: Path) -> dict[str, Any]:
    """Interpreter, versions of the pinned packages (None: not installed), CPU and system of this machine.

    Raises `InputError` if `pins` cannot be read.
    """
    try:
        text = pins.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise InputError(
            f"cannot be read: {(e.strerror if isinstance(e, OSError) else None) or e}",
            where=str(pins),
            limit="a requirements file is needed, as UTF-8",
            way_out="name one with --pins",
        ) from e
    names = re.findall(r"^([A-Za-z0-9][\w.-]*)", text, re.MULTILINE)
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "packages": versions(names),
        "system": {"name": platform.system(), "release": platform.release(), "libc": " ".join(platform.libc_ver())},
        "cpu": _cpu(),
    }


def _cpu() -> dict[str, Any]:
    facts: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.is_file():  # Linux; elsewhere the model and flags stay unknown
        for line in info.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    flags = facts.get("flags", facts.get("Features", "")).split()
    return {
        "machine": platform.machine(),
        "model": facts.get("model name"),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "count": os.cpu_count(),
    }
