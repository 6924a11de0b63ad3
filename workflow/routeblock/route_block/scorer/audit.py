# SPDX-License-Identifier: Apache-2.0
"""The distrustful reading of runs: hashes recomputed from raw bytes, plans and markers held against the study."""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import ValidationError

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, sha256_array, sha256_bytes, sha256_file, sha256_json
from routeblock.evidence.files import is_temporary
from routeblock.evidence.manifest import Manifest
from routeblock.evidence.record import (
    BY_LOOPS,
    READ_BACK,
    RECORD,
    RECORD_MANIFEST,
    TELEMETRY,
    TELEMETRY_MANIFEST,
    TENSORS,
    Record,
    Treatment,
)
from routeblock.evidence.tensors import open_tensors
from routeblock.route_block.scorer.arithmetic import faults_of
from routeblock.route_block.scorer.expected_rows import slices_of
from routeblock.route_block.scorer.inputs import GEMMS, SURFACES, Arm, Study, first_line
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
class Process:
    """A run's process: host, pid and start; on a GPU also which one, and from when to when (seconds of the epoch).

    The start is the moment at which the run's code began, not that of the operating system's process: two runs are
    held apart by host, pid and this moment, and nothing shows that no process made two runs one after the other.
    """

    identity: tuple[str, int, datetime]
    device: tuple[str, float, float] | str
    """The GPU, begin and end; else why they cannot be read."""


@dataclass(frozen=True)
class Audited:
    """A run as it was found.

    outcome: the recomputed SHA-256 of each surface, then the plan's fingerprint. process: what its telemetry reports of
    it, or why that cannot be read.
    """

    key: Key
    record: Record
    record_digest: str
    plan: StoredPlan
    outcome: tuple[str, ...]
    process: Process | str

    @property
    def name(self) -> str:
        """Its folder below the folder of all runs."""
        return run_name(*self.key)


def expected_runs(study: Study, replicates: int) -> list[Key]:
    """Every run of the study on this fixture, in the order of execution."""
    keys = [(cell, history, r) for cell, history in study.arms for r in range(1, replicates + 1)]
    return sorted(keys, key=lambda key: place_in_order(*key))


def audit_set(
    study: Study, runs: Path, replicates: int, held: Mapping[str, Any]
) -> tuple[list[Audited], list[Finding]]:
    """Read every run below `runs`: those without a fault, and the faults of the others and of the set.

    `held`: of recorded runs, what their evidence says that the kernels used (`recorded_index.read_backs`).
    """
    expected = expected_runs(study, replicates)
    arms = study.arms
    findings = list(_completeness(runs, expected))
    missing = {finding.run for finding in findings if finding.reason is Reason.MISSING_RUN}
    present = [key for key in expected if run_name(*key) not in missing]
    with ThreadPoolExecutor() as pool:
        read = list(pool.map(lambda key: _audit(study, arms, held, runs, key), present))
    findings += [f for _, faults in read for f in faults]
    audited = [run for run, faults in read if run is not None and not faults]
    # What no single run shows is asked of those that are sound on their own, so that one fault is named once.
    for check in (
        _separate,
        lambda found: _order(found, study),
        lambda found: _some_not_read_back(found),
        lambda found: _replicates(found, study),
        lambda found: _belong_together(found, study, runs),
    ):
        faulty = list(check(audited))
        findings += faulty
        named = {f.run for f in faulty}
        audited = [run for run in audited if run.name not in named]
    return audited, findings


