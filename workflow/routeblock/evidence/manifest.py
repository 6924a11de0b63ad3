# SPDX-License-Identifier: Apache-2.0
"""Manifests: each rule seals what it made, and from what, beside its outputs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, code_digest, sha256_file
from routeblock.evidence.files import DOCUMENT_BYTES, atomic_file

FORMAT = "routeblock.manifest.v1"
SUFFIX = ".manifest.json"

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Module = Annotated[str, Field(pattern="^routeblock([.][a-z0-9_]+)*$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Entry(_Model):
    """A sealed file: path relative to the manifest's folder (posix), size in bytes, SHA-256."""

    path: str
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256


class Manifest(_Model):
    """What one rule made, from what, with which code and parameters.

    `code` is the digest of `modules` and of all that they import; manifests of recorded evidence name no modules.
    """

    format: Literal["routeblock.manifest.v1"]
    rule: str
    parameters: dict[str, Any]
    code: Sha256
    modules: Annotated[tuple[Module, ...], FailFast()] = ()
    outputs: Annotated[tuple[Entry, ...], Field(min_length=1), FailFast()]
    inputs: Annotated[tuple[Entry, ...], FailFast()]


def parse(data: bytes) -> Manifest:
    """The manifest in the bytes of its file. Raises one of `errors.UNREADABLE` if it is none."""
    # Of a long list or mapping a model would note every entry that is wrong, which takes some hundred times the file.
    if len(data) > DOCUMENT_BYTES:
        document = json.loads(data)
        entries = (
            [e for name in ("outputs", "inputs") for e in document.get(name, ())] if type(document) is dict else []
        )
        if not entries or len(document) > len(Manifest.model_fields):
            raise ValueError("not the fields of a manifest")
        if odd := next((e for e in entries if type(e) is not dict or e.keys() != Entry.model_fields.keys()), None):
            raise ValueError(f"an entry {odd!a}"[:80])
    return Manifest.model_validate_json(data)


def seal(
    manifest_path: Path,
    *,
    rule: str,
    outputs: Iterable[Path],
    inputs: Iterable[Path],
    parameters: Mapping[str, Any],
    modules: Sequence[str],
    known: Mapping[Path, str] | None = None,
) -> None:
    """Write the manifest of `outputs`, atomically, as canonical JSON.

    A folder among `outputs` or `inputs` stands for every file below it that is no manifest. Outputs lie in the
    manifest's folder or below. `parameters` is JSON; `modules` are those whose code made the outputs, mostly the
    caller's `__name__`; `known` gives the SHA-256 of files that were hashed while they were written. Raises
    `InputError` if a file is missing or an output lies elsewhere.
    """
    if not manifest_path.name.endswith(SUFFIX):
        raise ValueError(f"a manifest is named *{SUFFIX}, not {manifest_path.name}")
    home = absolute(manifest_path.parent)
    made, used = _files(outputs), _files(inputs)
    for path in made:
        if not path.is_relative_to(home):
            raise InputError(
                "an output lies outside its manifest's folder",
                where=str(path),
                limit=f"outputs of {rule} lie below {home}",
                way_out="write it there or seal it where it lies",
            )
    digests = {absolute(p): sha256 for p, sha256 in (known or {}).items()}
    with ThreadPoolExecutor() as pool:
        made_entries, used_entries = (
            list(pool.map(lambda p: _entry(p, home, digests.get(p)), paths)) for paths in (made, used)
        )
    manifest = {
        "format": FORMAT,
        "rule": rule,
        "parameters": dict(parameters),
        "code": code_digest(*modules),
        "modules": list(modules),
        "outputs": made_entries,
        "inputs": used_entries,
    }
    data = canonical_json(manifest)
    Manifest.model_validate_json(data)
    with atomic_file(manifest_path) as tmp:
        tmp.write_bytes(data)


def absolute(path: Path) -> Path:
    """`path` made absolute and free of `..`, links left as they are."""
    # Not resolve(): results/ may be a link to a larger disk, and ../config.yaml is meant as seen from the checkout.
    return Path(os.path.abspath(path))  # noqa: PTH100


def _files(paths: Iterable[Path]) -> list[Path]:
    found: set[Path] = set()
    for path in paths:
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.is_file() and not p.name.endswith(SUFFIX))
            found.update(absolute(p) for p in inside)
        elif path.is_file():
            found.add(absolute(path))
        else:
            raise InputError(
                "no such file",
                where=str(path),
                limit="only a file that exists can be sealed",
                way_out="run the rule that makes it",
            )
    return sorted(found)


def _entry(path: Path, home: Path, known: str | None) -> dict[str, Any]:
    relative = Path(os.path.relpath(path, home)).as_posix()
    return {"path": relative, "size": path.stat().st_size, "sha256": known or sha256_file(path)}
