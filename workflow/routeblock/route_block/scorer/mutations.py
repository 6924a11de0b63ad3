# SPDX-License-Identifier: Apache-2.0
"""Does the scorer refuse what it should? Copies of sound runs, each with one change, and one without, each judged.

A mutation is as hard to see as it can be: what follows from the changed value is computed anew and the run is sealed
anew, so that one check alone can find it (where the declaration says that the seal stays, two). Which one, and at which
runs, is declared beforehand in fixtures/mutations.json.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_bytes, sha256_file, sha256_json
from routeblock.evidence.files import TEMPORARY_SUFFIX, writable_folder, write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.record import (
    READ_BACK,
    RECORD,
    RECORD_MANIFEST,
    TELEMETRY,
    TELEMETRY_MANIFEST,
    TENSORS,
)
from routeblock.evidence.tensors import load_tensors, save_tensors
from routeblock.route_block.scorer.audit import expected_runs, run_name
from routeblock.route_block.scorer.expected_rows import slices_of
from routeblock.route_block.scorer.inputs import PREDICTION, Study, bits, first_line, read_study, with_prediction
from routeblock.route_block.scorer.membership import EXCHANGES, StoredPlan
from routeblock.route_block.scorer.reasons import Reason
from routeblock.route_block.scorer.recorded_index import check_recorded, read_backs
from routeblock.route_block.scorer.score import PROTOCOL_REPLICATES, files_of_runs, inputs_of, judge

FORMAT = "routeblock.mutations.v1"
UNCHANGED = "unchanged"
ALL = "all"

Backend = Literal["twin", "cuda", "recorded"]


class Declared(BaseModel):
    """One mutation as declared beforehand: the runs that it changes, which are those to be refused, and the reasons.

    A changed prediction changes all runs, which name it as their input; what is refused is the prediction.

    No reason: the copy is to be accepted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    runs: Annotated[list[str], Field(min_length=1)] | Literal["all"]
    refused: list[str] | None = None
    """What is to be refused, where it is not the runs changed."""
    change: str
    reasons: list[Reason]
    untried: list[Backend | Literal["fixture"]] = []
    """Backends on which the mutation may be impossible; `fixture`: it may be where the fixture has no room for it."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["routeblock.declared_mutations.v2"]
    mutations: list[Declared]


@dataclass
class Run:
    """A run to change: its record as JSON and its tensors."""

    study: Study
    record: dict[str, Any]
    tensors: dict[str, NDArray[Any]]

    @property
    def plan(self) -> StoredPlan:
        """The stored plan."""
        size, routes = self.study.spec.block_size, int(self.study.topk_ids.size)
        return StoredPlan(self.tensors["sorted_token_ids"], self.tensors["expert_ids"], size, routes)

    def follow_plan(self) -> None:
        """State the digests of the stored plan as it now is."""
        plan = self.plan
        stated = {"fingerprint": plan.fingerprint, "sorted_token_ids": plan.digests[0], "expert_ids": plan.digests[1]}
        self.record["plan"].update(stated)

    def follow_throughout(self) -> None:
        """State them in both treatment markers and in what the kernels report too."""
        self.follow_plan()
        plan = self.plan
        for marker in self.record["treatment"].values():
            marker["sorted_token_ids"] = plan.digests[0]
        if found := self.record.get("consumption"):
            found.update(sorted_token_ids=plan.digests[0], expert_ids=plan.digests[1])


class _ImpossibleError(Exception):
    """A mutation that this backend cannot show."""


class _NoRoomError(_ImpossibleError):
    """A mutation that this fixture has no room for."""


class _FewerReplicatesError(_ImpossibleError):
    """A mutation of a replicate that a study of fewer than the protocol's does not have: nothing is declared of it."""


def _route(run: Run) -> None:
    plan = run.plan
    at = next((b for b, (_, j, _) in enumerate(plan.identity) if j), None)
    if at is None:
        raise _NoRoomError("no expert of this fixture has two blocks")
    ids = plan.sorted_token_ids.copy()
    first, second = (at - 1) * plan.block_size, at * plan.block_size
    ids[[first, second]] = ids[[second, first]]
    run.tensors["sorted_token_ids"] = ids
    run.follow_plan()