def _completeness(runs: Path, expected: Sequence[Key]) -> Iterator[Finding]:
    wanted = {run_name(*key) for key in expected}
    found: set[str] = set()
    links: set[str] = set()
    for folder, below, files in os.walk(runs):
        at = Path(folder).relative_to(runs)
        links.update((at / name).as_posix() for name in (*below, *files) if (Path(folder) / name).is_symlink())
        below[:] = [name for name in below if not is_temporary(name)]  # what another process is writing
        if RECORD in files or (len(at.parts) == 3 and at.parts[0] in ASKED):
            found.add(at.as_posix())
    of_runs: set[str] = set()
    for name in (run_name(*key) for key in expected):
        # A link on the way to a run, or in it, stands for files of another place.
        in_way = {link for link in links if f"{link}/".startswith(f"{name}/") or f"{name}/".startswith(f"{link}/")}
        of_runs |= in_way
        if in_way or not (runs / name).is_dir():
            detail = f"{min(in_way)} is a link, which is no run's" if in_way else "no such folder"
            yield Finding(name, Reason.MISSING_RUN, detail)
    for name in sorted((found | links) - wanted - of_runs):
        yield Finding(name, Reason.EXTRA_RUN, "no run of the study on this fixture")


def _audit(
    study: Study, arms: Mapping[Arm, StoredPlan], held: Mapping[str, Any], runs: Path, key: Key
) -> tuple[Audited | None, list[Finding]]:
    folder, name = runs / run_name(*key), run_name(*key)
    try:
        data = (folder / RECORD).read_bytes()
        record = Record.model_validate_json(data)
        if canonical_json(json.loads(data)) != data:
            raise ValueError("not canonical JSON")
    except (OSError, ValueError, RecursionError) as e:
        return None, [Finding(name, Reason.UNREADABLE_RECORD, first_line(e))]
    faults = [
        *_seal(study, key, folder, record),
        *_telemetry_seal(study, key, folder, record),
        *_marks(study, key, record),
    ]
    try:
        surfaces, plan = _read_tensors(folder / TENSORS, study)
    except InputError as e:
        return None, [
            Finding(name, reason, detail) for reason, detail in [*faults, (Reason.UNREADABLE_TENSORS, e.what)]
        ]
    except _FaultError as e:
        return None, [Finding(name, reason, detail) for reason, detail in [*faults, (e.reason, e.detail)]]
    # What a native alignment gave on a GPU was asked of nobody; any other plan is the frozen prediction's.
    wanted = plan if _is_free(study, key) else arms[key[0], key[1]]
    faults += [
        *_surfaces(study, record, surfaces),
        *_plan(study, wanted, record, plan),
        *_treatment(study, key, record, wanted),
        *_consumption(study, key, record, wanted, held.get(name)),
        *_identity(study, record),
    ]
    audited = Audited(
        key,
        record,
        sha256_bytes(canonical_json(json.loads(data))),
        plan,
        (*surfaces.values(), plan.fingerprint),
        _process(folder, study),
    )
    return audited, [Finding(name, reason, detail) for reason, detail in faults]


