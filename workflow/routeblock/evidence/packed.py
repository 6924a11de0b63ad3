# SPDX-License-Identifier: Apache-2.0
"""Folders of sealed results as lines of JSON and a store of tensors, and back, bit for bit.

A line is a folder: its canonical JSON files as documents, its tensor files as digests by name, and the SHA-256 of every
file, which the rebuilt file must have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import canonical_json, sha256_array, sha256_file
from routeblock.evidence.files import atomic_file
from routeblock.evidence.tensors import load_tensors, save_tensors

TENSORS_SUFFIX = ".safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

Line = dict[str, Any]
Tensors = dict[str, NDArray[Any]]


def pack(root: Path, files: Iterable[Path], tensors: Tensors) -> Iterator[Line]:
    """One line for each folder below `root` that holds some of `files`, in order; their tensors go to `tensors`.

    Raises InputError for a file that is neither canonical JSON nor a tensor file.
    """
    folders: dict[Path, list[Path]] = {}
    for path in sorted(files):
        folders.setdefault(path.parent, []).append(path)
    for folder, inside in sorted(folders.items()):
        line: Line = {
            "folder": folder.relative_to(root).as_posix(),
            "documents": {},
            "tensors": {},
            "sha256": {path.name: sha256_file(path) for path in inside},
        }
        for path in inside:
            if path.name.endswith(TENSORS_SUFFIX):
                found = load_tensors(path)
                line["tensors"][path.name] = {name: sha256_array(x) for name, x in found.items()}
                tensors.update({sha256_array(x): x for x in found.values()})
            else:
                line["documents"][path.name] = _canonical(path)
        yield line


def unpack(line: Line, tensors: Mapping[str, NDArray[Any]], root: Path, *, where: str) -> list[Path]:
    """Rebuild the folder of a line below `root`; returns its files. Raises InputError if a byte is not as packed."""
    folder = _inside(root, line["folder"], where)
    made = []
    for name, sha256 in line["sha256"].items():
        # File by file: results made from it may lie beside it already.
        with atomic_file(_inside(folder, name, where)) as temporary:
            if name in line["tensors"]:
                save_tensors(temporary, {n: _tensor(tensors, d, where) for n, d in line["tensors"][name].items()})
            else:
                temporary.write_bytes(canonical_json(line["documents"][name]))
            if sha256_file(temporary) != sha256:
                raise _refuse(where, f"{line['folder']}/{name} is rebuilt to other bytes", f"SHA-256 {sha256}")
        made.append(folder / name)
    return made


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """Write lines to a path inside a folder that is being made."""
    path.write_bytes(b"".join(canonical_json(line) + b"\n" for line in lines))


def read_lines(path: Path) -> list[Line]:
    """Read lines. Raises InputError if they are not canonical JSON of this form."""
    try:
        data = path.read_bytes()
        lines = [json.loads(line) for line in data.splitlines()]
        if b"".join(canonical_json(line) + b"\n" for line in lines) != data:
            raise ValueError("not canonical")
        for line in lines:
            if line.keys() != {"folder", "documents", "tensors", "sha256"}:
                raise ValueError(f"keys {', '.join(sorted(line))}")
            names = [line["folder"], *line["sha256"].values()]
            names += [x for tensors in line["tensors"].values() for pair in tensors.items() for x in pair]
            if not all(type(name) is str for name in names):
                raise ValueError("folders, digests and tensors are texts")
            if line["sha256"].keys() != line["documents"].keys() | line["tensors"].keys():
                raise ValueError(f"{line['folder']} lists other files than it holds")
        return lines
    except UNREADABLE as e:
        raise _refuse(str(path), f"not readable: {str(e)[:80]}", "lines of canonical JSON, one a folder") from e


def _canonical(path: Path) -> Any:
    data = path.read_bytes()
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if document is None or canonical_json(document) != data:
        raise _refuse(str(path), "neither canonical JSON nor a tensor file", "only such files are packed")
    return document


def _tensor(tensors: Mapping[str, NDArray[Any]], digest: str, where: str) -> NDArray[Any]:
    if digest not in tensors:
        raise _refuse(where, f"no tensor {digest[:16]}", "every tensor of a run is in the store")
    return tensors[digest]


def _inside(root: Path, relative: str, where: str) -> Path:
    if relative != "." and not all(NAME.fullmatch(part) for part in relative.split("/")):
        raise _refuse(where, f"a path {relative!r}", "paths stay inside the folder")
    return root / relative


def _refuse(where: str, what: str, limit: str) -> InputError:
    return InputError(what, where=where, limit=limit, way_out="restore the evidence from where it was published")
