# SPDX-License-Identifier: Apache-2.0
"""Generated mutants of records: is each refused, with a reason, and is every legitimate variation accepted?

PYTHONPATH=tests/route_block python tests/reliability/mutants.py --each 110 --seed 1 --out FILE

Study A: runs of a small study without GEMMs, as twin and as GPU lane (tests/route_block/synthetic.py), judged by the
scorer, sealed anew after the edit. Timed studies: the committed records, judged as `timing` judges them; every digest
that follows from the edit is written anew. Two lines of defence are counted apart there: what the protocol, the
recomputation and the recount find, and what only the list of the recording machine (contents.json) shows, which is
committed with the record. What neither finds is accepted, and a fault.

An edit counts only if it changes meaning: canonical JSON, bytes of a tensor or the order or values of batches are not
what they were. Which run made what, in which order in its file, is meaning; when it ran is not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from leaves import Place, edit_leaf, other
from synthetic import LAUNCH, SignatureLane, Study, following, make_study

from routeblock.alignment_cost import verification as alignment_verification
from routeblock.alignment_cost.study import STUDY as ALIGNMENT_COST
from routeblock.errors import InputError
from routeblock.evidence import chain
from routeblock.evidence.archive import CONTENTS
from routeblock.evidence.digest import canonical_json, sha256_array
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.record import (
    RECORD,
    RECORD_MANIFEST,
    TELEMETRY,
    TELEMETRY_MANIFEST,
    TENSORS,
)
from routeblock.evidence.tensors import load_tensors, save_tensors
from routeblock.grouped_schedule import verification as grouped_verification
from routeblock.grouped_schedule.study import study as grouped_study
from routeblock.q6k_dispatch import verification as dispatch_verification
from routeblock.q6k_dispatch.study import STUDY as Q6K_DISPATCH
from routeblock.route_block.scorer import operating_points
from routeblock.route_block.scorer.inputs import read_study
from routeblock.route_block.scorer.mutations import seal_anew
from routeblock.route_block.scorer.score import judge
from routeblock.timing.check import check
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import BATCHES as BATCHES_FILE
from routeblock.timing.record import Record, usable
from routeblock.timing.record import Study as TimedStudy
from routeblock.timing.statistics import comparisons
from routeblock.timing.validation import Recounted, compare, recounted
from routeblock.timing.verification import unlisted

ROOT = Path(__file__).resolve().parents[2]
FORMAT = "routeblock.mutants.v1"
Random = random.Random
SEAL_FIELD = "field of a seal"
SEALS = (RECORD_MANIFEST, TELEMETRY_MANIFEST)


class NoRoomError(Exception):
    """This draw has no room for the edit, or would change nothing."""


@dataclass
class Tally:
    """What became of the mutants of one kind on one record."""

    record: str
    kind: str
    tried: int = 0
    refused: int = 0
    by_chain_alone: int = 0
    by_list_alone: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    accepted: list[str] = field(default_factory=list)
    listed_alone: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "record": self.record,
            "kind": self.kind,
            "tried": self.tried,
            "refused": self.refused,
            "by_chain_alone": self.by_chain_alone,
            "by_list_alone": self.by_list_alone,
            "accepted": len(self.accepted),
            "reasons": dict(sorted(self.reasons.items())),
            "accepted_examples": self.accepted[:10],
            "places_by_list_alone": dict(sorted(self.listed_alone.items())),
        }


# Study A


class Runs:
    """The runs of a small study, restored after each edit."""

    def __init__(self, root: Path, name: str, **options: Any) -> None:
        self.name = name
        self.study = make_study(root, **options)
        prediction = self.study.prediction
        made_by: dict[str, Any] = {"parameters": {}, "modules": ["routeblock.route_block.prediction.freeze"]}
        seal(prediction.with_suffix(SUFFIX), rule="freeze", outputs=[prediction], inputs=[], **made_by)
        self.read = read_study(self.study.fixture, self.study.prediction, self.study.identity)
        self.folders = sorted(p.parent for p in self.study.runs.rglob(RECORD))
        self.known = {p: p.read_bytes() for p in sorted(self.study.runs.rglob("*")) if p.is_file()}

    def verdict(self) -> list[str]:
        """The reasons of every finding."""
        return [str(f.reason) for f in judge(self.read, self.study.runs, self.study.replicates).findings]

    def restore(self) -> None:
        """Every file as it was made."""
        for path in [p for p in self.study.runs.rglob("*") if p.is_file() and p not in self.known]:
            path.unlink()
        for path, data in self.known.items():
            if not path.is_file() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        for folder in sorted((p for p in self.study.runs.rglob("*") if p.is_dir()), reverse=True):
            if not any(folder.iterdir()):
                folder.rmdir()

    def chain(self) -> list[str]:
        """What `make verify` finds. Seals are the chain's: the scorer reads of them what it needs for its verdict."""
        given = [self.study.fixture, self.study.identity, self.study.identity.with_suffix(SUFFIX)]
        return [f"verify: {f.kind}" for f in chain.verify(self.study.runs, sources=given)]

    def pick(self, rng: Random) -> Path:
        """The folder of one run."""
        return rng.choice(self.folders)


