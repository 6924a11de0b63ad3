# SPDX-License-Identifier: Apache-2.0
"""The package's CUDA sources as cubins, each with its binary identity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from routeblock.cuda import nvrtc
from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import atomic_file, write_json
from routeblock.evidence.manifest import seal

ARCHITECTURES = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


NAME = "q6k_schedules"
SOURCES = ("q6k_schedules.cu", "q6k_dot.cuh")
SOURCE, *HEADERS = (Path(__file__).with_name(name) for name in SOURCES)


def compile_kernels(architecture: str, libraries: Sequence[Path] | None = None) -> nvrtc.Cubin:
    """Compile study B's kernels. Raises InputError if no NVRTC here compiles for `architecture`."""
    return nvrtc.for_architecture(architecture, libraries).compile(SOURCE, architecture, HEADERS)


def build(out: Path, architecture: str, *, libraries: Sequence[Path] | None = None) -> None:
    """Write the cubin, `build.json` and its manifest to the folder `out`.

    `libraries` are NVRTC libraries to choose from, by default those installed. Raises InputError if none of them
    compiles for `architecture`.
    """
    cubin = compile_kernels(architecture, libraries)
    record = {
        "architecture": cubin.architecture,
        "nvrtc": cubin.nvrtc,
        "options": list(cubin.options),
        "sources": {f"cuda/{path.name}": sha256_file(path) for path in (SOURCE, *HEADERS)},
        "size": len(cubin.code),
        "sha256": cubin.sha256,
    }
    outputs = [out / "build.json", out / f"{NAME}.cubin"]
    with atomic_file(outputs[1]) as tmp:
        tmp.write_bytes(cubin.code)
    write_json(outputs[0], {NAME: record})
    seal(
        out / "build.manifest.json",
        rule="build_kernels",
        outputs=outputs,
        inputs=[],
        parameters={"architecture": architecture},
        modules=[__name__],
    )
