# SPDX-License-Identifier: Apache-2.0
"""The package's CUDA sources as cubins, each with its binary identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from routeblock.cuda import nvrtc
from routeblock.evidence.digest import PACKAGE_ROOT, sha256_file
from routeblock.evidence.files import atomic_file, write_json
from routeblock.evidence.manifest import seal

FOLDER = PACKAGE_ROOT / "cuda"
ARCHITECTURES = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


@dataclass(frozen=True)
class Source:
    """A translation unit and the headers it includes, by file name in this folder."""

    file: str
    headers: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Paths inside the package, for a code digest."""
        return tuple(f"cuda/{name}" for name in (self.file, *self.headers))


KERNELS = {"q6k_schedules": Source("q6k_schedules.cu", ("q6k_dot.cuh",))}


def compile_kernels(name: str, architecture: str, libraries: Sequence[Path] | None = None) -> nvrtc.Cubin:
    """Compile the kernels `name` of `KERNELS`. Raises InputError if no NVRTC here compiles for `architecture`."""
    source = KERNELS[name]
    headers = [FOLDER / header for header in source.headers]
    return nvrtc.for_architecture(architecture, libraries).compile(FOLDER / source.file, architecture, headers)


def build(out: Path, architecture: str, *, code: str, libraries: Sequence[Path] | None = None) -> None:
    """Write `{name}.cubin` for every name of `KERNELS`, `build.json` and its manifest to the folder `out`.

    `libraries` are NVRTC libraries to choose from, by default those installed; `code` is the digest for the manifest.
    Raises InputError if none of them compiles for `architecture`.
    """
    cubins = {name: compile_kernels(name, architecture, libraries) for name in KERNELS}
    outputs = [out / "build.json"]
    record = {
        name: {
            "architecture": cubin.architecture,
            "nvrtc": cubin.nvrtc,
            "options": list(cubin.options),
            "sources": {file: sha256_file(PACKAGE_ROOT / file) for file in KERNELS[name].files},
            "size": len(cubin.code),
            "sha256": cubin.sha256,
        }
        for name, cubin in cubins.items()
    }
    for name, cubin in cubins.items():
        outputs.append(out / f"{name}.cubin")
        with atomic_file(outputs[-1]) as tmp:
            tmp.write_bytes(cubin.code)
    write_json(outputs[0], record)
    seal(
        out / "build.manifest.json",
        rule="build_kernels",
        outputs=outputs,
        inputs=[],
        parameters={"architecture": architecture},
        code=code,
    )