def _expert_block(run: Run) -> None:
    experts = run.plan.expert_ids.copy()
    last = int(experts.size) - 1
    used = set(experts.tolist())
    free = [b for b in range(last + 1) if b == last or experts[b] + 1 < experts[b + 1]]
    alone = [b for b in free if experts[b] + 1 not in used and experts.tolist().count(int(experts[b])) == 1]
    if not alone:
        raise _NoRoomError("no block of this fixture can be given to an unused expert")
    experts[alone[0]] += 1
    run.tensors["expert_ids"] = experts
    run.follow_plan()


def _treatment_marker(run: Run) -> None:
    run.record["treatment"]["consumed"]["intervention"] = "own plan injected"


def _plan_throughout(run: Run) -> None:
    """The run is, in every file of it, one of the history's own plan where the other's was to be injected."""
    own = run.study.own[run.record["history"]]
    if own.digests == run.plan.digests:
        raise _NoRoomError("both histories have one plan")
    run.tensors.update(sorted_token_ids=own.sorted_token_ids, expert_ids=own.expert_ids)
    run.follow_throughout()


def _grid_marker(run: Run) -> None:
    launch = run.record["grid"]["w13"]
    native = run.study.launch("native", "w13")[2]
    launch["launched"] = native if native != launch["asked"] else launch["asked"] - 1


def _stage_hash(run: Run) -> None:
    stated = run.record["surfaces"]["activation"]
    stated["sha256"] = _other_digit(stated["sha256"])


