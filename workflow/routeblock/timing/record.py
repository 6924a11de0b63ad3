# SPDX-License-Identifier: Apache-2.0
"""A study, and the folder of its record: a table of batches and JSON documents, sealed and packed where it is made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence import archive as archives
from routeblock.evidence.files import atomic_file, write_json
from routeblock.evidence.manifest import seal
from routeblock.timing.batches import BatchTable, Row
from routeblock.timing.plan import Checked, Pair, Stage
from routeblock.timing.protocol import Whole
from routeblock.timing.reasons import Finding

BATCHES = "batches.parquet"


@dataclass(frozen=True)
class Record:
    """The contents of a record's folder: batches, and documents by the stem of their file."""

    folder: Path
    batches: list[Any]
    documents: dict[str, Any]

    @property
    def run(self) -> dict[str, Any]:
        """run.json: device, protocol, checks, counts of batches."""
        run: dict[str, Any] = self.documents["run"]
        return run


@dataclass(frozen=True)
class Study:
    """All that `timing` has to know of a study. Functions get the protocol that `load` gives, and a `Record`.

    module: whose code it is. documents: the JSON files of a record, in order. key: the columns that name a stage.
    stages, pairs: the plan for the device of a record. checks: what was checked before timing. documents_check:
    findings in the documents alone. counted: the kind under which run.json counts a batch.
    """

    name: str
    module: str
    table: BatchTable[Any]
    documents: tuple[str, ...]
    key: tuple[str, ...]
    load: Callable[[Path], Any]
    protocol: type[Whole]
    stages: Callable[[Any, Record], Sequence[Stage]]
    pairs: Callable[[Any, Record], Sequence[Pair]]
    checks: Callable[[Record], Sequence[Checked]]
    documents_check: Callable[[Any, Record], Iterator[Finding]]
    counted: Callable[[Row], str]

    @property
    def files(self) -> tuple[str, ...]:
        """The files of a record."""
        return (BATCHES, *(f"{name}.json" for name in self.documents))

    @property
    def archive(self) -> str:
        """The name of a record in one file."""
        return f"{self.name}.tar.gz"

    def write(self, folder: Path, batches: Sequence[Any], documents: Mapping[str, Any]) -> None:
        """Write the batches and those documents that there are."""
        with atomic_file(folder / BATCHES) as tmp:
            self.table.write(tmp, batches)
        for name, document in documents.items():
            write_json(folder / f"{name}.json", document)

    def seal(self, folder: Path, rule: str, protocol: Path, modules: Sequence[str]) -> None:
        """Seal the files that are there, and pack them with their manifest."""
        written = [folder / name for name in self.files if (folder / name).is_file()]
        manifest = folder / f"{rule}.manifest.json"
        parameters = {"protocol_sha256": self.load(protocol).digest()}
        seal(manifest, rule=rule, outputs=written, inputs=[protocol], parameters=parameters, modules=modules)
        archives.pack(folder / self.archive, {p.name: p for p in [*written, manifest]})

    def read(self, folder: Path) -> Record:
        """Read a record's folder. Raises InputError if a file is missing or malformed."""
        found: dict[str, Any] = {}
        for name in self.documents:
            path = folder / f"{name}.json"
            with usable(path):
                found[name] = json.loads(path.read_text(encoding="utf-8"))
        return Record(folder, self.table.read(folder / BATCHES), found)


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """A file or record without what is read from it here is refused by name."""
    try:
        yield
    except InputError:
        raise
    except UNREADABLE as e:
        raise InputError(
            f"lacks {e}" if isinstance(e, KeyError) else f"cannot be used: {e}",
            where=str(path),
            limit="a sealed record, what was made from it, and its committed protocol are needed",
            way_out="restore the file, or make it again with the command that wrote it",
        ) from e