class _FaultError(Exception):
    """A reason and its detail, found where reading cannot go on."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


Faults = Iterator[tuple[Reason, str]]


def _seal(study: Study, key: Key, folder: Path, record: Record) -> Faults:
    """The seal of a record and its tensors, which lists what the study was given as its inputs."""
    manifest, faults = _sealed(study, key, folder, record, RECORD_MANIFEST, (RECORD, TENSORS))
    yield from faults
    # Counted off: captured plans that equal the stored ones are a second file.
    left = Counter(e.sha256 for e in manifest.inputs) if manifest else Counter()
    for name, digest in study.files.items() if manifest else ():
        left[digest] -= 1
        if left[digest] < 0:
            yield Reason.BROKEN_SEAL, f"{name} is not among the sealed inputs"


def _telemetry_seal(study: Study, key: Key, folder: Path, record: Record) -> Faults:
    """The seal of the telemetry, whose input is the record beside it."""
    manifest, faults = _sealed(study, key, folder, record, TELEMETRY_MANIFEST, (TELEMETRY,))
    yield from faults
    if manifest and [(e.path, e.sha256) for e in manifest.inputs] != [(RECORD, sha256_file(folder / RECORD))]:
        yield Reason.BROKEN_SEAL, f"{TELEMETRY} is not sealed as that of this record"


def _sealed(
    study: Study, key: Key, folder: Path, record: Record, seal_name: str, names: Sequence[str]
) -> tuple[Manifest | None, list[tuple[Reason, str]]]:
    """A seal of a run and what is wrong with it; no seal if it, or a file that it should cover, cannot be read."""
    try:
        manifest = Manifest.model_validate_json((folder / seal_name).read_bytes())
        outputs = {name: ((folder / name).stat().st_size, sha256_file(folder / name)) for name in names}
    except (OSError, ValidationError) as e:
        return None, [(Reason.BROKEN_SEAL, f"{seal_name}: {first_line(e)}")]
    details = []
    sealed = {e.path: (e.size, e.sha256) for e in manifest.outputs}
    if sealed != outputs:
        odd = sorted(n for n in sealed.keys() | outputs.keys() if sealed.get(n) != outputs.get(n))
        details.append(f"{odd[0]} is not the file that was sealed")
    if manifest.code != record.identity.source:
        details.append(f"{seal_name}: sealed by other code than the record's source")
    if manifest.rule not in (RUN_RULES[:1] if study.is_twin else RUN_RULES):
        details.append(f"{seal_name}: sealed by rule {manifest.rule!r}, which makes no runs of this lane")
    place = dict(zip(("lane", "cell", "history", "replicate"), (study.prediction.lane, *key), strict=True))
    if canonical_json(manifest.parameters) != canonical_json(place):  # True is no 1
        details.append(f"{seal_name}: sealed for {manifest.parameters}, where {place} belongs")
    return manifest, [(Reason.BROKEN_SEAL, detail) for detail in details]


def _marks(study: Study, key: Key, record: Record) -> Faults:
    cell, history, replicate = key
    frozen = study.prediction
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
    if record.fixture != study.fixture_digest:
        yield Reason.FIXTURE_DIGEST, f"{record.fixture[:16]}, on disk {study.fixture_digest[:16]}"
    if record.prediction != study.prediction_digest:
        yield Reason.PREDICTION_DIGEST, f"{record.prediction[:16]}, on disk {study.prediction_digest[:16]}"
    if record.inputs != study.tensors:
        odd = sorted(
            n for n in record.inputs.keys() | study.tensors.keys() if record.inputs.get(n) != study.tensors.get(n)
        )
        yield Reason.INPUT_DIGEST, f"{odd[0]} is not the one on disk"
    if record.grid.keys() != set(GEMMS):
        yield Reason.GRID_NOT_PREDICTED, f"launches of {', '.join(sorted(record.grid))}"
        return
    for gemm in GEMMS:
        launch, asked = record.grid[gemm], study.launch(cell, gemm)
        if (launch.thread_k, launch.thread_n, launch.asked) != asked:
            found = f"({launch.thread_k}, {launch.thread_n}) on {launch.asked}"
            yield Reason.GRID_NOT_PREDICTED, f"{gemm} asked {found}, predicted ({asked[0]}, {asked[1]}) on {asked[2]}"
        if launch.launched != launch.asked:
            yield Reason.GRID_NOT_CONSUMED, f"{gemm} asked for grid {launch.asked}, launched {launch.launched}"


def _read_tensors(path: Path, study: Study) -> tuple[dict[str, str], StoredPlan]:
    """The recomputed SHA-256 of each surface, and the stored plan."""
    dtype = study.spec.dtype
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
            if list(x.shape) != study.shape(name):
                detail = f"{name} is stored as {list(x.shape)}, not {study.shape(name)}"
                raise _FaultError(Reason.SURFACE_SHAPE, detail)
            surfaces[name] = sha256_array(x)
        plan = [tensors.read(name) for name in PLAN_TENSORS]
    return surfaces, StoredPlan(plan[0], plan[1], study.spec.block_size, int(study.topk_ids.size))


def _surfaces(study: Study, record: Record, found: Mapping[str, str]) -> Faults:
    if record.surfaces.keys() != set(SURFACES):
        yield Reason.TENSOR_SET, f"the record states {', '.join(sorted(record.surfaces))}"
        return
    for name in SURFACES:
        stated = record.surfaces[name]
        if stated.dtype != study.dtype:
            yield Reason.SURFACE_DTYPE, f"{name} stated as {stated.dtype}, not {study.dtype}"
        if list(stated.shape) != study.shape(name):
            yield Reason.SURFACE_SHAPE, f"{name} stated as {list(stated.shape)}, not {study.shape(name)}"
        if stated.sha256 != found[name]:
            yield Reason.SURFACE_HASH, f"{name} stated {stated.sha256[:16]}, its raw bytes give {found[name][:16]}"


def _is_free(study: Study, key: Key) -> bool:
    """Whether no plan was asked for."""
    return key[0] == "native" and not study.is_twin


def _plan(study: Study, wanted: StoredPlan, record: Record, plan: StoredPlan) -> Faults:
    """The stored plan against the routing, the plan that was to be used, and what the record states of it."""
    if fault := plan.fault(study.topk_ids):
        yield fault
    elif difference := plan.differs(wanted):
        yield difference
    stated = record.plan
    found = (plan.fingerprint, *plan.digests, int(plan.sorted_token_ids.size), plan.block_size, plan.routes)
    names = ("fingerprint", "sorted_token_ids", "expert_ids", "num_tokens_post_padded", "block_size", "num_routes")
    for name, value in zip(names, found, strict=True):
        if getattr(stated, name) != value:
            yield Reason.PLAN_DIGEST, f"{name} is stated as {getattr(stated, name)}, the stored plan has {value}"


def _treatment(study: Study, key: Key, record: Record, injected: StoredPlan) -> Faults:
    cell, history, _ = key
    asked, consumed = record.treatment.asked, record.treatment.consumed
    wanted = Treatment(
        intervention=ASKED[cell],
        pair=study.pairs[EXCHANGES[cell]] if cell in EXCHANGES else None,
        prelude=history == "H1" and not study.is_twin,
        sorted_token_ids=None if cell == "native" else injected.digests[0],
    )
    for reason, found in ((Reason.TREATMENT_NOT_ASKED, asked), (Reason.TREATMENT_NOT_CONSUMED, consumed)):
        for name in Treatment.model_fields:
            if getattr(found, name) != getattr(wanted, name):
                detail = f"{name} is {getattr(found, name)!r}, the frozen prediction has {getattr(wanted, name)!r}"
                yield reason, detail
                break


def _consumption(study: Study, key: Key, record: Record, wanted: StoredPlan, held: object) -> Faults:
    """What the kernels reported of themselves against the plan to inject and, on a twin, the cut of the launch.

    `held`: of a recorded run, what its evidence holds: a read-back that nobody recorded is none.
    """
    found = record.consumption
    slices = (found.slices if found else None) or {}
    if found and slices.keys() != set(GEMMS if study.is_twin else ()):
        yield Reason.GRID_NOT_CONSUMED, f"slices of {', '.join(sorted(slices)) or 'no launch'} on this lane"
        return
    if study.is_recorded and (found.model_dump(mode="json") if found else None) != held:
        yield Reason.TREATMENT_NOT_CONSUMED, "what the kernels used is not what the recorded evidence says of it"
        return
    if found is None:
        if not study.is_recorded:
            yield Reason.TREATMENT_NOT_CONSUMED, "the record does not say what the kernels used"
        return
    source = BY_LOOPS if study.is_twin else READ_BACK
    if found.source != source:
        yield Reason.TREATMENT_NOT_CONSUMED, f"what the kernels used is {found.source!r}, on this lane {source!r}"
    used = (found.sorted_token_ids, found.expert_ids, found.num_tokens_post_padded)
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    against = "the plan stored beside it" if _is_free(study, key) else "the plan of the frozen prediction"
    for name, value, want in zip(names, used, (*wanted.digests, int(wanted.sorted_token_ids.size)), strict=True):
        if value != want:
            yield Reason.TREATMENT_NOT_CONSUMED, f"the kernels used {name} {value}, {against} has {want}"
            break
    for gemm in GEMMS if study.is_twin else ():
        if slices[gemm] != _slices_digest(study, gemm, study.launch(key[0], gemm)):
            yield (
                Reason.GRID_NOT_CONSUMED,
                f"{gemm}: the loops cut its tiles otherwise than the CUDA blocks of its grid",
            )


def _slices_digest(study: Study, gemm: str, launch: tuple[int, int, int]) -> str:
    blocks = int(study.own["H0"].expert_ids.size)  # of every legal plan of this routing
    return sha256_json([sorted(pieces) for pieces in slices_of(study, gemm, blocks, launch)])


def _identity(study: Study, record: Record) -> Faults:
    """Where source, binary or environment is not the expected one."""
    expected, found = study.identity, record.identity
    for name in ("source", "binary"):
        if getattr(found, name) != getattr(expected, name):
            yield Reason.IDENTITY_DIFFERS, f"{name} is {getattr(found, name)}, expected {getattr(expected, name)}"
    names = sorted(found.environment.keys() | expected.environment.keys())
    odd = [n for n in names if found.environment.get(n) != expected.environment.get(n)]
    if odd:
        detail = f"{odd[0]} is {found.environment.get(odd[0])}, expected {expected.environment.get(odd[0])}"
        yield Reason.IDENTITY_DIFFERS, f"environment: {detail}"


def _process(folder: Path, study: Study) -> Process | str:
    try:
        document = _strict_json((folder / TELEMETRY).read_bytes())
        host, pid, start = document["host"], document["pid"], _moment(document["start"])
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as e:
        return f"{TELEMETRY}: {first_line(e)}"
    if not isinstance(host, str) or not host or type(pid) is not int:
        return f"{TELEMETRY}: host {host!r}, pid {pid!r}"
    try:
        return Process((host, pid, start), _device_use(document, start.timestamp(), recorded=study.is_recorded))
    except KeyError as e:
        return Process((host, pid, start), f"{TELEMETRY}: no {e}")
    except (ValueError, TypeError, ArithmeticError) as e:
        return Process((host, pid, start), f"{TELEMETRY}: {first_line(e)}")


def _strict_json(data: bytes) -> Any:
    """JSON without a key twice, and without numbers that are not finite or that no double holds. Raises ValueError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key twice")
        return found

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"the number {text[:16]}")
        return value

    def whole(text: str) -> int:
        finite(text)
        return int(text)

    return json.loads(data, object_pairs_hook=once, parse_constant=finite, parse_float=finite, parse_int=whole)


