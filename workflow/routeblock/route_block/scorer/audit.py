# SPDX-License-Identifier: Apache-2.0
"""The distrustful reading of runs: hashes recomputed from raw bytes, plans and markers held against the study."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import ValidationError

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, sha256_array, sha256_bytes, sha256_file
from routeblock.evidence.files import is_temporary
from routeblock.evidence.manifest import Manifest
from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY, TENSORS, Record, Treatment
from routeblock.evidence.tensors import open_tensors
from routeblock.route_block.scorer.arithmetic import faults_of
from routeblock.route_block.scorer.inputs import GEMMS, SURFACES, Arm, Given, first_line
from routeblock.route_block.scorer.membership import ASKED, EXCHANGES, StoredPlan, place_in_order
from routeblock.route_block.scorer.reasons import Finding, Reason

# The scorer's own words for the results of each lane: a run cannot call itself more than its lane is.
STATUS = {
    "twin-ampere": "modelled",
    "twin-hopper": "computed, by a twin that equals recorded H200 kernels",
    "cuda": "observed",
}
RUN_RULES = ("run", "run_cuda")
PLAN_TENSORS = ("sorted_token_ids", "expert_ids")

Key = tuple[str, str, int]


def run_name(cell: str, history: str, replicate: int) -> str:
    """The folder of a run below the folder of all runs."""
    return f"{cell}/{history}/rep{replicate}"


@dataclass(frozen=True)
class Audited:
    """A run as it was found.

    outcome: the recomputed SHA-256 of each surface, then the plan's fingerprint. process: its host, pid and start by
    its telemetry, or why they cannot be told.
    """

    key: Key
    record: Record
    record_digest: str
    plan: StoredPlan
    outcome: tuple[str, ...]
    process: tuple[str, int, str] | str

    @property
    def name(self) -> str:
        """Its folder below the folder of all runs."""
        return run_name(*self.key)


def expected_runs(given: Given, replicates: int) -> list[Key]:
    """Every run of the study on this fixture, in the order of execution."""
    keys = [(cell, history, r) for cell, history in given.arms for r in range(1, replicates + 1)]
    return sorted(keys, key=lambda key: place_in_order(*key))


def audit_set(given: Given, runs: Path, replicates: int) -> tuple[list[Audited], list[Finding]]:
    """Read every run below `runs`: those without a fault, and the faults of the others and of the set."""
    expected = expected_runs(given, replicates)
    arms = given.arms
    findings = list(_completeness(runs, expected))
    missing = {finding.run for finding in findings if finding.reason is Reason.MISSING_RUN}
    present = [key for key in expected if run_name(*key) not in missing]
    with ThreadPoolExecutor() as pool:
        read = list(pool.map(lambda key: _audit(given, arms, runs, key), present))
    findings += [f for _, faults in read for f in faults]
    audited = [run for run, faults in read if run is not None and not faults]
    # What no single run shows is asked of those that are sound on their own, so that one fault is named once.
    for check in (
        _identities,
        _separate,
        lambda found: _replicates(found, given),
        lambda found: _belong_together(found, given, runs),
    ):
        faulty = list(check(audited))
        findings += faulty
        named = {f.run for f in faulty}
        audited = [run for run in audited if run.name not in named]
    return audited, findings


def _completeness(runs: Path, expected: Sequence[Key]) -> Iterator[Finding]:
    wanted = {run_name(*key) for key in expected}
    for name in (run_name(*key) for key in expected):
        if not (runs / name).is_dir() or (runs / name).is_symlink():
            yield Finding(name, Reason.MISSING_RUN, "no such folder; a link is none")
    found = set()
    for folder, below, files in os.walk(runs):
        below[:] = [name for name in below if not is_temporary(name)]  # what another process is writing
        at = Path(folder).relative_to(runs)
        if RECORD in files or (len(at.parts) == 3 and at.parts[0] in ASKED):
            found.add(at.as_posix())
    for name in sorted(found - wanted):
        yield Finding(name, Reason.EXTRA_RUN, "no run of the study on this fixture")


def _audit(given: Given, arms: Mapping[Arm, StoredPlan], runs: Path, key: Key) -> tuple[Audited | None, list[Finding]]:
    folder, name = runs / run_name(*key), run_name(*key)
    try:
        data = (folder / RECORD).read_bytes()
        record = Record.model_validate_json(data)
        if canonical_json(json.loads(data)) != data:
            raise ValueError("not canonical JSON")
    except (OSError, ValueError, RecursionError) as e:
        return None, [Finding(name, Reason.UNREADABLE_RECORD, first_line(e))]
    faults = [*_seal(given, key, folder, record), *_marks(given, key, record)]
    try:
        surfaces, plan = _read_tensors(folder / TENSORS, given)
    except InputError as e:
        return None, [
            Finding(name, reason, detail) for reason, detail in [*faults, (Reason.UNREADABLE_TENSORS, e.what)]
        ]
    except _FaultError as e:
        return None, [Finding(name, reason, detail) for reason, detail in [*faults, (e.reason, e.detail)]]
    faults += [
        *_surfaces(given, record, surfaces),
        *_plan(given, arms, key, record, plan),
        *_treatment(given, key, record, plan),
    ]
    audited = Audited(
        key,
        record,
        sha256_bytes(canonical_json(json.loads(data))),
        plan,
        (*surfaces.values(), plan.fingerprint),
        _process(folder),
    )
    return audited, [Finding(name, reason, detail) for reason, detail in faults]


class _FaultError(Exception):
    """A reason and its detail, found where reading cannot go on."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


