# SPDX-License-Identifier: Apache-2.0
"""Statistics against their recount: tables are made only from numbers that both computations give."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import seal
from routeblock.evidence.parquet import read_parquet, rows_of
from routeblock.timing.batches import Row
from routeblock.timing.check import INCOMPLETE, findings
from routeblock.timing.plan import Key
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import BATCHES, Record, Study, usable
from routeblock.timing.recount import paired_ratios, recount

_STATISTICS, _RATIOS = "statistics.json", "ratios.parquet"


@dataclass(frozen=True)
class Recounted:
    """Every comparison by what names it, and the paired ratios."""

    rows: dict[Key, Row]
    ratios: list[Row]


def identity(study: Study, row: Row) -> Key:
    """What names a comparison."""
    names = (*study.key, *([clock] if (clock := study.table.names.get("clock")) else []), "series")
    return tuple(row[name] for name in names)


def recounted(study: Study, records: Sequence[Record], rows: Sequence[list[Row]], protocol: Any) -> Recounted:
    """The recount of records, whose batches are `rows`."""
    pairs = [asdict(pair) for record in records for pair in study.pairs(protocol, record)]
    every = [row for own in rows for row in own]
    found = recount(every, study.key, pairs, protocol.bootstrap.model_dump())
    return Recounted({identity(study, row): row for row in found}, paired_ratios(every, study.key, pairs))


def compare(study: Study, document: Row, ours: Mapping[Key, Row], digest: str) -> list[Finding]:
    """Where `document`, the contents of a statistics.json, is not exactly the recount under the protocol `digest`."""
    wrong = []
    if document["protocol_sha256"] != digest:
        wrong.append(Finding(_STATISTICS, Reason.PROTOCOL, f"carries protocol {document['protocol_sha256'][:12]}"))
    theirs: dict[Key, Row] = {}
    for row in document["comparisons"]:
        key = identity(study, row)
        if key in theirs:
            wrong.append(Finding(_named(key), Reason.COMPARISON_TWICE, "there twice"))
        elif key not in ours:
            wrong.append(Finding(_named(key), Reason.COMPARISON_UNKNOWN, "not in the protocol"))
        theirs[key] = row
    for key, mine in ours.items():
        if key not in theirs:
            wrong.append(Finding(_named(key), Reason.COMPARISON_MISSING, "only in the protocol"))
            continue
        for name in sorted(mine.keys() | theirs[key].keys()):
            pair = [repr(side[name]) if name in side else "not there" for side in (theirs[key], mine)]
            if pair[0] != pair[1]:  # as written: 40 is not 40.0
                wrong.append(Finding(_named(key), Reason.VALUE, f"{name} is {pair[0]}, recounted {pair[1]}"))
    return wrong


def _named(key: Key) -> str:
    return " ".join(map(str, key))


def _differing_ratios(path: Path, ours: list[Row]) -> list[Finding]:
    theirs = rows_of(read_parquet(path))
    if theirs == ours:
        return []
    pairs = (i for i, both in enumerate(zip(theirs, ours, strict=False)) if both[0] != both[1])
    row = next(pairs, min(len(theirs), len(ours)))
    detail = f"row {row} of {len(theirs)} is not that of the {len(ours)} recounted"
    return [Finding(str(path), Reason.VALUE, detail)]


def unsealed(study: Study, folder: Path) -> list[Finding]:
    """The files of a record that are not what its manifest sealed."""
    sealed: dict[str, str] = {}
    for manifest in sorted(folder.glob("*.manifest.json")):
        outputs = json.loads(manifest.read_text(encoding="utf-8"))["outputs"]
        if BATCHES in {entry["path"] for entry in outputs}:
            sealed = {entry["path"]: entry["sha256"] for entry in outputs}
    wrong = []
    for name in sorted({*sealed, *study.files}):
        path = folder / name
        digest = sha256_file(path) if path.is_file() else "nothing"
        if digest != sealed.get(name):
            document = f"edited: SHA-256 {digest[:16]}, sealed with {sealed.get(name, 'nothing')[:16]}"
            wrong.append(Finding(str(path), Reason.SEAL, document))
    return wrong


def disagreements(
    study: Study, statistics: Path, folders: Sequence[Path], protocol_path: Path, *, sealed: bool = True
) -> tuple[int, list[Finding]]:
    """How many comparisons were recounted, and whatever is not exactly equal or not as the protocol has it.

    Nothing is recounted from batches that leave the protocol otherwise than by stages or series that are not there.
    sealed: the records lie beside their manifests. Raises InputError if a file is missing or malformed.
    """
    protocol = study.load(protocol_path)
    records, rows, wrong = [], [], list[Finding]()
    for folder in folders:
        record = study.read(folder)
        with usable(folder):
            wrong += unsealed(study, folder) if sealed else []
            wrong += findings(study, record, protocol)
            rows.append(study.table.rows(record.batches))
        records.append(record)
    with usable(statistics):
        document = json.loads(statistics.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError("no mapping")
    if not {finding.reason for finding in wrong} <= INCOMPLETE:
        return 0, wrong
    ours = recounted(study, records, rows, protocol)
    with usable(statistics):
        wrong += compare(study, document, ours.rows, protocol.digest())
    with usable(ratios := statistics.with_name(_RATIOS)):
        wrong += _differing_ratios(ratios, ours.ratios)
    return len(ours.rows), wrong


def write(
    out: Path,
    study: Study,
    statistics: Path,
    folders: Sequence[Path],
    protocol: Path,
    *,
    rule: str,
    sealed: bool = True,
) -> tuple[int, list[Finding]]:
    """Write `validation.json` and its manifest to `out`; returns what `disagreements` does."""
    number, wrong = disagreements(study, statistics, folders, protocol, sealed=sealed)
    document = [{"where": f.where, "reason": str(f.reason), "detail": f.detail} for f in wrong]
    path = out / "validation.json"
    write_json(path, {"comparisons": number, "disagreements": document})
    seal(
        out / "validation.manifest.json",
        rule=rule,
        outputs=[path],
        inputs=[
            *(statistics, statistics.with_name(_RATIOS), protocol),
            *(folder / name for folder in folders for name in study.files),
        ],
        parameters={},
        modules=[study.module, __name__],
    )
    return number, wrong


def must_agree(path: Path) -> None:
    """Read a `validation.json`. Raises InputError if it is not one, compared nothing, or lists a disagreement."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        compared, found = int(document["comparisons"]), list(document["disagreements"])
    except UNREADABLE as e:
        raise InputError(
            f"no validation: {e}",
            where=str(path),
            limit="the validation.json of a study's statistics is needed",
            way_out="run its validation command",
        ) from e
    if found or not compared:
        raise InputError(
            f"the recount disagrees {len(found)} times in {compared} comparisons",
            where=str(path),
            limit="a table needs statistics that were computed twice with the same result",
            way_out="see the disagreements in that file",
        )