def _moment(stamp: object) -> datetime:
    """A stamp with its zone. Raises ValueError or TypeError."""
    if not isinstance(stamp, str):
        raise TypeError(f"stamp {stamp!r}")
    moment = datetime.fromisoformat(stamp)
    if moment.tzinfo is None:
        raise ValueError(f"stamp {stamp!r} has no zone")
    return moment.astimezone(UTC)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{value!r} seconds")
    return float(value)


def _device_use(document: dict[str, Any], start: float, *, recorded: bool) -> tuple[str, float, float]:
    """The GPU of a run, when it began to use it and when it was done.

    Recorded telemetry from before these were stamped has the start of the run and the seconds of each part up to then.
    Raises ValueError, TypeError or KeyError.
    """
    gpu = document["lane"]["gpu_uuid"]
    if not isinstance(gpu, str) or not gpu:
        raise ValueError(f"gpu_uuid {gpu!r}")
    if recorded and "begin" not in document and "end" not in document:
        spent, waited = document["seconds"], document["turn"]["seconds"]
        parts = (spent["reading"], spent["preparing"], waited["predecessor"], waited["lock"])
        begin = start + sum(map(_seconds, parts))
        end = begin + _seconds(spent["lane"])
    else:
        begin, end = (_moment(document[name]).timestamp() for name in ("begin", "end"))
    if not start <= begin < end:
        raise ValueError(f"start, begin and end are not in this order: it began {begin - start:.6f} s after its start")
    return gpu, begin, end