Faults = Iterator[tuple[Reason, str]]


def _seal(given: Given, key: Key, folder: Path, record: Record) -> Faults:
    path = folder / RECORD_MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
        outputs = {
            name: (size, sha256_file(folder / name))
            for name in (RECORD, TENSORS)
            for size in [(folder / name).stat().st_size]
        }
    except (OSError, ValidationError) as e:
        yield Reason.BROKEN_SEAL, first_line(e)
        return
    sealed = {e.path: (e.size, e.sha256) for e in manifest.outputs}
    if sealed != outputs:
        odd = sorted(n for n in sealed.keys() | outputs.keys() if sealed.get(n) != outputs.get(n))
        yield Reason.BROKEN_SEAL, f"{odd[0]} is not the file that was sealed"
    listed = {e.sha256 for e in manifest.inputs}
    for name, digest in given.files.items():
        if digest not in listed:
            yield Reason.BROKEN_SEAL, f"{name} is not among the sealed inputs"
    if manifest.code != record.identity.source:
        yield Reason.BROKEN_SEAL, "sealed by other code than the record's source"
    if manifest.rule not in RUN_RULES:
        yield Reason.BROKEN_SEAL, f"sealed by rule {manifest.rule!r}, which makes no runs"
    place = dict(zip(("lane", "cell", "history", "replicate"), (given.prediction.lane, *key), strict=True))
    if manifest.parameters != place:
        yield Reason.BROKEN_SEAL, f"sealed for {manifest.parameters}, where {place} belongs"


def _marks(given: Given, key: Key, record: Record) -> Faults:
    cell, history, replicate = key
    frozen = given.prediction
    wanted = {
        "lane": frozen.lane,
        "point": frozen.point,
        "plan_source": frozen.plan_source,
        "cell": cell,
        "history": history,
        "replicate": replicate,
    }
    for name, value in wanted.items():
        if getattr(record, name) != value:
            yield Reason.WRONG_PLACE, f"{name} {getattr(record, name)!r} where {value!r} belongs"
    place = place_in_order(cell, history, replicate)
    if record.position != place:
        yield Reason.WRONG_POSITION, f"position {record.position}, in the order of the study {place}"
    if record.status != STATUS.get(frozen.lane):
        wanted_status = f"they are {STATUS[frozen.lane]!r}" if frozen.lane in STATUS else "the study has no such lane"
        yield Reason.WRONG_STATUS, f"results of lane {frozen.lane} are called {record.status!r}; {wanted_status}"
    if record.fixture != given.fixture_digest:
        yield Reason.FIXTURE_DIGEST, f"{record.fixture[:16]}, on disk {given.fixture_digest[:16]}"
    if record.prediction != given.prediction_digest:
        yield Reason.PREDICTION_DIGEST, f"{record.prediction[:16]}, on disk {given.prediction_digest[:16]}"
    if record.inputs != given.inputs:
        odd = sorted(
            n for n in record.inputs.keys() | given.inputs.keys() if record.inputs.get(n) != given.inputs.get(n)
        )
        yield Reason.INPUT_DIGEST, f"{odd[0]} is not the one on disk"
    if record.grid.keys() != set(GEMMS):
        yield Reason.GRID_NOT_PREDICTED, f"launches of {', '.join(sorted(record.grid))}"
        return
    for gemm in GEMMS:
        launch, asked = record.grid[gemm], given.launch(cell, gemm)
        if (launch.thread_k, launch.thread_n, launch.asked) != asked:
            found = f"({launch.thread_k}, {launch.thread_n}) on {launch.asked}"
            yield Reason.GRID_NOT_PREDICTED, f"{gemm} asked {found}, predicted ({asked[0]}, {asked[1]}) on {asked[2]}"
        if launch.launched != launch.asked:
            yield Reason.GRID_NOT_CONSUMED, f"{gemm} asked for grid {launch.asked}, launched {launch.launched}"


