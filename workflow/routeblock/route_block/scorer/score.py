# SPDX-License-Identifier: Apache-2.0
"""The scorer: a program of its own that believes no run, and reports what sound ones show.

It shares no code with the runs: plans, memberships and the order of the study are worked out again (`membership`), so
are the rows that can differ (`expected_rows`); every hash is taken from raw bytes, what computed is held against what
was expected (`audit`), surfaces have to follow from one another (`arithmetic`), and only a set without a single fault
is interpreted (`relations`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from routeblock.errors import InputError
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY, TELEMETRY_MANIFEST, TENSORS
from routeblock.route_block.scorer.audit import Audited, Process, audit_set, expected_runs, run_name
from routeblock.route_block.scorer.expected_prediction import check_fields, check_prediction
from routeblock.route_block.scorer.expected_rows import check_rows
from routeblock.route_block.scorer.inputs import (
    FIXTURE,
    INPUTS,
    LAYER,
    PLANS,
    Study,
    first_line,
    read_study,
)
from routeblock.route_block.scorer.reasons import Finding, Reason
from routeblock.route_block.scorer.recorded_index import check_recorded, index_files, read_backs
from routeblock.route_block.scorer.relations import CLAIMED_AT, Status, judge_arms, judge_pairs, judge_relations

FORMAT = "routeblock.score.v1"
OWN_GEOMETRY = "published_geometry"
PROTOCOL_REPLICATES = 5
"""Exact outcomes that the protocol demands of each cell and history."""
RUN_FILES = (RECORD, RECORD_MANIFEST, TENSORS, TELEMETRY, TELEMETRY_MANIFEST)
PROTOCOL = "protocol"
ASKED_ONLY = "asked, not read back"
NOT_CLAIMED = "not claimed"


@dataclass(frozen=True)
class Score:
    """The verdict on a set of runs: score.json, and every failure in the order found."""

    document: dict[str, Any]
    findings: Sequence[Finding]


def judge(study: Study, runs: Path, replicates: int, held: Mapping[str, Any] | None = None) -> Score:
    """Judge every run below `runs`, then, if all are sound, the prediction and the relations.

    `held`: what the evidence of recorded runs says that their kernels used, default read from it. Raises InputError
    where there is no such evidence.
    """
    audited, findings = audit_set(study, runs, replicates, read_backs(study) if held is None else held)
    # Fields and rows rest on plans and launches: they are asked of a prediction that has these right.
    findings = [*(list(check_prediction(study)) or (*check_fields(study), *check_rows(study))), *findings]
    sound = not findings
    evidence = evidence_of(replicates)
    arms, pairs, relations = [], [], []
    if sound:
        judged = judge_arms(runs, audited)
        arms = [arm.describe() for arm in judged.values()]
        pairs = judge_pairs(study, judged)
        relations = judge_relations(study, judged)
        findings += _failed(study, pairs, relations)
        if evidence != PROTOCOL:
            for relation in relations:
                relation["status"] = f"{evidence}: {relation['status']}"
    document = {
        "format": FORMAT,
        "fixture": {"name": study.spec.name, "sha256": study.fixture_digest},
        "prediction": study.prediction_digest,
        "lane": study.lane,
        "point": study.prediction.point,
        "plan_source": study.prediction.plan_source,
        "status": audited[0].record.status if audited else None,
        "replicates": replicates,
        "evidence": evidence,
        "identity": {"sha256": study.identity_digest, "frozen": study.identity.frozen},
        "order": _order_claimed(study, audited),
        "grids": sorted({_grids(study, run) for run in audited}),
        "consumed": dict(Counter(_consumed(run) for run in audited)),
        "exchange": study.prediction.exchange.model_dump(mode="json", exclude={"source"}),
        "sound": sound,
        "findings": [{"run": f.run, "reason": str(f.reason), "detail": f.detail} for f in findings],
        "runs": {run.name: run.record_digest for run in _in_order(audited)},
        "arms": arms,
        "pairs": pairs,
        "relations": relations,
    }
    return Score(document, findings)


def evidence_of(replicates: int) -> str:
    """What a verdict on so many replicates is worth: the protocol's, or exploratory, which no headline counts."""
    if replicates == PROTOCOL_REPLICATES:
        return PROTOCOL
    return f"exploratory ({replicates} of {PROTOCOL_REPLICATES})"


def _order_claimed(study: Study, audited: Sequence[Audited]) -> str:
    """What is claimed of the order: something where every GPU has runs to compare, nothing on a twin."""
    uses = Counter(run.process.device[0] for run in audited if isinstance(run.process, Process))
    if study.is_twin or not uses or min(uses.values()) < 2:
        return NOT_CLAIMED
    return f"by the begin and end stamps on {len(uses)} GPU{'s' if len(uses) > 1 else ''}"


def _consumed(run: Audited) -> str:
    return run.record.consumption.source if run.record.consumption else ASKED_ONLY


