# SPDX-License-Identifier: Apache-2.0
"""Is an edited record of the cost refused, for the reason declared beforehand, and the unchanged one accepted?

Each edit is judged by what it may be seen by: the walk over its batches and documents, its plans and variants, and,
where the statistics are edited, by the second computation. Digests are left aside: a forger writes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from routeblock.alignment_cost import conform, edits, record, reprove, validate
from routeblock.alignment_cost import statistics as figures
from routeblock.alignment_cost.edits import Copy, ImpossibleError
from routeblock.alignment_cost.protocol import Protocol, load
from routeblock.alignment_cost.reasons import Finding, Reason
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import seal
from routeblock.protocols import Strict, fault

FORMAT = "routeblock.alignment_mutations.v1"


class By(StrEnum):
    """Who refuses: `conform` serves reproof and validator both."""

    CONFORM = "conform"
    REPROVE = "reprove"
    VALIDATE = "validate"


class Declared(Strict):
    """One edit as declared beforehand. No reasons: the copy is to be accepted."""

    name: str
    by: By
    change: str
    reasons: tuple[Reason, ...]


class _File(Strict):
    format: Literal["routeblock.declared_alignment_mutations.v1"]
    mutations: tuple[Declared, ...]


def read_declared(path: Path) -> tuple[Declared, ...]:
    """The declared edits. Raises InputError if the file is malformed or does not declare each known one once."""
    try:
        declared = _File.model_validate_json(path.read_bytes()).mutations
        if sorted(d.name for d in declared) != sorted(edits.EDITS):
            other = sorted({d.name for d in declared} ^ edits.EDITS.keys())
            raise ValueError(f"not each known edit once: {', '.join(other) or 'one is there twice'}")
    except (OSError, ValueError) as e:
        raise InputError(
            fault(e),
            where=str(path),
            limit="each edit of alignment_cost/edits.py is declared once",
            way_out="use fixtures/alignment_mutations.json",
        ) from e
    return declared


@dataclass(frozen=True)
class _Sound:
    """The record as it is, where it lies, what the walk finds, and what the second computation gives."""

    copy: Copy
    folder: Path
    walked: list[Finding]
    recomputed: dict[validate.Key, dict[str, Any]]


def _walk(copy: Copy) -> list[Finding]:
    return conform.deviations(copy.rows, copy.run, copy.exactness, copy.sanitizer, copy.rules)


def _judge(edited: Copy, name: str, sound: _Sound) -> dict[By, list[Finding]]:
    """What each finds. An edit of the statistics leaves the walk as it was, any other leaves the statistics aside."""
    told_again = name in (*edits.STATISTICS, edits.UNCHANGED)
    told = record.Recorded(sound.folder, [], edited.run, edited.exactness, edited.sanitizer)
    return {
        By.CONFORM: sound.walked if told_again else _walk(edited),
        By.REPROVE: reprove.disagreements(told, Protocol.model_validate(edited.rules)),
        By.VALIDATE: validate.compare(edited.statistics, sound.recomputed, edited.rules) if told_again else [],
    }


def _codes(found: Iterable[Finding]) -> list[str]:
    return sorted({str(f.reason) for f in found})


def _try(sound: _Sound, declared: Declared) -> dict[str, Any]:
    entry = declared.model_dump(mode="json")
    edited = sound.copy.again()
    try:
        edits.EDITS[declared.name](edited)
    except ImpossibleError as e:
        return entry | {"found": [], "findings": 0, "first": None, "as_declared": None, "note": str(e)}
    if declared.name in edits.BATCHES:
        edited.count()
    found = _judge(edited, declared.name, sound)
    codes = {by: _codes(findings) for by, findings in found.items()}
    wanted = {by: sorted(map(str, declared.reasons)) if by is declared.by else [] for by in By}
    every = [finding for findings in found.values() for finding in findings]
    return entry | {
        "found": sorted({code for mine in codes.values() for code in mine}),
        "findings": len(every),
        "first": str(every[0]) if every else None,
        "as_declared": codes == wanted,
        "note": None,
    }


def mutate(folder: Path, statistics: Path, protocol: Path, declared: Path) -> list[dict[str, Any]]:
    """Judge every edit of the record in `folder` and its statistics.

    Returns the entries: declared reasons, reasons found, and whether they agree (None where this record has no room
    for the edit). Raises InputError if an input cannot be read.
    """
    entries = read_declared(declared)
    load(protocol)
    found = record.read(folder)
    figures.read(statistics)
    try:
        rules, told = (json.loads(path.read_text(encoding="utf-8")) for path in (protocol, statistics))
        rows = [dict(vars(batch)) for batch in found.batches]
        whole = Copy(rows, found.run, found.exactness, found.sanitizer, rules, told)
        sound = _Sound(whole, folder, _walk(whole), validate.recompute(rows, rules))
        return [_try(sound, entry) for entry in entries]
    except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError) as e:
        raise InputError(
            f"cannot be read: {e!r}",
            where=str(folder),
            limit="edits are tried on a record that conforms, and its statistics",
            way_out="run validate-alignment first",
        ) from e


def write(out: Path, folder: Path, statistics: Path, protocol: Path, declared: Path) -> list[dict[str, Any]]:
    """Write `mutations.json` and its manifest to the folder `out`; returns what `mutate` does."""
    entries = mutate(folder, statistics, protocol, declared)
    path = out / "mutations.json"
    write_json(path, {"format": FORMAT, "declared": sha256_file(declared), "mutations": entries})
    seal(
        out / "mutations.manifest.json",
        rule="alignment_mutations",
        outputs=[path],
        inputs=[declared, protocol, statistics, *(folder / name for name in record.FILES)],
        parameters={},
        modules=[__name__],
    )
    return entries


def read(path: Path) -> list[dict[str, Any]]:
    """The entries of a `mutations.json`. Raises InputError if it is none."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']}")
        return list(told["mutations"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(
            f"no edits of a record: {e}",
            where=str(path),
            limit="a file of `routeblock mutate-alignment` is needed",
            way_out="run that command",
        ) from e
