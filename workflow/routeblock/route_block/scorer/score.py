# SPDX-License-Identifier: Apache-2.0
"""The scorer: a program of its own that believes no run, and says of sound ones what they show.

It shares no code with the runs that could vouch for itself: plans, memberships and the order of the study are worked
out again (`membership`), so are the rows that can differ (`expected_rows`); every hash is taken from raw bytes
(`audit`), surfaces have to follow from one another (`arithmetic`), and only a set without a single fault is
interpreted (`relations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock.errors import InputError
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY, TENSORS
from routeblock.route_block.scorer.audit import Audited, audit_set, run_name
from routeblock.route_block.scorer.expected_rows import check_rows
from routeblock.route_block.scorer.inputs import FIXTURE, INPUTS, LAYER, PLANS, Given, check_prediction, read_given
from routeblock.route_block.scorer.reasons import Finding, Reason
from routeblock.route_block.scorer.relations import CLAIMED_AT, Status, judge_arms, judge_pairs, judge_relations

FORMAT = "routeblock.score.v1"
OWN_GEOMETRY = "published_geometry"


@dataclass(frozen=True)
class Score:
    """The verdict on a set of runs: score.json, and every failure in the order found."""

    document: dict[str, Any]
    findings: Sequence[Finding]


def judge(given: Given, runs: Path, replicates: int) -> Score:
    """Judge every run below `runs`, then, if all are sound, the prediction and the relations."""
    audited, findings = audit_set(given, runs, replicates)
    # Rows rest on plans and launches: they are asked for only of a prediction that has these right.
    findings = [*(list(check_prediction(given)) or check_rows(given)), *findings]
    sound = not findings
    arms, pairs, relations = [], [], []
    if sound:
        judged = judge_arms(runs, audited)
        arms = [arm.describe() for arm in judged.values()]
        pairs = judge_pairs(given, judged)
        relations = judge_relations(given, judged)
        findings += _failed(given, pairs, relations)
    document = {
        "format": FORMAT,
        "fixture": {"name": given.spec.name, "sha256": given.fixture_digest},
        "prediction": given.prediction_digest,
        "lane": given.lane,
        "point": given.prediction.point,
        "plan_source": given.prediction.plan_source,
        "status": audited[0].record.status if audited else None,
        "replicates": replicates,
        "sound": sound,
        "findings": [{"run": f.run, "reason": str(f.reason), "detail": f.detail} for f in findings],
        "runs": {run.name: run.record_digest for run in _in_order(audited)},
        "arms": arms,
        "pairs": pairs,
        "relations": relations,
    }
    return Score(document, findings)


def _in_order(audited: Sequence[Audited]) -> list[Audited]:
    return sorted(audited, key=lambda run: run.record.position)


def _failed(given: Given, pairs: Sequence[dict[str, Any]], relations: Sequence[dict[str, Any]]) -> list[Finding]:
    failed = []
    for pair in pairs:
        if pair["right"] is False:
            surface, rows = next(iter(pair["outside"].items()))
            name = " and ".join("/".join(pair[x]) for x in ("first", "second"))
            failed.append(
                Finding(name, Reason.PREDICTION_WRONG, f"{surface} differs on rows {rows[:8]}, not predicted")
            )
    # On a GPU a relation that fails is a result; a twin that breaks one is broken.
    if given.is_twin and given.prediction.point in CLAIMED_AT:
        for relation in relations:
            if relation["status"] == Status.FAILS and _is_fault(given, relation):
                name = f"relation {relation['number']}"
                failed.append(Finding(name, Reason.RELATION_FAILED, f"{relation['claim']}: it does not"))
    return failed


def _is_fault(given: Given, relation: dict[str, Any]) -> bool:
    """Whether a relation that fails on a twin means that something is broken.

    That equal arithmetic gives equal bits is the mechanism. That other arithmetic gives other bits is a property of the
    numbers: the published geometry was made to have it, another fixture may lack it, which is a result.
    """
    if given.spec.name == OWN_GEOMETRY:
        return True
    return any(not clause["holds"] and clause["claim"] == "equal" for clause in relation["clauses"])


def score(
    *,
    fixture: Path,
    prediction: Path,
    runs: Path,
    replicates: int,
    out: Path,
    code: str,
    plans: Path | None = None,
    lane: str | None = None,
    golden: Path | None = None,
) -> Score:
    """Judge the runs below `runs` and write score.json to `out`, its seal beside it.

    `plans`: the file of captured plans that the injected cells used; default, the fixture's stored ones. `lane`: the
    lane under which the verdict is filed (see `read_given`). `golden`: the twin's proof on recorded outputs, sealed as
    an input of the verdict. Raises InputError if fixture, prediction or proof cannot be read, or if `runs` is no
    folder; what is wrong with a run is no exception but a finding.
    """
    if not runs.is_dir():
        raise InputError(
            "no such folder", where=str(runs), limit="a folder of runs is needed", way_out="run the cells first"
        )
    if golden and not golden.is_file():
        raise InputError(
            "no such file", where=str(golden), limit="the twin's proof", way_out="run routeblock check-twin"
        )
    given = read_given(fixture, prediction, plans, lane)
    verdict = judge(given, runs, replicates)
    write_json(out, verdict.document)
    seal(
        out.with_suffix(SUFFIX),
        rule="score",
        outputs=[out],
        inputs=[*inputs_of(given, plans), *([golden] if golden else []), *files_of_runs(given, runs, replicates)],
        parameters={"replicates": replicates},
        code=code,
    )
    return verdict


def inputs_of(given: Given, plans: Path | None) -> list[Path]:
    """The files that a verdict rests on besides the runs."""
    fixture = [given.fixture_folder / name for name in (FIXTURE, LAYER, INPUTS, PLANS)]
    return [given.prediction_path, *fixture, *([plans] if plans else [])]


def files_of_runs(given: Given, runs: Path, replicates: int) -> list[Path]:
    """The record, its manifest, the tensors and the telemetry of each run that is there."""
    folders = [runs / run_name(*arm, r) for arm in given.arms for r in range(1, replicates + 1)]
    files = [folder / name for folder in folders for name in (RECORD, RECORD_MANIFEST, TENSORS, TELEMETRY)]
    return [path for path in files if path.is_file()]
