# SPDX-License-Identifier: Apache-2.0
"""The table of a record's edited copies: a `mutations.json` as rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from routeblock.errors import UNREADABLE, InputError
from routeblock.tables import Column
from routeblock.timing.reasons import EDITS_FORMAT as FORMAT


def read(path: Path) -> list[dict[str, Any]]:
    """The entries of a `mutations.json`. Raises InputError if it is not one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}")
        return list(document["mutations"])
    except UNREADABLE as e:
        raise InputError(
            f"no edits of a record: {e}",
            where=str(path),
            limit="the mutations.json of a study's record is needed",
            way_out="run its command for edits",
        ) from e


COLUMNS = (
    *(Column(name) for name in ("edit", "change", "by", "declared", "found")),
    Column("findings", "count"),
    Column("as_declared", "flag"),
)
NOTES = (
    "Declared beforehand in fixtures/record_edits.json. Each edit is written as a forger would: counts and digests fit "
    "again. by: the protocol check compares every batch with the protocol; record verification computes plans, inputs "
    "and outputs again; the recount computes the statistics again. as_declared: refused by that one alone, for exactly "
    "the declared reasons; the unchanged copy for none."
)


def table(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each edited copy: the change, who has to refuse it, for which reasons, and for which it was refused."""
    return [
        {"edit": e["name"], "change": e["change"], "by": e["by"], "findings": e["findings"]}
        | {"declared": ", ".join(e["reasons"]), "found": e["note"] or ", ".join(e["found"])}
        | {"as_declared": e["as_declared"]}
        for e in entries
    ]
