# SPDX-License-Identifier: Apache-2.0
"""Study B's download: raw batches, comparisons, cardinalities, binary identities, ratios and intervals, tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from routeblock.errors import InputError
from routeblock.evidence.archive import pack
from routeblock.evidence.manifest import seal

ARCHIVE = "grouped_schedule.tar.gz"


def _files(sources: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        if not source.exists():
            raise InputError(
                "nothing there", where=str(source), limit="files and folders", way_out="run make study first"
            )
        found += [p for p in source.rglob("*") if p.is_file()] if source.is_dir() else [source]
    return sorted(set(found))


def write(out: Path, sources: Sequence[Path], *, readme: Path) -> Path:
    """Pack `sources`, relative to the working directory, into `{ARCHIVE}` in `out`, sealed; returns its path.

    `readme` becomes README.md at the top. Raises InputError if one is missing or lies outside the working directory.
    """
    files = _files(sources)
    outside = [p for p in files if p.is_absolute() or ".." in p.parts]
    if outside:
        raise InputError(
            "lies outside the working directory",
            where=str(outside[0]),
            limit="names in the archive are relative paths",
            way_out="start from the folder that holds it",
        )
    path = out / ARCHIVE
    pack(path, {p.as_posix(): p for p in files} | {"README.md": readme})
    inputs = [p for p in [*files, readme] if not p.name.endswith(".manifest.json")]
    seal(out / "bundle.manifest.json", rule="bundle", outputs=[path], inputs=inputs, parameters={}, modules=[__name__])
    return path
