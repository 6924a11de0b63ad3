# SPDX-License-Identifier: Apache-2.0
"""Is an edited record refused for the reason declared beforehand, and the unchanged one accepted?

Each edit is judged by whatever can see it: the protocol check, the record verification (plans, inputs and outputs
computed again), and, where statistics are edited, the recount. Digests are left aside: a forger writes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import small_document, write_json
from routeblock.evidence.manifest import seal
from routeblock.timing import edits
from routeblock.timing.check import check
from routeblock.timing.edits import Copy, ImpossibleError, Room
from routeblock.timing.protocol import Strict, fault
from routeblock.timing.reasons import EDITS_FORMAT as FORMAT
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import Record, Study, usable
from routeblock.timing.statistics import comparisons
from routeblock.timing.validation import Recounted, compare, recounted
from routeblock.timing.verification import module_of

Recompute = Callable[[Record, Any], list[Finding]]


class By(StrEnum):
    """Who refuses an edit."""

    CHECK = "protocol check"
    VERIFICATION = "record verification"
    RECOUNT = "recount"


class OfStudy(Strict):
    """What is declared for one study: the reasons, and the change in its own words where `change` does not fit."""

    reasons: tuple[Reason, ...]
    by: By | None = None
    change: str | None = None


class Declared(Strict):
    """One edit as declared beforehand. No reasons: the copy is to be accepted."""

    name: str
    by: By
    change: str
    studies: dict[str, OfStudy]


class _File(Strict):
    format: Literal["routeblock.declared_record_edits.v1"]
    edits: tuple[Declared, ...]


@dataclass(frozen=True)
class Entry:
    """An edit as declared for one study."""

    name: str
    by: By
    change: str
    reasons: tuple[Reason, ...]


def read_declared(path: Path, study: str, room: Room) -> list[Entry]:
    """The edits declared for a study. Raises InputError if the file is malformed or declares an edit twice or not."""
    try:
        declared = _File.model_validate_json(small_document(path)).edits
        names = [d.name for d in declared if study in d.studies]
        general = {d.name for d in declared}
        unknown = {*names} - edits.known(room).keys()
        if other := sorted(unknown | ({*edits.known(room)} - general)):
            raise ValueError(f"not each known edit once: {', '.join(other)}")
        if len(names) != len({*names}) or not names:
            raise ValueError("not each known edit once: one is there twice, or the study has none")
    except UNREADABLE as e:
        raise InputError(
            fault(e),
            where=str(path),
            limit="each edit of timing/edits.py and of the study's edits.py is declared once",
            way_out="use fixtures/record_edits.json",
        ) from e
    found = []
    for d in declared:
        if mine := d.studies.get(study):
            found.append(Entry(d.name, mine.by or d.by, mine.change or d.change, mine.reasons))
    return found


@dataclass(frozen=True)
class _Sound:
    """A record as it is, what the protocol check finds in it, and its recount."""

    copy: Copy
    folder: Path
    checked: list[Finding]
    recounted: Recounted


def _sound(study: Study, room: Room, folder: Path, protocol_path: Path) -> _Sound:
    protocol, record = study.load(protocol_path), study.read(folder)
    with usable(folder):
        rows = study.table.rows(record.batches)
        found = comparisons(rows, study.key, study.pairs(protocol, record), protocol.bootstrap)
        document = {"protocol_sha256": protocol.digest(), "comparisons": [c.row() for c in found]}
        rules = json.loads(protocol_path.read_text(encoding="utf-8"))
        copy = Copy(study, room, rows, record.documents, rules, document).again()
        ours = recounted(study, [record], [rows], protocol)
        return _Sound(copy, folder, check(study, record, rows, protocol), ours)


def _judge(edited: Copy, name: str, sound: _Sound, recompute: Recompute) -> dict[By, list[Finding]]:
    """What each finds. An edit of the statistics leaves the check as it was, any other leaves the statistics aside."""
    of_statistics = edits.is_of_statistics(name) or name == edits.UNCHANGED
    protocol = edited.study.protocol.model_validate(edited.rules)
    record = Record(sound.folder, [], edited.documents)
    document: list[Finding] = []
    if of_statistics:
        document = compare(edited.study, edited.statistics, sound.recounted.rows, protocol.digest())
    checked = sound.checked if of_statistics else check(edited.study, record, edited.rows, protocol)
    return {By.CHECK: checked, By.VERIFICATION: recompute(record, protocol), By.RECOUNT: document}


def _codes(found: Iterable[Finding]) -> list[str]:
    return sorted({str(f.reason) for f in found})


def _try(sound: _Sound, declared: Entry, recompute: Recompute) -> dict[str, Any]:
    entry = {"name": declared.name, "by": declared.by, "change": declared.change, "reasons": list(declared.reasons)}
    edited = sound.copy.again()
    try:
        edits.apply(edited, declared.name)
    except ImpossibleError as e:
        return entry | {"found": [], "findings": 0, "first": None, "as_declared": None, "note": str(e)}
    found = _judge(edited, declared.name, sound, recompute)
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


def mutate(
    study: Study, room: Room, folders: Sequence[Path], protocol: Path, declared: Path, recompute: Recompute
) -> list[dict[str, Any]]:
    """Judge every edit that is declared for the study, on the first record in `folders` that has room for it.

    Returns the entries: declared reasons, reasons found, and whether they agree (None where no record has room).
    Raises InputError if an input cannot be read.
    """
    entries = read_declared(declared, study.name, room)
    every = [_sound(study, room, folder, protocol) for folder in folders]
    found = []
    with usable(folders[0]):
        for entry in entries:
            tried: dict[str, Any] = {}
            for sound in every:
                tried = _try(sound, entry, recompute)
                if tried["as_declared"] is not None:
                    break
            found.append(tried)
    return found


def write(
    out: Path,
    study: Study,
    room: Room,
    folders: Sequence[Path],
    protocol: Path,
    declared: Path,
    recompute: Recompute,
    *,
    rule: str,
) -> list[dict[str, Any]]:
    """Write `mutations.json` and its manifest to the folder `out`; returns what `mutate` does."""
    entries = mutate(study, room, folders, protocol, declared, recompute)
    path = out / "mutations.json"
    write_json(path, {"format": FORMAT, "declared": sha256_file(declared), "mutations": entries})
    seal(
        out / "mutations.manifest.json",
        rule=rule,
        outputs=[path],
        inputs=[declared, protocol, *(folder / name for folder in folders for name in study.files)],
        parameters={},
        modules=[study.module, room.module, module_of(recompute), __name__],
    )
    return entries


def misjudged(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """The edits that were not judged as declared, one line each."""
    return [
        f"{e['name']}: {', '.join(e['found']) or 'nothing'} found, declared {', '.join(e['reasons']) or 'nothing'}"
        for e in entries
        if e["as_declared"] is False
    ]
