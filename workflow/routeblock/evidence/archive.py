# SPDX-License-Identifier: Apache-2.0
"""Archives whose bytes depend on the files alone: sorted, without owner, mode or time."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from routeblock.evidence.digest import canonical_json, sha256_file
from routeblock.evidence.files import atomic_file

CONTENTS = "contents.json"


def pack(path: Path, files: Mapping[str, Path]) -> None:
    """Write `files` (name in the archive: file) and `contents.json` with size and SHA-256 of each to `path`, tar.gz."""
    contents = {name: {"size": p.stat().st_size, "sha256": sha256_file(p)} for name, p in files.items()}
    with (
        atomic_file(path) as tmp,
        tmp.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        _add(tar, CONTENTS, canonical_json(contents))
        for name in sorted(files):
            _add(tar, name, files[name].read_bytes())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))
