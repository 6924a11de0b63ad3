# SPDX-License-Identifier: Apache-2.0
"""Record verification: a committed record is used only if its bytes, batches and checks hold on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from routeblock.evidence.archive import CONTENTS, changed
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal
from routeblock.timing.check import findings
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import Record, Study, usable


def unlisted(study: Study, source: Path, contents: Path) -> list[Finding]:
    """The files of a record that are not what the recording machine listed in `contents`.

    Raises InputError if that cannot be read.
    """
    files = changed((source / name for name in study.files), contents)
    return [Finding(str(path), Reason.SEAL, "not the bytes that were recorded") for path in files]


def module_of(function: Callable[..., Any]) -> str:
    """The module of a function, or of the one that a partial calls."""
    return str(getattr(function, "func", function).__module__)


def verify(
    study: Study,
    source: Path,
    protocol_path: Path,
    recompute: Callable[[Record, Any], list[Finding]],
    contents: Path | None = None,
) -> tuple[Record, list[Finding]]:
    """The record in `source`, and why it is refused: digests first; then batches, and what `recompute` finds.

    contents: the list of the recording machine, default `contents.json` in `source`. Raises InputError if a file is
    missing or malformed.
    """
    protocol, record = study.load(protocol_path), study.read(source)
    wrong = unlisted(study, source, contents or source / CONTENTS)
    if not wrong:
        with usable(source):
            wrong = findings(study, record, protocol) + recompute(record, protocol)
    return record, wrong


def write(
    out: Path,
    study: Study,
    source: Path,
    protocol: Path,
    recompute: Callable[[Record, Any], list[Finding]],
    *,
    rule: str,
) -> list[Finding]:
    """Copy the record in `source` to `out`, sealed by `{rule}.manifest.json`; if `verify` finds something, do not."""
    _, wrong = verify(study, source, protocol, recompute)
    if wrong:
        return wrong
    for name in study.files:
        with atomic_file(out / name) as tmp:
            shutil.copyfile(source / name, tmp)
    seal(
        out / f"{rule}.manifest.json",
        rule=rule,
        outputs=[out / name for name in study.files],
        inputs=[protocol, source / CONTENTS, *(source / name for name in study.files)],
        parameters={},
        modules=[module_of(recompute)],
    )
    return []
