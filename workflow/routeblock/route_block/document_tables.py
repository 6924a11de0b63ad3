# SPDX-License-Identifier: Apache-2.0
"""Tables of study A: each is made from JSON documents of one format, those of several lanes and points in one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from routeblock import tables
from routeblock.errors import UNREADABLE, InputError
from routeblock.route_block.paths import Source

Document = dict[str, Any]


@dataclass(frozen=True)
class Documents:
    """The documents of a table: their format, and where they lie."""

    format: str
    source: Source


@dataclass(frozen=True)
class Evidence:
    """What a table is made from: its documents in the order of its rows, and the published numbers."""

    documents: Sequence[Document]
    published: Document


@dataclass(frozen=True)
class DocumentTable(tables.Table[Evidence]):
    """A table of study A, with the documents that it is made from."""

    made_from: Documents = field(kw_only=True)


def write(table: DocumentTable, sources: Sequence[Path], published: Path, out: Path) -> list[Path]:
    """Write a table to the folder `out`, sealed by `{name}.manifest.json`.

    `sources`: the files of its documents, in the order of its rows. Raises InputError for a file that is another
    document, broken, or a score that is not sound.
    """
    told = _read(published, "routeblock.published_route_block.v1")
    documents = [_read(source, table.made_from.format) for source in sources]
    for source, document in zip(sources, documents, strict=True):
        if not document.get("sound", True):
            raise InputError(
                "these runs are not sound",
                where=str(source),
                limit="tables are made from evidence without a fault",
                way_out="see what routeblock study-a score says of it",
            )
    rows = table.rows(Evidence(documents, told))
    return tables.write_sealed(out, table, rows, inputs=[*sources, published])


def _read(path: Path, format_: str) -> Document:
    try:
        document = json.loads(path.read_bytes())
    except UNREADABLE as e:
        raise InputError(f"not readable: {e}", where=str(path), limit="JSON", way_out="make it again") from e
    if not isinstance(document, dict) or document.get("format") != format_:
        raise InputError("another document", where=str(path), limit=f"format {format_}", way_out="name the right file")
    return document
