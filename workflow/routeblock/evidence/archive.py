# SPDX-License-Identifier: Apache-2.0
"""Archives whose bytes depend on the files alone: sorted, without owner, mode or time."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import canonical_json, sha256_file
from routeblock.evidence.files import atomic_file

CONTENTS = "contents.json"


def pack(path: Path, files: Mapping[str, Path]) -> None:
    """Write `files` (name in the archive: file) and `contents.json` with size and SHA-256 of each to `path`, tar.gz."""
    contents = canonical_json({name: {"size": p.stat().st_size, "sha256": sha256_file(p)} for name, p in files.items()})
    with (
        atomic_file(path) as tmp,
        tmp.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        _add(tar, CONTENTS, contents)
        for name in sorted(files):
            _add(tar, name, files[name].read_bytes())


def listed(contents: Path) -> dict[str, str]:
    """SHA-256 by name of the files that a `contents.json` lists. Raises InputError if it is no such list."""
    try:
        return {name: str(entry["sha256"]) for name, entry in json.loads(contents.read_bytes()).items()}
    except UNREADABLE as e:
        raise InputError(
            f"no list of contents: {e}",
            where=str(contents),
            limit="path, size and SHA-256 of each file are needed, as in the contents.json of a recorded archive",
            way_out="restore the file, or unpack the archive again",
        ) from e


def changed(files: Iterable[Path], contents: Path) -> list[Path]:
    """Those of `files` that a `contents.json` beside or above them lists otherwise. Raises InputError as `listed`."""
    digests = listed(contents)
    names = {path: Path(os.path.relpath(path, contents.parent)).as_posix() for path in files}
    return [path for path, name in names.items() if digests.get(name) != sha256_file(path)]


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))
