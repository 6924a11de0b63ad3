# SPDX-License-Identifier: Apache-2.0
"""What the report rests on: from its own inputs back along the manifests to what was given.

Only seals are compared here, and the bytes of what the report reads; `verify` is what reads every byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import sha256_bytes, sha256_file
from routeblock.evidence.manifest import SUFFIX, Manifest, absolute, parse


@dataclass(frozen=True)
class File:
    """A file: path as seen from the checkout (posix), size in bytes, SHA-256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Seal:
    """A manifest: the file itself, its rule and code digest, what it lists, and the rules whose outputs it used."""

    file: File
    rule: str
    code: str
    outputs: tuple[File, ...]
    inputs: tuple[File, ...]
    uses: tuple[str, ...]


@dataclass
class Lineage:
    """Manifests, producers before consumers; what no manifest produced; the seal of each produced file by path."""

    root: Path
    seals: list[Seal] = field(default_factory=list)
    given: list[File] = field(default_factory=list)
    by_output: dict[str, Seal] = field(default_factory=dict)

    def files(self, rule: str, name: str) -> list[File]:
        """Outputs of this file name that the rule made, in the order of the seals."""
        return [f for s in self.seals if s.rule == rule for f in s.outputs if f.path.rsplit("/", 1)[-1] == name]

    def locate(self, file: File) -> Path:
        """Where a file of the lineage lies."""
        return self.root / file.path


def trace(results: Path, files: Iterable[Path], given: Iterable[Path] = ()) -> Lineage:
    """Walk back from `files`, results below `results`, and `given` ones; paths are told from the folder of `results`.

    Raises InputError where a file was not sealed, is not what was sealed, or was made from another version of its
    input than that input's producer sealed.
    """
    root = absolute(results).parent
    read = {absolute(p): _read(p) for p in sorted(results.rglob(f"*{SUFFIX}"))}
    # Of a file: the manifest that lists it, and with what size and digest. A manifest itself may be an input.
    listed = {p: (p, size, digest) for p, (_, size, digest) in read.items()}
    listed |= {absolute(p.parent / e.path): (p, e.size, e.sha256) for p, (m, _, _) in read.items() for e in m.outputs}
    todo = [absolute(f) for f in files]
    for path in todo:
        if path not in listed:
            raise _refuse(path, root, "no manifest seals it", "build it with the workflow")
        if _measure(path, root) != listed[path][1:]:
            raise _refuse(path, root, "it is not what its manifest sealed", "run make repair")
    lineage = Lineage(root)
    found = {path: File(shown_path(path, root), *_measure(path, root)) for path in map(absolute, given)}
    used: dict[Path, set[Path]] = {}
    while todo:
        path = todo.pop()
        if path not in listed or (manifest := listed[path][0]) in used:
            continue
        used[manifest] = set()
        for e in read[manifest][0].inputs:
            source = absolute(manifest.parent / e.path)
            if source not in listed:
                found.setdefault(source, File(shown_path(source, root), e.size, e.sha256))
                continue
            if listed[source][1:] != (e.size, e.sha256):
                what = f"made from another version of {shown_path(source, root)} than is there now"
                raise _refuse(manifest, root, what, "run make repair")
            used[manifest].add(listed[source][0])
            todo.append(source)
    for p in TopologicalSorter({p: sorted(makers) for p, makers in sorted(used.items())}).static_order():
        sealed, size, digest = read[p]
        outputs, inputs = (
            tuple(File(shown_path(absolute(p.parent / e.path), root), e.size, e.sha256) for e in entries)
            for entries in (sealed.outputs, sealed.inputs)
        )
        uses = tuple(sorted({read[maker][0].rule for maker in used[p]}))
        seal = Seal(File(shown_path(p, root), size, digest), sealed.rule, sealed.code, outputs, inputs, uses)
        lineage.seals.append(seal)
        lineage.by_output |= {f.path: seal for f in outputs}
    lineage.given = sorted(found.values(), key=lambda f: f.path)
    return lineage


def _read(path: Path) -> tuple[Manifest, int, str]:
    try:
        data = path.read_bytes()
        return parse(data), len(data), sha256_bytes(data)
    except UNREADABLE as e:
        raise InputError(
            "not a readable manifest",
            where=str(path),
            limit="the report follows every manifest of the results",
            way_out="run make verify, then make repair",
        ) from e


def _measure(path: Path, root: Path) -> tuple[int, str]:
    try:
        return path.stat().st_size, sha256_file(path)
    except OSError as e:
        raise _refuse(path, root, f"not readable: {e.strerror}", "run make study") from e


def shown_path(path: Path, root: Path) -> str:
    """A path as seen from the checkout, posix."""
    return Path(os.path.relpath(path, root)).as_posix()


def _refuse(path: Path, root: Path, what: str, way_out: str) -> InputError:
    return InputError(
        what, where=shown_path(absolute(path), root), limit="a report rests on sealed files", way_out=way_out
    )