def _raw_tensor(run: Run) -> None:
    x = run.tensors["w2"].copy()
    bits(x)[x.shape[0] // 2, x.shape[1] // 2] ^= np.uint16(1)
    run.tensors["w2"] = x


def _edited(part: str) -> Callable[[Run], None]:
    def edit(run: Run) -> None:
        run.record["identity"][part] = _other_digit(run.record["identity"][part])

    return edit


def _binary_and_environment(run: Run) -> None:
    _edited("binary")(run)
    environment = run.record["identity"]["environment"]
    first = min(environment)
    environment[first] += "+other"


def _read_back(run: Run) -> dict[str, Any]:
    """What the kernels report; where a record holds none, what a device would have reported."""
    plan = run.plan
    claimed = {
        "source": READ_BACK,
        "sorted_token_ids": plan.digests[0],
        "expert_ids": plan.digests[1],
        "num_tokens_post_padded": int(plan.sorted_token_ids.size),
        "slices": None,
    }
    return dict(run.record.get("consumption") or claimed)


def _read_back_claimed(run: Run) -> None:
    if run.record.get("consumption"):
        raise _ImpossibleError("these records hold what their kernels used")
    run.record["consumption"] = _read_back(run)


def _plan_consumed(run: Run) -> None:
    found = _read_back(run)
    run.record["consumption"] = {**found, "sorted_token_ids": _other_digit(found["sorted_token_ids"])}


def _slices_consumed(run: Run) -> None:
    found = _read_back(run)
    native = slices_of(run.study, "w13", int(run.plan.expert_ids.size), run.study.launch("native", "w13"))
    slices = {**(found["slices"] or {}), "w13": sha256_json([sorted(pieces) for pieces in native])}
    run.record["consumption"] = {**found, "slices": slices}


def _unchanged(run: Run) -> None:
    pass


def _other_digit(digest: str) -> str:
    return digest[:-1] + ("0" if digest[-1] != "0" else "1")


@dataclass(frozen=True)
class Copy:
    """A copy of a set of runs to change."""

    study: Study
    root: Path

    @property
    def prediction(self) -> Path:
        """Where a changed prediction stands; nowhere, unless a mutation put it there."""
        return self.root / PREDICTION

    def predict(self, document: dict[str, Any]) -> None:
        """Put another prediction in the place of the study's, and make every run name that one as its input."""
        write_json(self.prediction, document)
        old, size, new = self.study.prediction_digest, self.prediction.stat().st_size, sha256_file(self.prediction)
        for path in self.root.rglob(RECORD):
            folder = path.parent
            record = json.loads(path.read_bytes())
            write_json(path, {**record, "prediction": new, "point": document["point"]})
            manifest = json.loads((folder / RECORD_MANIFEST).read_bytes())
            for entry in manifest["inputs"]:
                if entry["sha256"] == old:
                    entry.update(size=size, sha256=new)
            write_json(folder / RECORD_MANIFEST, manifest)
            for seal_name in (RECORD_MANIFEST, TELEMETRY_MANIFEST):
                seal_anew(folder, seal_name)

    def change(self, name: str, change: Callable[[Run], None], *, sealed: bool = True) -> None:
        """Change one run; `sealed`: state its digests, and the code that sealed it, anew."""
        folder = self.root / name
        run = Run(self.study, json.loads((folder / RECORD).read_bytes()), load_tensors(folder / TENSORS))
        change(run)
        save_tensors(folder / TENSORS, run.tensors)
        write_json(folder / RECORD, run.record)
        if sealed:
            for seal_name in (RECORD_MANIFEST, TELEMETRY_MANIFEST):
                seal_anew(folder, seal_name)

    def relabel(self, name: str) -> None:
        """Make what lies in a run's folder a run of that place: its replicate in record and seals."""
        folder, replicate = self.root / name, int(name.removeprefix(name.rstrip("0123456789")))
        record = json.loads((folder / RECORD).read_bytes())
        write_json(folder / RECORD, {**record, "replicate": replicate})
        for seal_name in (RECORD_MANIFEST, TELEMETRY_MANIFEST):
            manifest = json.loads((folder / seal_name).read_bytes())
            manifest["parameters"]["replicate"] = replicate
            write_json(folder / seal_name, manifest)
            seal_anew(folder, seal_name)


def _each(change: Callable[[Run], None], *, sealed: bool = True) -> Callable[[Copy, Sequence[str]], None]:
    """The mutation that changes each of its runs in this way."""

    def mutate_each(copy: Copy, runs: Sequence[str]) -> None:
        for name in runs:
            copy.change(name, change, sealed=sealed)

    return mutate_each


def _dropped(copy: Copy, runs: Sequence[str]) -> None:
    for name in runs:
        shutil.rmtree(copy.root / name)


def _duplicated(copy: Copy, runs: Sequence[str]) -> None:
    """The first run stands in the place of the second too, with the second's planned position."""
    first, second = runs
    position = json.loads((copy.root / second / RECORD).read_bytes())["position"]
    shutil.rmtree(copy.root / second)
    shutil.copytree(copy.root / first, copy.root / second)
    copy.relabel(second)
    copy.change(second, lambda run: run.record.update(position=position))


def _reordered(copy: Copy, runs: Sequence[str]) -> None:
    """Two runs stand in each other's place; each keeps the position at which it ran."""
    first, second = (copy.root / name for name in runs)
    aside = copy.root / f"aside{TEMPORARY_SUFFIX}"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    for name in runs:
        copy.relabel(name)


def _launch_status(copy: Copy, runs: Sequence[str]) -> None:
    document = json.loads(copy.study.prediction_path.read_bytes())
    status = document["launch_status"]
    copy.predict({**document, "launch_status": {**status, "w2": "published"}})


def _point(copy: Copy, runs: Sequence[str]) -> None:
    document = json.loads(copy.study.prediction_path.read_bytes())
    copy.predict({**document, "point": "auto" if document["point"] == "published" else "published"})


def _cells_dropped(copy: Copy, runs: Sequence[str]) -> None:
    """The cells of the within-pair are gone: the prediction says that there is no such pair, and has no such runs."""
    document = json.loads(copy.study.prediction_path.read_bytes())
    cell = next(cell for cell, pair in EXCHANGES.items() if pair == "within")
    for name in runs:
        shutil.rmtree(copy.root / name)
    copy.predict(
        {
            **document,
            "exchange": {**document["exchange"], "within": None, "why": "no within pair"},
            "arms": [arm for arm in document["arms"] if arm["cell"] != cell],
            "pairs": [p for p in document["pairs"] if cell not in (p["first"][0], p["second"][0])],
        }
    )


def _on_a_gpu(copy: Copy) -> None:
    if copy.study.is_twin:
        raise _ImpossibleError("on a twin no order is claimed")


def _order(copy: Copy, runs: Sequence[str]) -> None:
    _on_a_gpu(copy)
    _stamps_exchanged(copy, runs)
    for name in runs:
        seal_anew(copy.root / name, TELEMETRY_MANIFEST)


def _gpu_of_its_own(copy: Copy, runs: Sequence[str]) -> None:
    """Each run names a GPU that no other run names."""
    _on_a_gpu(copy)
    for name in runs:
        path = copy.root / name / TELEMETRY
        document = json.loads(path.read_bytes())
        write_json(path, {**document, "lane": {**document["lane"], "gpu_uuid": f"GPU of {name}"}})
        seal_anew(path.parent, TELEMETRY_MANIFEST)


def _stamps_exchanged(copy: Copy, runs: Sequence[str]) -> None:
    """Two runs have each other's times; their seals stay."""
    paths = [copy.root / name / TELEMETRY for name in runs]
    first, second = (json.loads(path.read_bytes()) for path in paths)
    for path, mine, other in ((paths[0], first, second), (paths[1], second, first)):
        times = {name: other[name] for name in ("start", "begin", "end", "seconds", "turn") if name in other}
        write_json(path, {**mine, **times})


MUTATE: Mapping[str, Callable[[Copy, Sequence[str]], None]] = {
    "route": _each(_route),
    "expert_block": _each(_expert_block),
    "treatment_marker": _each(_treatment_marker),
    "plan_throughout": _each(_plan_throughout),
    "plan_consumed": _each(_plan_consumed),
    "read_back_claimed": _each(_read_back_claimed),
    "grid_marker": _each(_grid_marker),
    "slices_consumed": _each(_slices_consumed),
    "stage_hash": _each(_stage_hash),
    "raw_tensor": _each(_raw_tensor),
    "source": _each(_edited("source")),
    "source_unsealed": _each(_edited("source"), sealed=False),
    "binary": _each(_edited("binary")),
    "binary_unsealed": _each(_edited("binary"), sealed=False),
    "binary_of_all": _each(_binary_and_environment),
    "replicate_dropped": _dropped,
    "replicate_duplicated": _duplicated,
    "replicates_reordered": _reordered,
    "order": _order,
    "order_unsealed": _stamps_exchanged,
    "gpu_of_its_own": _gpu_of_its_own,
    "launch_status": _launch_status,
    "point": _point,
    "cells_dropped": _cells_dropped,
    UNCHANGED: _each(_unchanged),
}


def read_declared(path: Path) -> list[Declared]:
    """The declared mutations. Raises InputError if the file is malformed or does not declare each known one once."""
    limit = f"one entry for each of {', '.join(MUTATE)}"
    try:
        declared = _File.model_validate_json(path.read_bytes()).mutations
    except (OSError, ValidationError) as e:
        raise InputError(first_line(e), where=str(path), limit=limit, way_out="use fixtures/mutations.json") from e
    names = [d.name for d in declared]
    if sorted(names) != sorted(MUTATE):
        raise InputError(f"declares {names}", where=str(path), limit=limit, way_out="use fixtures/mutations.json")
    return declared


def _copy_set(study: Study, runs: Path, copy: Path, replicates: int, *, linked: bool) -> None:
    for key in expected_runs(study, replicates):
        source, target = runs / run_name(*key), copy / run_name(*key)
        target.mkdir(parents=True)
        for path in (p for p in sorted(source.iterdir()) if p.is_file()):
            try:
                if not linked:
                    raise OSError
                os.link(path, target / path.name)  # a mutation replaces its files and writes into none
            except OSError:
                shutil.copy2(path, target / path.name)


def seal_anew(folder: Path, name: str) -> None:
    """State size and SHA-256 of the run's own files, and the code, as they now are; inputs from elsewhere stay."""
    manifest = json.loads((folder / name).read_bytes())
    for entry in [*manifest["outputs"], *manifest["inputs"]]:
        path = folder / entry["path"]
        if "/" not in entry["path"]:
            entry.update(size=path.stat().st_size, sha256=sha256_file(path))
    manifest["code"] = json.loads((folder / RECORD).read_bytes())["identity"]["source"]
    write_json(folder / name, manifest)


def _backend(study: Study) -> Backend:
    if study.is_recorded:
        return "recorded"
    return "twin" if study.is_twin else "cuda"


def _no_such_run(study: Study, name: str, replicates: int) -> _ImpossibleError:
    """Without an exchange pair a fixture has no such cell; a study of fewer replicates than the protocol's lacks the
    last ones; any other run that is not there was declared wrongly.
    """
    cell, history, replicate = name.split("/")
    if cell in EXCHANGES and (cell, history) not in study.arms:
        return _NoRoomError(f"this study has no run {name}")
    if replicates < int(replicate.removeprefix("rep")) <= PROTOCOL_REPLICATES:
        return _FewerReplicatesError(
            f"this study of {replicates} of {PROTOCOL_REPLICATES} replicates has no run {name}"
        )
    return _ImpossibleError(f"this study has no run {name}")


def _try(
    study: Study, held: Mapping[str, Any], runs: Path, copy: Path, replicates: int, declared: Declared, *, linked: bool
) -> dict[str, Any]:
    """`held`: the evidence's read-backs, as `judge` takes them."""
    _copy_set(study, runs, copy, replicates, linked=linked)
    every = [run_name(*key) for key in expected_runs(study, replicates)]
    changed = every if declared.runs == ALL else list(declared.runs)
    made = Copy(study, copy)
    entry = {
        "name": declared.name,
        "runs": declared.runs,
        "change": declared.change,
        "declared": [str(reason) for reason in declared.reasons],
    }
    try:
        if missing := [name for name in changed if not (copy / name).is_dir()]:
            raise _no_such_run(study, missing[0], replicates)
        MUTATE[declared.name](made, changed)
    except _ImpossibleError as e:
        where = "fixture" if isinstance(e, _NoRoomError) else _backend(study)
        may = None if isinstance(e, _FewerReplicatesError) or where in declared.untried else False
        return {**entry, "found": [], "elsewhere": [], "as_declared": may, "note": str(e)}
    changed_study = with_prediction(study, made.prediction) if made.prediction.is_file() else study
    findings = judge(changed_study, copy, replicates, held).findings
    found = sorted({str(f.reason) for f in findings})
    refused = {f.run for f in findings}
    wanted = set(changed if declared.refused is None else declared.refused) if declared.reasons else set()
    as_declared = found == sorted(entry["declared"]) and refused == wanted
    return {**entry, "found": found, "elsewhere": sorted(refused - wanted), "as_declared": as_declared, "note": None}


def mutate(
    *,
    fixture: Path,
    prediction: Path,
    identity: Path,
    runs: Path,
    replicates: int,
    declared: Path,
    out: Path,
    plans: Path | None = None,
    keep: Path | None = None,
    lane: str | None = None,
) -> list[dict[str, Any]]:
    """Judge every mutation of all runs below `runs`; write mutations.json to `out`, sealed.

    Returns the entries: declared reason, reasons found, and whether they agree (None where the mutation is impossible
    and declared to be, or of a replicate beyond those of a smaller study; impossible elsewhere is a disagreement). The
    copies are links that vanish, or, in the folder `keep`, whole and to be looked at. Raises InputError if an input
    cannot be read, if a run is missing, or is not of the evidence where it is filed as recorded, or if `keep` is not
    empty.
    """
    entries = read_declared(declared)
    study = read_study(fixture, prediction, identity, plans, lane)
    for key in expected_runs(study, replicates):
        if not (runs / run_name(*key) / RECORD).is_file():
            raise InputError(
                "no such run",
                where=str(runs / run_name(*key)),
                limit=f"mutations need {replicates} replicates of every cell and history",
                way_out="run them first (routeblock study-a run)",
            )
    check_recorded(study, runs, [run_name(*key) for key in expected_runs(study, replicates)])
    writable_folder(out.parent)
    if keep and keep.is_dir() and any(keep.iterdir()):
        raise InputError("not empty", where=str(keep), limit="copies go to a new folder", way_out="name another folder")
    place: AbstractContextManager[Any]
    if keep:
        place = nullcontext(str(keep))
    else:
        place = tempfile.TemporaryDirectory(dir=out.parent, prefix=".mutations.", suffix=TEMPORARY_SUFFIX)
    with place as folder:
        held = read_backs(study)
        results = [_try(study, held, runs, Path(folder) / d.name, replicates, d, linked=keep is None) for d in entries]
    document = {
        "format": FORMAT,
        "fixture": study.fixture_digest,
        "prediction": study.prediction_digest,
        "declared": sha256_bytes(declared.read_bytes()),
        "lane": study.lane,
        "point": study.prediction.point,
        "plan_source": study.prediction.plan_source,
        "replicates": replicates,
        "mutations": results,
    }
    write_json(out, document)
    seal(
        out.with_suffix(SUFFIX),
        rule="mutations",
        outputs=[out],
        inputs=[declared, *inputs_of(study, plans), *files_of_runs(study, runs, replicates)],
        parameters={"replicates": replicates},
        modules=[__name__],
    )
    return results