def _read_tensors(path: Path, given: Given) -> tuple[dict[str, str], StoredPlan]:
    """The recomputed SHA-256 of each surface, and the stored plan."""
    dtype = given.spec.dtype
    with open_tensors(path) as tensors:
        wanted = sorted((*SURFACES, *PLAN_TENSORS))
        if tensors.names != wanted:
            odd = sorted(set(tensors.names) ^ set(wanted))[0]
            raise _FaultError(Reason.TENSOR_SET, f"{odd} is {'missing' if odd in wanted else 'no tensor of a run'}")
        surfaces = {}
        for name in SURFACES:
            x = tensors.read(name)
            if x.dtype.name != dtype:
                raise _FaultError(Reason.SURFACE_DTYPE, f"{name} is stored as {x.dtype.name}, not {dtype}")
            if list(x.shape) != given.shape(name):
                detail = f"{name} is stored as {list(x.shape)}, not {given.shape(name)}"
                raise _FaultError(Reason.SURFACE_SHAPE, detail)
            surfaces[name] = sha256_array(x)
        plan = [tensors.read(name) for name in PLAN_TENSORS]
    return surfaces, StoredPlan(plan[0], plan[1], given.spec.block_size, int(given.topk_ids.size))


def _surfaces(given: Given, record: Record, found: Mapping[str, str]) -> Faults:
    if record.surfaces.keys() != set(SURFACES):
        yield Reason.TENSOR_SET, f"the record states {', '.join(sorted(record.surfaces))}"
        return
    for name in SURFACES:
        stated = record.surfaces[name]
        if stated.dtype != given.dtype:
            yield Reason.SURFACE_DTYPE, f"{name} stated as {stated.dtype}, not {given.dtype}"
        if list(stated.shape) != given.shape(name):
            yield Reason.SURFACE_SHAPE, f"{name} stated as {list(stated.shape)}, not {given.shape(name)}"
        if stated.sha256 != found[name]:
            yield Reason.SURFACE_HASH, f"{name} stated {stated.sha256[:16]}, its raw bytes give {found[name][:16]}"


def _plan(given: Given, arms: Mapping[Arm, StoredPlan], key: Key, record: Record, plan: StoredPlan) -> Faults:
    cell, history, _ = key
    if fault := plan.fault(given.topk_ids):
        yield fault
    elif (given.is_twin or cell != "native") and (difference := plan.differs(arms[cell, history])):
        yield difference
    stated = record.plan
    found = (plan.fingerprint, *plan.digests, int(plan.sorted_token_ids.size), plan.block_size, plan.routes)
    names = ("fingerprint", "sorted_token_ids", "expert_ids", "num_tokens_post_padded", "block_size", "num_routes")
    for name, value in zip(names, found, strict=True):
        if getattr(stated, name) != value:
            yield Reason.PLAN_DIGEST, f"{name} is stated as {getattr(stated, name)}, the stored plan has {value}"


def _treatment(given: Given, key: Key, record: Record, plan: StoredPlan) -> Faults:
    cell, history, _ = key
    asked, consumed = record.treatment.asked, record.treatment.consumed
    wanted = Treatment(
        intervention=ASKED[cell],
        pair=given.pairs[EXCHANGES[cell]] if cell in EXCHANGES else None,
        prelude=history == "H1" and not given.is_twin,
        sorted_token_ids=None if cell == "native" else plan.digests[0],
    )
    for reason, found, to, against in (
        (Reason.TREATMENT_NOT_ASKED, asked, wanted, "the cell and the stored plan have"),
        (Reason.TREATMENT_NOT_CONSUMED, consumed, asked, "asked for was"),
    ):
        for name in Treatment.model_fields:
            if getattr(found, name) != getattr(to, name):
                yield reason, f"{name} is {getattr(found, name)!r}, {against} {getattr(to, name)!r}"
                break


