# SPDX-License-Identifier: Apache-2.0
"""Does the scorer refuse what it should? Eight copies of sound runs, seven with one change, each judged by the scorer.

A mutation is as hard to see as it can be: what follows from the changed value is computed anew and the run is sealed
anew, so that one check alone can find it. Which one is declared beforehand in fixtures/mutations.json.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_bytes, sha256_file
from routeblock.evidence.files import TEMPORARY_SUFFIX, writable_folder, write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY_MANIFEST, TENSORS
from routeblock.evidence.tensors import load_tensors, save_tensors
from routeblock.route_block.scorer.audit import expected_runs, run_name
from routeblock.route_block.scorer.inputs import Given, bits, first_line, read_given
from routeblock.route_block.scorer.membership import StoredPlan
from routeblock.route_block.scorer.reasons import Reason
from routeblock.route_block.scorer.score import files_of_runs, inputs_of, judge

FORMAT = "routeblock.mutations.v1"
MOST_REPLICATES = 2  # enough for every check, those between replicates too
UNCHANGED = "unchanged"


class Declared(BaseModel):
    """One mutation as declared beforehand; reason None: the copy is to be accepted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    run: str
    change: str
    reason: Reason | None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["routeblock.declared_mutations.v1"]
    mutations: list[Declared]


@dataclass
class Run:
    """A run to change: its record as JSON and its tensors."""

    given: Given
    record: dict[str, Any]
    tensors: dict[str, NDArray[Any]]

    @property
    def plan(self) -> StoredPlan:
        """The stored plan."""
        size, routes = self.given.spec.block_size, int(self.given.topk_ids.size)
        return StoredPlan(self.tensors["sorted_token_ids"], self.tensors["expert_ids"], size, routes)

    def follow_plan(self) -> None:
        """State every digest that follows from the stored plan as it now is."""
        plan = self.plan
        stated = {"fingerprint": plan.fingerprint, "sorted_token_ids": plan.digests[0], "expert_ids": plan.digests[1]}
        self.record["plan"].update(stated)
        for marker in self.record["treatment"].values():
            marker["sorted_token_ids"] = plan.digests[0]


class _ImpossibleError(Exception):
    """A mutation that this fixture has no room for."""


def _route(run: Run) -> None:
    plan = run.plan
    at = next((b for b, (_, j, _) in enumerate(plan.identity) if j), None)
    if at is None:
        raise _ImpossibleError("no expert of this fixture has two blocks")
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
        raise _ImpossibleError("no block of this fixture can be given to an unused expert")
    experts[alone[0]] += 1
    run.tensors["expert_ids"] = experts
    run.follow_plan()


def _treatment_marker(run: Run) -> None:
    run.record["treatment"]["consumed"]["intervention"] = "own plan injected"


def _grid_marker(run: Run) -> None:
    launch = run.record["grid"]["w13"]
    native = run.given.launch("native", "w13")[2]
    launch["launched"] = native if native != launch["asked"] else launch["asked"] - 1


def _stage_hash(run: Run) -> None:
    stated = run.record["surfaces"]["activation"]
    stated["sha256"] = _other_digit(stated["sha256"])