def _separate(runs: Sequence[Audited]) -> Iterator[Finding]:
    """Runs that do not say what process they were, or that were the same one as another."""
    by_process = defaultdict(list)
    for run in runs:
        if isinstance(run.process, str):
            yield Finding(run.name, Reason.NOT_SEPARATE, run.process)
        else:
            by_process[run.process.identity].append(run.name)
    for (host, pid, start), names in by_process.items():
        for name in names if len(names) > 1 else ():
            others = ", ".join(other for other in names if other != name)
            yield Finding(name, Reason.NOT_SEPARATE, f"process {pid} on {host} at {start.isoformat()}, as {others}")


def _order(runs: Sequence[Audited], study: Study) -> Iterator[Finding]:
    """Runs that used their GPU before the run ahead of them was done; on a twin no order is claimed.

    Stamps are compared on one GPU, so that a run on a GPU of its own would be compared with nothing: replicates are
    spread over GPUs, each is one GPU's, and a GPU is of one host.
    """
    used: list[tuple[Audited, str, float, float]] = []
    replicates, hosts = defaultdict(set), defaultdict(set)
    for run in sorted(runs, key=lambda run: run.record.position) if not study.is_twin else ():
        assert isinstance(run.process, Process)
        if isinstance(run.process.device, str):
            yield Finding(run.name, Reason.WRONG_ORDER, run.process.device)
            continue
        used.append((run, *run.process.device))
        replicates[run.record.replicate].add(run.process.device[0])
        hosts[run.process.device[0]].add(run.process.identity[0])
    ahead: dict[str, tuple[str, float]] = {}
    for run, gpu, begin, end in used:
        name, done = ahead.get(gpu, ("", begin))
        if len(gpus := replicates[run.record.replicate]) > 1:
            detail = f"replicate {run.record.replicate} is said to be of {len(gpus)} GPUs, a replicate has one"
            yield Finding(run.name, Reason.WRONG_ORDER, detail)
        elif len(hosts[gpu]) > 1:
            yield Finding(run.name, Reason.WRONG_ORDER, f"GPU {gpu} is said to be of {len(hosts[gpu])} hosts")
        elif begin < done:
            yield Finding(run.name, Reason.WRONG_ORDER, f"it began {done - begin:.3f} s before {name} was done")
        ahead[gpu] = run.name, end


