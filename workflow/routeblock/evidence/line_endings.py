# SPDX-License-Identifier: Apache-2.0
"""Whether a checkout's files still have their line endings: git may change them, and every digest with them."""

from __future__ import annotations

from pathlib import Path

from routeblock.errors import InputError

TEXTS = (".json", ".jsonl", ".md", ".sha256", ".txt", ".yaml", ".cu", ".cuh", ".c")
CHUNK = 1 << 16  # the first line ends within it


def check_line_endings(*folders: Path) -> None:
    """Raise InputError for the first text below `folders` whose lines end in CR LF; none of this project's do."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in TEXTS and path.is_file():
                with path.open("rb") as f:
                    if b"\r\n" in f.read(CHUNK):
                        raise InputError(
                            "its lines end in CR LF",
                            where=str(path),
                            limit="digests are of the committed bytes, whose lines end in LF",
                            way_out=f"delete {folder} and run git checkout -- {folder}",
                        )