def _grids(study: Study, run: Audited) -> str:
    if study.is_twin:
        return "slices returned by the twin's loops"
    return run.record.identity.environment.get("grid_marker", "unknown")


def _in_order(audited: Sequence[Audited]) -> list[Audited]:
    return sorted(audited, key=lambda run: run.record.position)


def _failed(study: Study, pairs: Sequence[dict[str, Any]], relations: Sequence[dict[str, Any]]) -> list[Finding]:
    failed = []
    for pair in pairs:
        if pair["right"] is False:
            surface, rows = next(iter(pair["outside"].items()))
            name = " and ".join("/".join(pair[x]) for x in ("first", "second"))
            failed.append(
                Finding(name, Reason.PREDICTION_WRONG, f"{surface} differs on rows {rows[:8]}, not predicted")
            )
    # On a GPU a relation that fails is a result; a twin that breaks one is broken.
    if study.is_twin and study.prediction.point in CLAIMED_AT:
        for relation in relations:
            if relation["status"] == Status.FAILS and _is_fault(study, relation):
                name = f"relation {relation['number']}"
                failed.append(Finding(name, Reason.RELATION_FAILED, f"{relation['claim']}: it does not"))
    return failed


def _is_fault(study: Study, relation: dict[str, Any]) -> bool:
    """Whether a relation that fails on a twin means that something is broken.

    That equal arithmetic gives equal bits is the mechanism. That other arithmetic gives other bits is a property of the
    numbers: the published geometry was made to have it, another fixture may lack it, which is a result.
    """
    if study.spec.name == OWN_GEOMETRY:
        return True
    return any(not clause["holds"] and clause["claim"] == "equal" for clause in relation["clauses"])


def score(
    *,
    fixture: Path,
    prediction: Path,
    identity: Path,
    runs: Path,
    replicates: int,
    out: Path,
    plans: Path | None = None,
    lane: str | None = None,
    golden: Path | None = None,
) -> Score:
    """Judge the runs below `runs` and write score.json to `out`, its seal beside it.

    `identity`: what was expected to compute, frozen before the runs. `plans`: the file of captured plans that the
    injected cells used; None where the fixture's stored ones were. `lane`: the lane under which the verdict is filed
    (see `read_study`). `golden`: the twin's self-test on recorded outputs, of which none may differ, sealed as an input
    of the verdict. Raises InputError if one of these cannot be read or does not say that, if `runs` is no folder, or if
    runs filed as recorded are not those of the evidence; what is wrong with a run is no exception but a finding.
    """
    if not runs.is_dir():
        raise InputError(
            "no such folder", where=str(runs), limit="a folder of runs is needed", way_out="run the cells first"
        )
    if golden:
        _check_proof(golden)
    study = read_study(fixture, prediction, identity, plans, lane)
    check_recorded(study, runs, [run_name(*key) for key in expected_runs(study, replicates)])
    verdict = judge(study, runs, replicates)
    write_json(out, verdict.document)
    seal(
        out.with_suffix(SUFFIX),
        rule="score",
        outputs=[out],
        inputs=[*inputs_of(study, plans), *([golden] if golden else []), *files_of_runs(study, runs, replicates)],
        parameters={"replicates": replicates},
        modules=[__name__],
    )
    return verdict


class _Comparison(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    elements: Annotated[int, Field(ge=1)]
    differing: Annotated[int, Field(ge=0)]


class _Proof(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["routeblock.golden.v1"]
    comparisons: Annotated[list[_Comparison], Field(min_length=1)]


def _check_proof(path: Path) -> None:
    """Refuse a file that is not the twin's comparison with recorded outputs, and one in which an element differs."""
    try:
        proof = _Proof.model_validate_json(path.read_bytes())
        if odd := [c for c in proof.comparisons if c.differing]:
            raise ValueError(f"{odd[0].name} differs in {odd[0].differing} of {odd[0].elements}")
    except (OSError, ValueError) as e:
        what = "no such file" if isinstance(e, FileNotFoundError) else f"no proof of the twin: {first_line(e)}"
        limit = "the twin's comparison with recorded outputs, none of which differs"
        raise InputError(what, where=str(path), limit=limit, way_out="run routeblock gpu check-twin") from e


def inputs_of(study: Study, plans: Path | None) -> list[Path]:
    """The files that a verdict rests on besides the runs."""
    fixture = [study.fixture_folder / name for name in (FIXTURE, LAYER, INPUTS, PLANS)]
    known_by = index_files(study) if study.is_recorded else []
    return [study.prediction_path, study.identity_path, *known_by, *fixture, *([plans] if plans else [])]


def files_of_runs(study: Study, runs: Path, replicates: int) -> list[Path]:
    """The record, the tensors and the telemetry of each run that is there, and their seals."""
    folders = [runs / run_name(*arm, r) for arm in study.arms for r in range(1, replicates + 1)]
    files = [folder / name for folder in folders for name in RUN_FILES]
    return [path for path in files if path.is_file()]
