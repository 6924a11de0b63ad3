# SPDX-License-Identifier: Apache-2.0
"""A study's record of one GPU: sealed and packed where it is made, compared and copied where it is proved again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock.errors import InputError
from routeblock.evidence import archive as archives
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal


@dataclass(frozen=True)
class GpuRecord:
    """What the folder of such a record holds; `record_{study}` makes it and `recorded_{study}` proves it again."""

    study: str
    files: tuple[str, ...]
    archive: str

    def seal(self, folder: Path, protocol: Path, protocol_sha256: str, modules: Sequence[str]) -> None:
        """Seal what is there of the files, and pack it with its manifest."""
        written = [folder / name for name in self.files if (folder / name).is_file()]
        manifest = folder / f"record_{self.study}.manifest.json"
        seal(
            manifest,
            rule=f"record_{self.study}",
            outputs=written,
            inputs=[protocol],
            parameters={"protocol_sha256": protocol_sha256},
            modules=modules,
        )
        archives.pack(folder / self.archive, {p.name: p for p in [*written, manifest]})

    def changed(self, source: Path) -> list[Path]:
        """The files that are not what the recording machine listed; raises InputError as `archives.listed`."""
        return archives.changed((source / name for name in self.files), source / archives.CONTENTS)

    def copy(self, source: Path, out: Path, protocol: Path, modules: Sequence[str]) -> None:
        """Copy the files, sealed as what was proved again."""
        for name in self.files:
            with atomic_file(out / name) as tmp:
                shutil.copyfile(source / name, tmp)
        seal(
            out / f"recorded_{self.study}.manifest.json",
            rule=f"recorded_{self.study}",
            outputs=[out / name for name in self.files],
            inputs=[protocol, source / archives.CONTENTS, *(source / name for name in self.files)],
            parameters={},
            modules=modules,
        )


def plain(path: Path) -> Any:
    """The JSON of a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def documents(folder: Path, files: Iterable[str], way_out: str, read: Callable[[Path], Any] = plain) -> list[Any]:
    """The JSON files of a record, whose first file is a table. Raises InputError if one is missing or malformed."""
    table, *others = files
    try:
        return [read(folder / name) for name in others]
    except (OSError, ValueError) as e:
        raise InputError(
            f"not a record: {e}",
            where=str(folder),
            limit=f"it holds {', '.join((table, *others))}",
            way_out=way_out,
        ) from e