def _identities(runs: Sequence[Audited]) -> Iterator[Finding]:
    """Runs whose source, binary or environment is not that of most runs (of the earliest, in a tie)."""
    parts: dict[str, Callable[[Record], str]] = {
        "source": lambda r: r.identity.source,
        "binary": lambda r: r.identity.binary,
        "environment": lambda r: json.dumps(r.identity.environment, sort_keys=True),
    }
    for what, part in parts.items():
        count = Counter(part(run.record) for run in runs)
        if len(count) > 1:
            usual = count.most_common(1)[0][0]
            for run in runs:
                if part(run.record) != usual:
                    detail = f"{what} is {part(run.record)}, that of {count[usual]} other runs {usual}"
                    yield Finding(run.name, Reason.IDENTITY_DIFFERS, detail)


def _process(folder: Path) -> tuple[str, int, str] | str:
    try:
        told = json.loads((folder / TELEMETRY).read_bytes())
        host, pid, start = (told[name] for name in ("host", "pid", "start"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        return f"{TELEMETRY}: {first_line(e)}"
    if not (isinstance(host, str) and isinstance(pid, int) and isinstance(start, str)):
        return f"{TELEMETRY}: host {host!r}, pid {pid!r}, start {start!r}"
    return host, pid, start


def _separate(runs: Sequence[Audited]) -> Iterator[Finding]:
    """Runs of which it is not told what process they were, or that were the same one as another."""
    by_process = defaultdict(list)
    for run in runs:
        if isinstance(run.process, str):
            yield Finding(run.name, Reason.NOT_SEPARATE, run.process)
        else:
            by_process[run.process].append(run.name)
    for (host, pid, start), names in by_process.items():
        for name in names if len(names) > 1 else ():
            others = ", ".join(other for other in names if other != name)
            yield Finding(name, Reason.NOT_SEPARATE, f"process {pid} on {host} at {start}, as {others}")


def _replicates(runs: Sequence[Audited], given: Given) -> Iterator[Finding]:
    """Replicates whose outcome is not that of most; `native` on a GPU may vary, and is reported instead."""
    for (cell, _), group in by_arm(runs).items():
        count = Counter(run.outcome for run in group)
        if len(count) > 1 and (given.is_twin or cell != "native"):
            usual = count.most_common(1)[0][0]
            for run in group:
                if run.outcome != usual:
                    names = (*SURFACES, "plan")
                    odd = [n for n, a, b in zip(names, run.outcome, usual, strict=True) if a != b]
                    detail = f"{', '.join(odd)} differ from {count[usual]} of {len(group)} replicates"
                    yield Finding(run.name, Reason.REPLICATES_DIFFER, detail)


def _belong_together(audited: Sequence[Audited], given: Given, runs: Path) -> Iterator[Finding]:
    """Runs whose surfaces do not follow from one another; equal surfaces are looked at once."""
    alike: dict[tuple[str, ...], list[Audited]] = defaultdict(list)
    for run in audited:
        alike[run.outcome[: len(SURFACES)]].append(run)
    groups = list(alike.values())
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda group: list(faults_of(load_surfaces(runs, group[0]), given.spec.top_k)), groups)
        for group, faults in zip(groups, found, strict=True):
            yield from (Finding(run.name, reason, detail) for run in group for reason, detail in faults)


def by_arm(runs: Sequence[Audited]) -> dict[Arm, list[Audited]]:
    """Runs by cell and history, in the order given."""
    found: dict[Arm, list[Audited]] = defaultdict(list)
    for run in runs:
        found[run.key[0], run.key[1]].append(run)
    return dict(found)


def load_surfaces(runs: Path, run: Audited) -> dict[str, NDArray[Any]]:
    """The raw surfaces of an audited run. Raises InputError if they are no longer those that were audited."""
    path = runs / run.name / TENSORS
    with open_tensors(path) as tensors:
        surfaces = {surface: tensors.read(surface) for surface in SURFACES}
    if tuple(map(sha256_array, surfaces.values())) != run.outcome[: len(SURFACES)]:
        raise InputError(
            "changed while it was being scored", where=str(path), limit="runs stay as they are", way_out="score again"
        )
    return surfaces