def _raw_tensor(run: Run) -> None:
    x = run.tensors["w2"].copy()
    bits(x)[x.shape[0] // 2, x.shape[1] // 2] ^= np.uint16(1)
    run.tensors["w2"] = x


def _identity(run: Run) -> None:
    run.record["identity"]["binary"] = _other_digit(run.record["identity"]["binary"])


def _unchanged(run: Run) -> None:
    pass


def _other_digit(digest: str) -> str:
    return digest[:-1] + ("0" if digest[-1] != "0" else "1")


MUTATE: Mapping[str, Callable[[Run], None]] = {
    "route": _route,
    "expert_block": _expert_block,
    "treatment_marker": _treatment_marker,
    "grid_marker": _grid_marker,
    "stage_hash": _stage_hash,
    "raw_tensor": _raw_tensor,
    "identity": _identity,
    UNCHANGED: _unchanged,
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


def _copy_set(given: Given, runs: Path, copy: Path, replicates: int, *, linked: bool) -> None:
    for key in expected_runs(given, replicates):
        source, target = runs / run_name(*key), copy / run_name(*key)
        target.mkdir(parents=True)
        for path in (p for p in sorted(source.iterdir()) if p.is_file()):
            try:
                if not linked:
                    raise OSError
                os.link(path, target / path.name)  # a mutation replaces its files and writes into none
            except OSError:
                shutil.copy2(path, target / path.name)


def _change(given: Given, folder: Path, mutate: Callable[[Run], None]) -> None:
    run = Run(given, json.loads((folder / RECORD).read_bytes()), load_tensors(folder / TENSORS))
    mutate(run)
    save_tensors(folder / TENSORS, run.tensors)
    write_json(folder / RECORD, run.record)
    for name in (RECORD_MANIFEST, TELEMETRY_MANIFEST):
        _seal_anew(folder, name)


def _seal_anew(folder: Path, name: str) -> None:
    """State size and SHA-256 of the run's own files as they now are; inputs from elsewhere stay as sealed."""
    manifest = json.loads((folder / name).read_bytes())
    for entry in [*manifest["outputs"], *manifest["inputs"]]:
        path = folder / entry["path"]
        if "/" not in entry["path"]:
            entry.update(size=path.stat().st_size, sha256=sha256_file(path))
    write_json(folder / name, manifest)


def _try(given: Given, runs: Path, copy: Path, replicates: int, declared: Declared, *, linked: bool) -> dict[str, Any]:
    _copy_set(given, runs, copy, replicates, linked=linked)
    entry = {"name": declared.name, "run": declared.run, "change": declared.change, "declared": declared.reason}
    if not (copy / declared.run).is_dir():
        return {**entry, "found": [], "elsewhere": [], "as_declared": None, "note": "this fixture has no such run"}
    try:
        _change(given, copy / declared.run, MUTATE[declared.name])
    except _ImpossibleError as e:
        return {**entry, "found": [], "elsewhere": [], "as_declared": None, "note": str(e)}
    findings = judge(given, copy, replicates).findings
    found = sorted({str(f.reason) for f in findings})
    elsewhere = sorted({f.run for f in findings} - {declared.run})
    wanted = [str(declared.reason)] if declared.reason else []
    as_declared = found == wanted and not elsewhere
    return {**entry, "found": found, "elsewhere": elsewhere, "as_declared": as_declared, "note": None}


def mutate(
    *,
    fixture: Path,
    prediction: Path,
    runs: Path,
    replicates: int,
    declared: Path,
    out: Path,
    plans: Path | None = None,
    keep: Path | None = None,
    lane: str | None = None,
) -> list[dict[str, Any]]:
    """Judge every mutation of the runs below `runs`, at most two replicates; write mutations.json to `out`, sealed.

    Returns the entries: declared reason, reasons found, and whether they agree (None where the fixture has no room for
    the mutation). The copies are links that vanish, or, in the folder `keep`, whole and to be looked at. Raises
    InputError if an input cannot be read, if a run is missing, or if `keep` is not empty.
    """
    entries = read_declared(declared)
    given = read_given(fixture, prediction, plans, lane)
    replicates = min(replicates, MOST_REPLICATES)
    for key in expected_runs(given, replicates):
        if not (runs / run_name(*key) / RECORD).is_file():
            raise InputError(
                "no such run",
                where=str(runs / run_name(*key)),
                limit=f"mutations need the first {replicates} replicates of every cell and history",
                way_out="run them first (routeblock run)",
            )
    writable_folder(out.parent)
    if keep and keep.is_dir() and any(keep.iterdir()):
        raise InputError("not empty", where=str(keep), limit="copies go to a new folder", way_out="name another folder")
    place: AbstractContextManager[Any]
    if keep:
        place = nullcontext(str(keep))
    else:
        place = tempfile.TemporaryDirectory(dir=out.parent, prefix=".mutations.", suffix=TEMPORARY_SUFFIX)
    with place as folder:
        results = [_try(given, runs, Path(folder) / d.name, replicates, d, linked=keep is None) for d in entries]
    document = {
        "format": FORMAT,
        "fixture": given.fixture_digest,
        "prediction": given.prediction_digest,
        "declared": sha256_bytes(declared.read_bytes()),
        "lane": given.lane,
        "point": given.prediction.point,
        "plan_source": given.prediction.plan_source,
        "replicates": replicates,
        "mutations": results,
    }
    write_json(out, document)
    seal(
        out.with_suffix(SUFFIX),
        rule="mutations",
        outputs=[out],
        inputs=[declared, *inputs_of(given, plans), *files_of_runs(given, runs, replicates)],
        parameters={"replicates": replicates},
        modules=[__name__],
    )
    return results
