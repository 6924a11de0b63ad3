# SPDX-License-Identifier: Apache-2.0
"""A record of one GPU that is not of a timed study: sealed and packed where it is made, compared where it is proved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock.evidence import archive as archives
from routeblock.evidence.manifest import seal


@dataclass(frozen=True)
class GpuRecord:
    """What the folder of such a record holds; the rule `record_{study}` makes it."""

    study: str
    files: tuple[str, ...]
    archive: str

    def seal(self, folder: Path, given: Path, protocol_sha256: str, module: str) -> None:
        """Seal the files as made from `given` by the code of `module`, and pack them with their manifest."""
        written = [folder / name for name in self.files]
        manifest = folder / f"record_{self.study}.manifest.json"
        seal(
            manifest,
            rule=f"record_{self.study}",
            outputs=written,
            inputs=[given],
            parameters={"protocol_sha256": protocol_sha256},
            modules=[module],
        )
        archives.pack(folder / self.archive, {p.name: p for p in [*written, manifest]})

    def changed(self, source: Path) -> list[Path]:
        """The files that are not what the recording machine listed; raises InputError as `archives.listed`."""
        return archives.changed((source / name for name in self.files), source / archives.CONTENTS)


def plain(path: Path) -> Any:
    """The JSON of a file."""
    return json.loads(path.read_text(encoding="utf-8"))