def _some_not_read_back(runs: Sequence[Audited]) -> Iterator[Finding]:
    """Recorded runs that hold no read-back where others of their study do."""
    without = [run for run in runs if run.record.consumption is None]
    for run in without if len(without) < len(runs) else ():
        detail = "the record does not say what the kernels used, others of this study do"
        yield Finding(run.name, Reason.TREATMENT_NOT_CONSUMED, detail)


def _replicates(runs: Sequence[Audited], study: Study) -> Iterator[Finding]:
    """Replicates whose outcome is not that of most; `native` on a GPU may vary, and is reported instead."""
    for (cell, _), group in by_arm(runs).items():
        count = Counter(run.outcome for run in group)
        if len(count) > 1 and (study.is_twin or cell != "native"):
            usual = count.most_common(1)[0][0]
            for run in group:
                if run.outcome != usual:
                    names = (*SURFACES, "plan")
                    odd = [n for n, a, b in zip(names, run.outcome, usual, strict=True) if a != b]
                    detail = f"{', '.join(odd)} differ from {count[usual]} of {len(group)} replicates"
                    yield Finding(run.name, Reason.REPLICATES_DIFFER, detail)


def _belong_together(audited: Sequence[Audited], study: Study, runs: Path) -> Iterator[Finding]:
    """Runs whose surfaces do not follow from one another; equal surfaces are looked at once."""
    alike: dict[tuple[str, ...], list[Audited]] = defaultdict(list)
    for run in audited:
        alike[run.outcome[: len(SURFACES)]].append(run)
    groups = list(alike.values())
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda group: list(faults_of(load_surfaces(runs, group[0]), study.spec.top_k)), groups)
        for group, faults in zip(groups, found, strict=True):
            yield from (Finding(run.name, reason, detail) for run in group for reason, detail in faults)


def by_arm(runs: Sequence[Audited]) -> dict[Arm, list[Audited]]:
    """Runs by cell and history, in the order of `runs`."""
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