def _record(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / RECORD).read_bytes())
    return document


def _write(folder: Path, record: dict[str, Any]) -> None:
    write_json(folder / RECORD, record)
    for name in SEALS:
        seal_anew(folder, name)


def _flip(tensors: dict[str, Any], rng: Random) -> str:
    name = rng.choice(sorted(tensors))
    x = tensors[name].copy()
    raw = x.reshape(-1).view(np.uint8)
    at = rng.randrange(raw.size)
    raw[at] ^= np.uint8(1 << rng.randrange(8))
    tensors[name] = x
    return f"{name}, byte {at}"


def _tensor_byte(runs: Runs, rng: Random) -> str:
    folder = runs.pick(rng)
    tensors = load_tensors(folder / TENSORS)
    what = _flip(tensors, rng)
    save_tensors(folder / TENSORS, tensors)
    _write(folder, _record(folder))
    return f"{folder.relative_to(runs.study.runs)}: {what}"


def _restate(record: dict[str, Any], tensors: dict[str, Any]) -> None:
    for name, stated in record["surfaces"].items():
        stated["sha256"] = sha256_array(tensors[name])
    for name in ("sorted_token_ids", "expert_ids"):
        digest = sha256_array(tensors[name])
        record["plan"][name] = digest
        if record.get("consumption"):
            record["consumption"][name] = digest


def _forged_digest(runs: Runs, rng: Random) -> str:
    """A byte of a tensor, and the record states the digest of what is now there; sum and activation may follow, too."""
    folder = runs.pick(rng)
    record, tensors = _record(folder), load_tensors(folder / TENSORS)
    what = _flip(tensors, rng)
    if rng.random() < 0.5 and what.startswith(("w13", "w2")):
        with np.errstate(all="ignore"):
            tensors |= following(tensors["w13"], tensors["w2"])
    _restate(record, tensors)
    save_tensors(folder / TENSORS, tensors)
    _write(folder, record)
    return f"{folder.relative_to(runs.study.runs)}: {what}, digests restated"


def _record_field(runs: Runs, rng: Random) -> str:
    folder = runs.pick(rng)
    record = _record(folder)
    at = edit_leaf(record, rng)
    _write(folder, record)
    return f"{folder.relative_to(runs.study.runs)}: {_shown(at)}"


def _seal_field(runs: Runs, rng: Random) -> str:
    path = runs.pick(rng) / rng.choice(SEALS)
    manifest = json.loads(path.read_bytes())
    at = edit_leaf(manifest, rng)
    write_json(path, manifest)
    return f"{path.relative_to(runs.study.runs)}: {_shown(at)}"


