# SPDX-License-Identifier: Apache-2.0
"""Documents of a committed record that nothing here can make again: what was built, what the sanitizer found.

They are held against the list of contents that came with the archive from the recording machine, and against each
other, before a table is made from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from routeblock.errors import InputError
from routeblock.evidence.archive import changed, listed
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal

BUILD, SANITIZER = "build.json", "sanitizer.json"
KERNELS = "q6k_schedules"


def documents_of(source: Path) -> list[Path]:
    """The build and sanitizer documents below a committed record. Raises InputError if it lacks either kind."""
    found = sorted(path for name in (BUILD, SANITIZER) for path in source.rglob(name))
    for name in (BUILD, SANITIZER):
        if name not in {path.name for path in found}:
            raise InputError(
                f"no {name}", where=str(source), limit="a record has both kinds", way_out="restore the record"
            )
    return found


def deviations(source: Path, contents: Path) -> Iterator[str]:
    """Documents that are not the listed ones, and those that are about other kernels than the listed cubins."""
    found = documents_of(source)
    wrong = changed(found, contents)
    yield from (f"{path}: not the bytes that were recorded" for path in wrong)
    cubins = {name: digest for name, digest in listed(contents).items() if name.endswith(f"{KERNELS}.cubin")}
    for path in (path for path in found if path not in wrong):
        document = json.loads(path.read_bytes())
        if path.name == SANITIZER and document["cubin_sha256"] not in cubins.values():
            yield f"{path}: about a cubin that the contents do not list"
        if path.name == BUILD:
            name = (path.parent / f"{KERNELS}.cubin").relative_to(contents.parent).as_posix()
            if document[KERNELS]["sha256"] != cubins.get(name):
                yield f"{path}: about another cubin than the listed {name}"


def write(out: Path, source: Path, contents: Path) -> list[str]:
    """Copy the documents of `source` to `out`, sealed by `documents.manifest.json`.

    Returns what `deviations` finds; then nothing is written.
    """
    if wrong := list(deviations(source, contents)):
        return wrong
    found = documents_of(source)
    copies = [out / path.relative_to(source) for path in found]
    for path, copy in zip(found, copies, strict=True):
        with atomic_file(copy) as temporary:
            temporary.write_bytes(path.read_bytes())
    seal(
        out / "documents.manifest.json",
        rule="recorded_documents",
        outputs=copies,
        inputs=[contents, *found],
        parameters={},
        modules=[__name__],
    )
    return []