def _place(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    cell, history, replicate = folder.parts[-3:]
    return {**record, "cell": cell, "history": history, "replicate": int(replicate.removeprefix("rep"))}


def _relabel(folder: Path, **stated: Any) -> None:
    """Let what lies in a folder say that it is the run of that place, in record and seals."""
    record = _place(folder, _record(folder)) | stated
    for name in SEALS:
        manifest = json.loads((folder / name).read_bytes())
        manifest["parameters"].update({k: record[k] for k in ("lane", "cell", "history", "replicate")})
        write_json(folder / name, manifest)
    _write(folder, record)


def _copy(source: Path, target: Path) -> None:
    for name in (RECORD, TENSORS, TELEMETRY, *SEALS):
        (target / name).write_bytes((source / name).read_bytes())


def _two(runs: Runs, rng: Random) -> tuple[Path, Path]:
    first, second = rng.sample(runs.folders, 2)
    return first, second


def _swapped(runs: Runs, rng: Random) -> str:
    """Two runs in each other's place, relabelled; each keeps the position at which it ran."""
    first, second = _two(runs, rng)
    held = {name: (first / name).read_bytes() for name in (RECORD, TENSORS, TELEMETRY, *SEALS)}
    _copy(second, first)
    for name, data in held.items():
        (second / name).write_bytes(data)
    for folder in (first, second):
        _relabel(folder)
    return f"{first.relative_to(runs.study.runs)} and {second.relative_to(runs.study.runs)}"


def _replayed(runs: Runs, rng: Random) -> str:
    """A run stands in another's place, too, relabelled and with that one's position."""
    first, second = _two(runs, rng)
    position = _record(second)["position"]
    _copy(first, second)
    _relabel(second, position=position)
    return f"{first.relative_to(runs.study.runs)} for {second.relative_to(runs.study.runs)}"


def _duplicated_outcome(runs: Runs, rng: Random) -> str:
    """One outcome for all replicates of a cell: everything of one run, its process too, stands for the others."""
    first = runs.pick(rng)
    others = [f for f in runs.folders if f.parent == first.parent and f != first]
    for second in rng.sample(others, rng.randint(1, len(others))):
        position = _record(second)["position"]
        _copy(first, second)
        _relabel(second, position=position)
    return f"{first.relative_to(runs.study.runs)} for other replicates"


def _of(other: Runs, **more: Any) -> Callable[[Runs, Random], str]:
    """A run of another study in place of ours. It says that it is ours in every field that the place gives."""

    def mutate(runs: Runs, rng: Random) -> str:
        target = runs.pick(rng)
        source = other.study.runs / target.relative_to(runs.study.runs)
        if not source.is_dir():
            raise NoRoomError
        own = _record(target)
        _copy(source, target)
        kept = [k for k in own if rng.random() < 0.5 or k in ("lane", "cell", "history", "replicate", "position")]
        stated = {k: own[k] for k in kept if k not in more.get("never", ())}
        _relabel(target, **stated)
        if _same(runs, target):
            raise NoRoomError
        return f"{target.relative_to(runs.study.runs)}, saying it has ours: {', '.join(sorted(stated))}"

    return mutate


def _same(runs: Runs, folder: Path) -> bool:
    """Whether a run says and holds what it did; when and where it ran aside."""
    return all((folder / name).read_bytes() == runs.known[folder / name] for name in (RECORD, TENSORS))


def _binary(runs: Runs, rng: Random) -> str:
    """Other code, other binary or another environment, in one run or some."""
    chosen = rng.sample(runs.folders, rng.choice((1, 2, 5, len(runs.folders))))
    part = rng.choice(("source", "binary", "environment"))
    digest = "".join(rng.choice("0123456789abcdef") for _ in range(64))
    for folder in chosen:
        record = _record(folder)
        identity = record["identity"]
        if part == "environment":
            identity["environment"] = {**identity["environment"], "numpy": "1.0"}
        else:
            identity[part] = digest
        _write(folder, record)
    return f"{part} of {len(chosen)} runs"


def _dropped(runs: Runs, rng: Random) -> str:
    """A run, or one of its files, is not there; or a run more than the study has."""
    folder = runs.pick(rng)
    if rng.random() < 0.3:
        extra = folder.with_name(f"rep{rng.randint(6, 99)}")
        shutil.copytree(folder, extra)
        _relabel(extra)
        return f"{extra.relative_to(runs.study.runs)} more"
    names = (RECORD, TENSORS, TELEMETRY, *SEALS)
    gone = names if rng.random() < 0.5 else [rng.choice(names)]
    for name in gone:
        (folder / name).unlink()
    return f"{folder.relative_to(runs.study.runs)} without {', '.join(gone)}"


def _shown(at: Place) -> str:
    return ".".join("#" if isinstance(part, int) else str(part) for part in at)


def _of_runs(runs: Runs, kinds: dict[str, Callable[[Runs, Random], str]], each: int, seed: int) -> Iterator[Tally]:
    if found := runs.verdict() + runs.chain():
        raise RuntimeError(f"{runs.name} as it is: {found}")
    for kind, mutate in kinds.items():
        tally, rng = Tally(runs.name, kind), Random(f"{seed} {runs.name} {kind}")
        draws = 0
        while tally.tried < each and draws < 3 * each:
            draws += 1
            try:
                what = mutate(runs, rng)
            except NoRoomError:
                runs.restore()
                continue
            tally.tried += 1
            reasons = runs.verdict()
            if not reasons and kind == SEAL_FIELD:
                reasons = runs.chain()
                tally.by_chain_alone += bool(reasons)
            if reasons:
                tally.refused += 1
                tally.reasons.update(set(reasons))
            else:
                tally.accepted.append(what)
            runs.restore()
        yield tally


def _variations_of_runs(runs: Runs, number: int, seed: int) -> dict[str, Any]:
    """Times and processes of a run, its folder moved, files beside it, its files written anew."""
    rng, refused, kinds = Random(f"{seed} {runs.name} variations"), [], Counter[str]()
    at_home = runs.study
    for _ in range(number):
        folder = runs.pick(rng)
        kind = rng.choice(("seal_order", "telemetry_order", "process", "times", "moved", "mtime", "log"))
        kinds[kind] += 1
        if kind == "seal_order":
            # The order of keys and white space of what is not hashed as a document.
            path = folder / rng.choice(SEALS)
            _reordered(path, rng)
        elif kind == "telemetry_order":
            _reordered(folder / TELEMETRY, rng)
            seal_anew(folder, TELEMETRY_MANIFEST)
        elif kind == "process":
            document = json.loads((folder / TELEMETRY).read_bytes())
            document["pid"] = rng.randint(10**6, 10**9)
            write_json(folder / TELEMETRY, document)
            seal_anew(folder, TELEMETRY_MANIFEST)
        elif kind == "times":
            # The whole study at another time, by another clock, with other durations.
            by = timedelta(seconds=rng.randint(-(10**8), 10**8))
            for home in runs.folders:
                document = json.loads((home / TELEMETRY).read_bytes())
                moved = {k: (datetime.fromisoformat(document[k]) + by).isoformat() for k in ("start", "begin", "end")}
                seconds = {k: rng.random() for k in document["seconds"]}
                write_json(home / TELEMETRY, {**document, **moved, "seconds": seconds})
                seal_anew(home, TELEMETRY_MANIFEST)
        elif kind == "mtime":
            for path in folder.iterdir():
                path.touch()
        elif kind == "log":
            (runs.study.runs / "notes.txt").write_text("a note")
        elif kind == "moved":
            elsewhere = at_home.fixture.parent.with_name("moved")
            shutil.move(at_home.fixture.parent, elsewhere)
            study = Study(elsewhere, at_home.replicates)
            found = study.judge().findings
            shutil.move(elsewhere, at_home.fixture.parent)
            refused += [f"{kind}: {f.reason}" for f in found[:1]]
            continue
        if found := runs.verdict():
            refused.append(f"{kind}: {found[0]}")
        runs.restore()
    return {"record": runs.name, "tried": number, "kinds": dict(sorted(kinds.items())), "refused": refused}


def _reordered(path: Path, rng: Random) -> None:
    document = json.loads(path.read_bytes())
    keys = list(document)
    rng.shuffle(keys)
    path.write_text(json.dumps({k: document[k] for k in keys}, indent=rng.choice((None, 1, 4))))


# Timed studies


class Timed:
    """A committed record of timings, its protocol, statistics and recount, read once."""

    def __init__(self, name: str, study: TimedStudy, folder: Path, protocol: Path, again: Callable[..., Any]) -> None:
        self.name, self.study, self.folder, self.again = name, study, folder, again
        self.protocol, self.record = study.load(protocol), study.read(folder)
        self.rows = study.table.rows(self.record.batches)
        self.documents = canonical_json(self.record.documents)
        pairs = study.pairs(self.protocol, self.record)
        found = comparisons(self.rows, study.key, pairs, self.protocol.bootstrap)
        self.statistics = {"protocol_sha256": self.protocol.digest(), "comparisons": [c.row() for c in found]}
        self.recounted: Recounted = recounted(study, [self.record], [self.rows], self.protocol)

    @property
    def contents(self) -> Path:
        """The list of the recording machine."""
        return next(p / CONTENTS for p in (self.folder, *self.folder.parents) if (p / CONTENTS).is_file())

    def verdict(self, rows: list[dict[str, Any]], documents: dict[str, Any]) -> list[str]:
        """The reasons of what protocol and recomputation find; digests are left aside."""
        record = Record(self.folder, [], documents)
        try:
            with usable(self.folder):
                found = check(self.study, record, rows, self.protocol)
                if canonical_json(documents) != self.documents:  # what is computed again rests on the documents alone
                    found += self.again(record, self.protocol)
                    if self.study.name == "grouped_schedule":
                        found += grouped_verification.other_cubin(record, self.contents)
        except InputError:
            return ["unreadable"]
        return [str(f.reason) for f in found]

    def count(self, rows: list[dict[str, Any]], documents: dict[str, Any]) -> None:
        """run.json counts the batches that are there."""
        documents["run"]["batches"] = dict(Counter(self.study.counted(row) for row in rows))

    def is_unlisted(self, files: Files) -> bool:
        """Whether the edited files, once written, are not those that the recording machine listed."""
        contents = self.contents
        with tempfile.TemporaryDirectory() as at:
            home = Path(at) / "record"
            folder = home / self.folder.relative_to(contents.parent)
            shutil.copytree(self.folder, folder)
            shutil.copy(contents, home / CONTENTS)
            if unlisted(self.study, folder, home / CONTENTS):
                raise RuntimeError(f"{self.name} as it is: not what {contents} lists")
            for name, value in files.items():
                if name == "batches":
                    self.study.table.write(folder / BATCHES_FILE, [self.study.table.batch(row) for row in value])
                else:
                    write_json(folder / f"{name}.json", value)
            return bool(unlisted(self.study, folder, home / CONTENTS))

    def compared(self, document: dict[str, Any]) -> list[str]:
        """The reasons of what the recount finds."""
        try:
            with usable(self.folder):
                found = compare(self.study, document, self.recounted.rows, self.protocol.digest())
        except InputError:
            return ["unreadable"]
        return [str(f.reason) for f in found]


Rows = list[dict[str, Any]]
Files = dict[str, Any]
"""Of an edited record: documents by name, and rows under `batches`."""


def _batch_field(timed: Timed, rows: Rows, rng: Random) -> str:
    row = rng.choice(rows)
    name = rng.choice(sorted(row))
    before = row[name]
    column = [r[name] for r in rng.sample(rows, min(40, len(rows)))]
    row[name] = other(before, rng, column)
    if row[name] == before and type(row[name]) is type(before):
        raise NoRoomError
    return name


def _deleted(timed: Timed, rows: Rows, rng: Random) -> str:
    at = rng.randrange(len(rows))
    del rows[at : at + rng.choice((1, 1, 1, 2, 8))]
    return "batch"


def _doubled(timed: Timed, rows: Rows, rng: Random) -> str:
    at = rng.randrange(len(rows))
    again = dict(rows[at])
    if rng.random() < 0.5:
        again["time_us"] *= 0.9
        if "elapsed_us" in again:
            again["elapsed_us"] = again["time_us"] * again["calls"]
            again["time_us"] = again["elapsed_us"] / again["calls"]
    rows.insert(rng.choice((at, at + 1, rng.randrange(len(rows)))), again)
    return "batch"


def _moved(timed: Timed, rows: Rows, rng: Random) -> str:
    """A batch stands elsewhere in the file, or says another repetition, attempt or stage."""
    at = rng.randrange(len(rows))
    if rng.random() < 0.5:
        row = rows.pop(at)
        to = rng.randrange(len(rows) + 1)
        if to == at:
            raise NoRoomError
        rows.insert(to, row)
        return "place in the file"
    name = rng.choice(("repetition", "attempt", *timed.study.key))
    value = rng.choice(rows)[name]
    if value == rows[at][name]:
        raise NoRoomError
    rows[at][name] = value
    return name


def _exchanged(timed: Timed, rows: Rows, rng: Random) -> str:
    """Two batches of one repetition exchange their series, side and place: each side has the other's time."""
    at = rng.randrange(len(rows))
    one = rows[at]
    same = [k for k in ("repetition", "attempt", "clock", *timed.study.key) if k in one]
    near = range(max(0, at - 60), min(len(rows), at + 60))
    others = [rows[i] for i in near if all(rows[i][k] == one[k] for k in same) and rows[i]["series"] != one["series"]]
    if not others:
        raise NoRoomError
    two = rng.choice(others)
    names = ("series", "side") if rng.random() < 0.5 else ("series",)
    for name in names:
        one[name], two[name] = two[name], one[name]
    return ", ".join(names)


def _replayed_repetition(timed: Timed, rows: Rows, rng: Random) -> str:
    """A repetition has the times of another: nothing but the recording machine's list can show that."""
    at = rng.choice(rows)
    same = ["series", *(["clock"] if "clock" in at else []), *timed.study.key]
    others = [r for r in rows if all(r[k] == at[k] for k in same) and r["time_us"] != at["time_us"]]
    if not others:
        raise NoRoomError
    source = rng.choice(others)
    for name in ("elapsed_us", "time_us"):
        if name in at:
            at[name] = source[name]
    return "times of another repetition"


BATCHES: dict[str, Callable[[Timed, Rows, Random], str]] = {
    "field of a batch": _batch_field,
    "batch deleted": _deleted,
    "batch doubled": _doubled,
    "batch moved": _moved,
    "batches swapped between sides": _exchanged,
    "times replayed": _replayed_repetition,
}


def _of_timed(timed: Timed, others: Sequence[Timed], each: int, seed: int) -> Iterator[Tally]:
    plain = json.loads(timed.documents)
    if found := timed.verdict(timed.rows, plain) + timed.compared(timed.statistics):
        raise RuntimeError(f"{timed.name} as it is: {found}")
    for kind, mutate in BATCHES.items():
        yield _tally(timed, kind, each, seed, partial(_edit_rows, timed, mutate, plain))
    yield _tally(timed, "field of a document", each, seed, partial(_edit_document, timed))
    yield _tally(timed, "field of the statistics", each, seed, partial(_edit_statistics, timed))
    yield _tally(timed, "another record's document", each, seed, partial(_foreign, timed, others))


def _tally(
    timed: Timed, kind: str, each: int, seed: int, one: Callable[[Random], tuple[str, list[str], Files]]
) -> Tally:
    tally, rng, draws = Tally(timed.name, kind), Random(f"{seed} {timed.name} {kind}"), 0
    while tally.tried < each and draws < 5 * each:
        draws += 1
        try:
            what, reasons, files = one(rng)
        except NoRoomError:
            continue
        tally.tried += 1
        if reasons:
            tally.refused += 1
            tally.reasons.update(set(reasons))
        elif timed.is_unlisted(files):
            tally.by_list_alone += 1
            tally.listed_alone[what] += 1
            tally.reasons["seal"] += 1
        else:
            tally.accepted.append(what)
    return tally


def _edit_rows(
    timed: Timed, mutate: Callable[[Timed, Rows, Random], str], plain: dict[str, Any], rng: Random
) -> tuple[str, list[str], Files]:
    rows = [dict(row) for row in timed.rows]
    what = mutate(timed, rows, rng)
    documents = {**plain, "run": dict(plain["run"])}
    timed.count(rows, documents)
    # Counts follow from the batches; nothing else of the documents is touched, and what rests on them holds.
    found = [str(f.reason) for f in _checked(timed, documents, rows)]
    return what, found, {"batches": rows, "run": documents["run"]}


def _checked(timed: Timed, documents: dict[str, Any], rows: Rows) -> list[Any]:
    record = Record(timed.folder, [], documents)
    try:
        with usable(timed.folder):
            return check(timed.study, record, rows, timed.protocol)
    except InputError:
        return [Finding("batches", Reason.TIME, "unreadable")]


def _edit_document(timed: Timed, rng: Random) -> tuple[str, list[str], Files]:
    documents = json.loads(timed.documents)
    # A document at a time, a field of each as often as any: long lists have many leaves of one kind.
    name = rng.choice(sorted(documents))
    at = edit_leaf(documents[name], rng)
    if canonical_json(documents) == timed.documents:
        raise NoRoomError
    return f"{name}.{_shown(at)}", timed.verdict(timed.rows, documents), documents


def _edit_statistics(timed: Timed, rng: Random) -> tuple[str, list[str], Files]:
    document = json.loads(json.dumps(timed.statistics))
    at = edit_leaf(document, rng)
    if repr(document) == repr(timed.statistics):
        raise NoRoomError
    return _shown(at), timed.compared(document), {}


def _foreign(timed: Timed, others: Sequence[Timed], rng: Random) -> tuple[str, list[str], Files]:
    """A document, or one entry of it, from another record of the study, or from another study."""
    other = rng.choice(others)
    documents, theirs = json.loads(timed.documents), json.loads(other.documents)
    name = rng.choice(sorted(documents))
    source = theirs.get(name, theirs["run"])
    mine = documents[name]
    if rng.random() < 0.2 or type(source) is not type(mine) or not mine:
        documents[name] = source
    elif isinstance(mine, dict):
        key = rng.choice(sorted(mine))
        mine[key] = source.get(key, rng.choice(list(source.values())))
        name = f"{name}.{key}"
    else:
        mine[rng.randrange(len(mine))] = rng.choice(source)
    if canonical_json(documents) == timed.documents:
        raise NoRoomError
    return f"{name} of {other.name}", timed.verdict(timed.rows, documents), documents


def _variations_of_timed(timed: Timed, number: int, seed: int, home: Path) -> dict[str, Any]:
    """The same record written otherwise: order of keys, white space, another codec, rows in other groups, elsewhere."""
    import pyarrow.parquet as pq

    rng, refused, kinds = Random(f"{seed} {timed.name} variations"), [], Counter[str]()
    for turn in range(number):
        folder = home / f"{timed.study.name}{turn}"
        shutil.copytree(timed.folder, folder)
        kind = rng.choice(("order", "space", "codec", "groups", "moved"))
        kinds[kind] += 1
        name = rng.choice(timed.study.documents)
        document = json.loads((folder / f"{name}.json").read_bytes())
        if kind == "order" and isinstance(document, dict):
            keys = list(document)
            rng.shuffle(keys)
            (folder / f"{name}.json").write_text(json.dumps({k: document[k] for k in keys}))
        elif kind in ("order", "space"):
            (folder / f"{name}.json").write_text(json.dumps(document, indent=rng.randint(1, 8)))
        elif kind in ("codec", "groups"):
            path = folder / "batches.parquet"
            table = pq.read_table(path)
            codec = rng.choice(("zstd", "gzip", "snappy", "none"))
            pq.write_table(table, path, compression=codec, row_group_size=rng.choice((100, 1000, 10**6)))
        try:
            record = timed.study.read(folder)
            same = timed.study.table.rows(record.batches) == timed.rows
            found = check(timed.study, record, timed.study.table.rows(record.batches), timed.protocol)
            found += [] if canonical_json(record.documents) == timed.documents else timed.again(record, timed.protocol)
            refused += [f"{kind}: {f.reason}" for f in found[:1]] + ([] if same else [f"{kind}: other batches"])
        except InputError as e:
            refused.append(f"{kind}: {e.what}")
        shutil.rmtree(folder)
    return {"record": timed.name, "tried": number, "kinds": dict(sorted(kinds.items())), "refused": refused}


@contextmanager
def small_launch() -> Iterator[None]:
    """The scorer's published launch, in whose place that of the small study stands."""
    own = operating_points.PUBLISHED
    operating_points.PUBLISHED = LAUNCH
    try:
        yield
    finally:
        operating_points.PUBLISHED = own


def runs_mutants(each: int, variations: int, seed: int, home: Path) -> tuple[list[Tally], list[dict[str, Any]]]:
    """Mutants and variations of the runs of study A, on a twin's lane and on a GPU's."""
    tallies, varied = [], []
    with small_launch():
        twin = Runs(home / "twin/study", "study A, twin-hopper")
        gpu = Runs(home / "gpu/study", "study A, cuda", lane_name="cuda", lane=SignatureLane("observed"))
        fixture = Runs(home / "one_class/study", "another fixture", one_class=True)
        gpu_fixture = Runs(
            home / "gpu_one_class/study", "another fixture", lane_name="cuda", lane=SignatureLane("observed"),
            one_class=True,
        )  # fmt: skip
        for runs, lane, foreign in ((twin, gpu, fixture), (gpu, twin, gpu_fixture)):
            kinds: dict[str, Callable[[Runs, Random], str]] = {
                "byte of a tensor": _tensor_byte,
                "forged digest with a matching tensor": _forged_digest,
                "field of a record": _record_field,
                SEAL_FIELD: _seal_field,
                "runs swapped": _swapped,
                "run replayed": _replayed,
                "outcome duplicated": _duplicated_outcome,
                "another lane's run": _of(lane),
                "another fixture's run": _of(foreign),
                "another binary's run": _binary,
                "run missing or one more": _dropped,
            }
            for tally in _of_runs(runs, kinds, each, seed):
                tallies.append(tally)
                _say(tally)
            varied.append(_variations_of_runs(runs, variations, seed))
    return tallies, varied


def timed_records(names: Sequence[str] = ()) -> Iterator[Timed]:
    """The committed records of timings, one of each study and campaign; those of these names, or all."""
    recorded, protocols = ROOT / "fixtures/recorded", ROOT / "fixtures/protocols"
    grouped, b = grouped_study(0.01), recorded / "grouped_schedule/h200/cuda/gpu0"
    outputs = partial(grouped_verification.recompute, threads=2)
    for name, study, folder, again in (
        ("alignment cost", ALIGNMENT_COST, recorded / "alignment_cost/h200", alignment_verification.recompute),
        ("study B, sweep", grouped, b / "sweep", outputs),
        ("study B, confirmation", grouped, b / "confirmation", outputs),
        ("fast paths", Q6K_DISPATCH, recorded / "q6k_dispatch/h200", dispatch_verification.recompute),
    ):
        if name in (names or (name,)):
            yield Timed(name, study, folder, protocols / f"{study.name}.json", again)


def timed_mutants(
    records: Sequence[Timed], each: int, variations: int, seed: int, home: Path
) -> tuple[list[Tally], list[dict[str, Any]]]:
    """Mutants and variations of records of timings."""
    tallies, varied = [], []
    for timed in records:
        others = [r for r in records if r is not timed] or [timed]
        for tally in _of_timed(timed, others, each, seed):
            tallies.append(tally)
            _say(tally)
        varied.append(_variations_of_timed(timed, variations, seed, home))
    return tallies, varied


def _say(tally: Tally) -> None:
    row = tally.row()
    print(
        f"{row['record']}, {row['kind']}: {row['tried']} tried, {row['refused']} refused, "
        f"{row['by_list_alone']} by the list alone, {row['accepted']} accepted",
        flush=True,
    )
    for example in row["accepted_examples"]:
        print(f"    {example}", flush=True)


def main() -> int:
    """Try mutants of every record and write what became of them; 1 if one is accepted or a variation refused."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--each", type=int, required=True, help="mutants of each kind on each record")
    options.add_argument("--variations", type=int, default=90, help="legitimate variations of each record")
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--out", type=Path)
    options.add_argument("--of", choices=("runs", "timed"), help="one of the two alone")
    given = options.parse_args()
    began = time.monotonic()
    tallies: list[Tally] = []
    varied: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        if given.of != "timed":
            found = runs_mutants(given.each, given.variations, given.seed, home)
            tallies, varied = [*tallies, *found[0]], [*varied, *found[1]]
        if given.of != "runs":
            found = timed_mutants([*timed_records()], given.each, given.variations, given.seed, home)
            tallies, varied = [*tallies, *found[0]], [*varied, *found[1]]
    rows = [tally.row() for tally in tallies]
    document = {"format": FORMAT, "seed": given.seed, "each": given.each, "mutants": rows, "variations": varied}
    if given.out:
        write_json(given.out, document)
    wrong = [row for row in rows if row["accepted"]]
    refused = sum(len(v["refused"]) for v in varied)
    tried = sum(row["tried"] for row in rows)
    print(f"{tried} mutants, {len(wrong)} kinds with one accepted; {refused} variations refused")
    for v in varied:
        print(f"    {v['record']}: {v['tried']} variations, refused: {v['refused'][:5]}")
    print(f"{time.monotonic() - began:.0f} s")
    return int(bool(wrong or refused))


if __name__ == "__main__":
    sys.exit(main())
