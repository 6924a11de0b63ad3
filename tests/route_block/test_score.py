# SPDX-License-Identifier: Apache-2.0
"""Each reason code is triggered by the damage it is for, and by it alone; what sound runs show is reported rightly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from synthetic import SignatureLane, Study, following, make_study, seal_identity

from routeblock.cli import main
from routeblock.cuda.device import ARCHITECTURES
from routeblock.errors import InputError
from routeblock.evidence.digest import (
    PACKAGE_ROOT,
    canonical_json,
    code_digest,
    import_closure,
    sha256_array,
    sha256_bytes,
)
from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY, TELEMETRY_MANIFEST, TENSORS
from routeblock.evidence.tensors import load_tensors, save_tensors
from routeblock.moe.devices import DEVICES
from routeblock.moe.launches import SELECTED
from routeblock.route_block import operating_point
from routeblock.route_block.operating_point import LANES
from routeblock.route_block.runs.identity import BEFORE, code_of, freeze
from routeblock.route_block.runs.twin import TwinLane
from routeblock.route_block.scorer import operating_points
from routeblock.route_block.scorer.arithmetic import faults_of
from routeblock.route_block.scorer.audit import STATUS
from routeblock.route_block.scorer.expected_prediction import FROM_CAPTURED
from routeblock.route_block.scorer.inputs import FROZEN_BEFORE, PLANS, read_study
from routeblock.route_block.scorer.inputs import Study as ReadStudy
from routeblock.route_block.scorer.membership import StoredPlan
from routeblock.route_block.scorer.mutations import mutate, seal_anew
from routeblock.route_block.scorer.reasons import Reason
from routeblock.route_block.scorer.recorded_index import check_recorded
from routeblock.route_block.scorer.score import judge, score
from routeblock.twin.layer import combine, silu_and_mul

RUN = "cross/H0/rep2"
OTHER = "0" * 64
DECLARED = PACKAGE_ROOT.parents[1] / "fixtures" / "mutations.json"


def _set(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        at = record
        for key in path[:-1]:
            at = at[key]
        assert at[path[-1]] != to
        at[path[-1]] = to

    return change


RECORD_EDITS = [
    (_set("lane", to="twin-ampere"), Reason.WRONG_PLACE),
    (_set("point", to="auto"), Reason.WRONG_PLACE),
    (_set("plan_source", to="captured"), Reason.WRONG_PLACE),
    (_set("history", to="H1"), Reason.WRONG_PLACE),
    (_set("replicate", to=1), Reason.WRONG_PLACE),
    (_set("position", to=0), Reason.WRONG_POSITION),
    (_set("fixture", to=OTHER), Reason.FIXTURE_DIGEST),
    (_set("prediction", to=OTHER), Reason.PREDICTION_DIGEST),
    (_set("inputs", "layer", to=OTHER), Reason.INPUT_DIGEST),
    (_set("inputs", "topk_weights", to=OTHER), Reason.INPUT_DIGEST),
    (_set("surfaces", "w2", "dtype", to="BF16"), Reason.SURFACE_DTYPE),
    (_set("surfaces", "final", "shape", to=[18, 64]), Reason.SURFACE_SHAPE),
    (_set("surfaces", "final", "sha256", to=OTHER), Reason.SURFACE_HASH),
    (lambda r: r["surfaces"].pop("final"), Reason.TENSOR_SET),
    (_set("plan", "fingerprint", to=OTHER), Reason.PLAN_DIGEST),
    (_set("plan", "expert_ids", to=OTHER), Reason.PLAN_DIGEST),
    (_set("plan", "num_tokens_post_padded", to=40), Reason.PLAN_DIGEST),
    (_set("treatment", "consumed", "intervention", to="own plan injected"), Reason.TREATMENT_NOT_CONSUMED),
    (_set("treatment", "consumed", "sorted_token_ids", to=OTHER), Reason.TREATMENT_NOT_CONSUMED),
    (_set("treatment", "consumed", "prelude", to=True), Reason.TREATMENT_NOT_CONSUMED),
    (_set("grid", "w2", "launched", to=8), Reason.GRID_NOT_CONSUMED),
    (_set("consumption", "source", to="read back from the device"), Reason.TREATMENT_NOT_CONSUMED),
    (_set("consumption", "sorted_token_ids", to=OTHER), Reason.TREATMENT_NOT_CONSUMED),
    (_set("consumption", "expert_ids", to=OTHER), Reason.TREATMENT_NOT_CONSUMED),
    (_set("consumption", "num_tokens_post_padded", to=40), Reason.TREATMENT_NOT_CONSUMED),
    (_set("consumption", to=None), Reason.TREATMENT_NOT_CONSUMED),
    (_set("consumption", "slices", "w13", to=OTHER), Reason.GRID_NOT_CONSUMED),
    (_set("identity", "source", to=OTHER), Reason.IDENTITY_DIFFERS),
    (_set("identity", "binary", to=OTHER), Reason.IDENTITY_DIFFERS),
    (_set("identity", "environment", to={"numpy": "1"}), Reason.IDENTITY_DIFFERS),
    (_set("status", to="modelled"), Reason.WRONG_STATUS),
    (_set("status", to="computed by something else"), Reason.WRONG_STATUS),
    (_set("status", to="observed"), Reason.WRONG_STATUS),
]


def test_a_sound_study_has_no_finding_and_all_relations_hold(sound: Study) -> None:
    verdict = sound.judge()
    assert verdict.findings == []
    assert [r["status"] for r in verdict.document["relations"]] == ["holds"] * 7
    assert len(verdict.document["pairs"]) == 91
    assert all(p["right"] for p in verdict.document["pairs"])
    changed = [len(p["predicted_rows"]["w13"]) for p in verdict.document["pairs"]]
    assert 0 in changed and max(changed) > 0 and any(0 < c < 36 for c in changed)


def test_relations_that_are_one_computation_are_said_to_hold_by_construction(sound: Study) -> None:
    basis = {r["number"]: r["basis"] for r in sound.judge().document["relations"]}
    assert [n for n, b in basis.items() if b == "by construction"] == [2, 3]
    assert {b for n, b in basis.items() if n not in (2, 3)} == {"computed"}


@pytest.mark.parametrize(("change", "reason"), RECORD_EDITS)
def test_an_edited_record_is_refused(study: Study, change: Callable[[dict[str, Any]], object], reason: Reason) -> None:
    study.edit(RUN, change)
    assert study.reasons() == [(RUN, reason)]


def test_a_treatment_that_both_markers_agree_on_is_held_against_the_cell(study: Study) -> None:
    def change(record: dict[str, Any]) -> None:
        for marker in record["treatment"].values():
            marker["intervention"] = "own plan injected"

    study.edit(RUN, change)
    assert study.reasons() == [(RUN, Reason.TREATMENT_NOT_ASKED), (RUN, Reason.TREATMENT_NOT_CONSUMED)]


def test_a_pair_that_is_not_the_fixtures_is_refused(study: Study) -> None:
    def change(record: dict[str, Any]) -> None:
        for marker in record["treatment"].values():
            marker["pair"] = [0, 1]

    study.edit("swap_across/H1/rep1", change)
    assert [reason for _, reason in study.reasons()] == [Reason.TREATMENT_NOT_ASKED, Reason.TREATMENT_NOT_CONSUMED]


@pytest.mark.parametrize(("cell", "grid"), [("full_k", 4), ("cross", 3)])
def test_a_grid_asked_for_and_launched_that_is_not_the_predicted_one_is_refused(
    study: Study, cell: str, grid: int
) -> None:
    study.edit(f"{cell}/H0/rep2", lambda r: r["grid"]["w13"].update(asked=grid, launched=grid))
    assert study.reasons() == [(f"{cell}/H0/rep2", Reason.GRID_NOT_PREDICTED)]


def test_a_source_that_the_seal_contradicts_is_refused(study: Study) -> None:
    path = study.runs / RUN / RECORD_MANIFEST
    manifest = json.loads(path.read_bytes())
    path.write_bytes(canonical_json({**manifest, "code": OTHER}))
    assert study.reasons() == [(RUN, Reason.BROKEN_SEAL)]


def test_a_record_that_was_not_sealed_anew_is_refused(study: Study) -> None:
    study.edit(RUN, lambda r: None)
    assert study.reasons() == []
    study.edit(RUN, _set("position", to=0), seal=False)
    assert (RUN, Reason.BROKEN_SEAL) in study.reasons()


def test_a_run_sealed_with_another_prediction_is_refused(study: Study) -> None:
    path = study.runs / RUN / RECORD_MANIFEST
    manifest = json.loads(path.read_bytes())
    manifest["inputs"] = [e for e in manifest["inputs"] if not e["path"].endswith("prediction.json")]
    path.write_bytes(canonical_json(manifest))
    assert study.reasons() == [(RUN, Reason.BROKEN_SEAL)]


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("rule", "handmade"),
        ("rule", "score"),
        ("rule", "run_cuda"),
        ("parameters", {}),
        ("parameters", {"cell": "native"}),
    ],
)
def test_a_run_sealed_as_something_else_is_refused(study: Study, part: str, value: object) -> None:
    path = study.runs / RUN / RECORD_MANIFEST
    manifest = json.loads(path.read_bytes())
    manifest[part] = value
    path.write_bytes(canonical_json(manifest))
    assert study.reasons() == [(RUN, Reason.BROKEN_SEAL)]


def test_a_copy_of_a_run_is_no_process_of_its_own(study: Study) -> None:
    first = RUN.replace("rep2", "rep1")
    assert first != RUN
    shutil.copy(study.runs / first / TELEMETRY, study.runs / RUN / TELEMETRY)
    seal_anew(study.runs / RUN, TELEMETRY_MANIFEST)
    assert study.reasons() == [(first, Reason.NOT_SEPARATE), (RUN, Reason.NOT_SEPARATE)]


START = b'"2026-11-30T03:17:10+00:00"'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"host":"a","pid":"b","start":"c"}',
        b"[" * 100_000,
        b'{"host":"a","pid":1,"start":"2026-11-30T03:17:10"}',
        b'{"host":"a","pid":1,"start":1764472630}',
        b'{"host":"a","pid":true,"start":%s}' % START,
        b'{"host":"","pid":1,"start":%s}' % START,
        b'{"host":"a","pid":1,"pid":2,"start":%s}' % START,
        b'{"host":"a","pid":1,"start":%s,"seconds":NaN}' % START,
        b'{"host":"a","pid":1,"start":%s,"seconds":-Infinity}' % START,
        b'{"host":"a","pid":1,"start":%s,"seconds":1e999}' % START,
        b'{"host":"a","pid":1,"start":%s,"seconds":1%s}' % (START, b"0" * 400),
    ],
)
def test_a_run_that_does_not_tell_its_process_is_refused(study: Study, data: bytes) -> None:
    (study.runs / RUN / TELEMETRY).write_bytes(data)
    seal_anew(study.runs / RUN, TELEMETRY_MANIFEST)
    assert study.reasons() == [(RUN, Reason.NOT_SEPARATE)]


def test_the_start_of_another_run_spelled_otherwise_is_no_process_of_its_own(study: Study) -> None:
    first = RUN.replace("rep2", "rep1")
    told = json.loads((study.runs / first / TELEMETRY).read_bytes())
    told["start"] = told["start"].replace("+00:00", "Z")
    study.edit_telemetry(RUN, lambda t: t.update(told))
    assert study.reasons() == [(first, Reason.NOT_SEPARATE), (RUN, Reason.NOT_SEPARATE)]


@pytest.mark.parametrize("name", [TELEMETRY, TELEMETRY_MANIFEST])
def test_telemetry_without_its_seal_is_refused(study: Study, name: str) -> None:
    (study.runs / RUN / name).unlink()
    assert study.reasons() == [(RUN, Reason.BROKEN_SEAL)]


def test_telemetry_that_was_not_sealed_anew_is_refused(study: Study) -> None:
    study.edit_telemetry(RUN, lambda t: t.update(pid=1), seal=False)
    assert study.reasons() == [(RUN, Reason.BROKEN_SEAL)]


def test_telemetry_sealed_for_another_record_is_refused(study: Study) -> None:
    path = study.runs / RUN / TELEMETRY_MANIFEST
    manifest = json.loads(path.read_bytes())
    manifest["inputs"][0]["sha256"] = OTHER
    path.write_bytes(canonical_json(manifest))
    assert study.reasons() == [(RUN, Reason.BROKEN_SEAL)]


def _times(study: Study, run: str, **times: Any) -> None:
    study.edit_telemetry(run, lambda t: t.update(times))


def _planned(study: Study) -> list[str]:
    """Every run, in the planned order of the study."""
    at = {run: json.loads((study.runs / run / RECORD).read_bytes())["position"] for run in _all_runs(study)}
    return sorted(at, key=lambda run: at[run])


@pytest.fixture(scope="module")
def sound_gpu(tmp_path_factory: pytest.TempPathFactory) -> Study:
    root = tmp_path_factory.mktemp("gpu") / "study"
    return make_study(root, lane_name="cuda", lane=SignatureLane("observed"))


def test_on_a_gpu_start_times_in_reverse_order_are_refused(sound_gpu: Study, tmp_path: Path) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    assert study.judge().document["order"] == "by the begin and end stamps on 1 GPU" and not study.reasons()
    runs = _planned(study)
    stamps = [json.loads((study.runs / run / TELEMETRY).read_bytes()) for run in runs]
    for run, other in zip(runs, reversed(stamps), strict=True):
        _times(study, run, **{name: other[name] for name in ("start", "begin", "end")})
    assert study.reasons() == [(run, Reason.WRONG_ORDER) for run in runs[1:]]


def test_on_a_gpu_a_run_that_began_while_another_had_the_device_is_refused(sound_gpu: Study, tmp_path: Path) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    first, second = _planned(study)[3:5]
    _times(study, second, begin=json.loads((study.runs / first / TELEMETRY).read_bytes())["begin"])
    assert study.reasons() == [(second, Reason.WRONG_ORDER)]


def test_on_a_gpu_a_run_without_stamps_is_refused(sound_gpu: Study, tmp_path: Path) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    study.edit_telemetry(RUN, lambda t: [t.pop(name) for name in ("begin", "end", "turn")])
    assert study.reasons() == [(RUN, Reason.WRONG_ORDER)]


def _as_before_the_stamps(telemetry: dict[str, Any], **waited: Any) -> None:
    for name in ("begin", "end"):
        telemetry.pop(name)
    telemetry["turn"] = {"seconds": {"predecessor": 0.0, "lock": 0.0, **waited}}


def test_stamps_derived_from_seconds_are_believed_of_recorded_runs_alone(sound_gpu: Study, tmp_path: Path) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    run = _planned(study)[-1]
    study.edit_telemetry(run, _as_before_the_stamps)
    assert study.reasons() == [(run, Reason.WRONG_ORDER)]
    recorded = _recorded(study)
    assert judge(recorded, study.runs, 5).findings == []
    study.edit_telemetry(run, lambda t: t["turn"]["seconds"].update(lock=-1.0))
    assert [(f.run, f.reason) for f in judge(recorded, study.runs, 5).findings] == [(run, Reason.WRONG_ORDER)]


AT = "2026-11-30T03:17:1{}+00:00"


@pytest.mark.parametrize(
    "times",
    [
        {"start": AT.format(1), "begin": AT.format(3), "end": AT.format(2)},
        {"start": AT.format(1), "begin": AT.format(2), "end": AT.format(2)},
        {"start": AT.format(2), "begin": AT.format(1), "end": AT.format(3)},
        {"begin": AT.format(2)[:19]},
        {"end": AT.format(2)[:19]},
        {"begin": "0001-01-01T00:00:00"},
        {"begin": "0001-01-01T00:00:00+14:00"},
        {"begin": 1764472630.0},
        {"begin": None},
        {"lane": [1]},
        {"lane": {"gpu_uuid": ["one"]}},
        {"lane": {"gpu_uuid": ""}},
        {"lane": {"gpu_uuid": None}},
    ],
)
def test_on_a_gpu_impossible_times_and_devices_are_refused(
    sound_gpu: Study, tmp_path: Path, times: dict[str, Any]
) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    run = _planned(study)[0]
    _times(study, run, **times)
    assert (run, Reason.WRONG_ORDER) in study.reasons()


def test_on_a_gpu_runs_that_each_name_another_device_are_refused(sound_gpu: Study, tmp_path: Path) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    for run in _planned(study):
        _times(study, run, lane={"gpu_uuid": run})
    assert study.reasons() == [(run, Reason.WRONG_ORDER) for run in _planned(study)]


def test_on_a_gpu_runs_of_one_device_on_two_hosts_are_refused(sound_gpu: Study, tmp_path: Path) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    _times(study, RUN, host="elsewhere")
    assert study.reasons() == [(run, Reason.WRONG_ORDER) for run in _planned(study)]


def test_on_a_gpu_runs_of_two_devices_need_not_wait_for_each_other(sound_gpu: Study, tmp_path: Path) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    runs = _planned(study)
    stamps = [json.loads((study.runs / run / TELEMETRY).read_bytes()) for run in runs]
    for run, other in zip(runs[14:28], stamps[:14], strict=True):
        _times(study, run, start=other["begin"], begin=other["begin"], end=other["end"])
    assert {reason for _, reason in study.reasons()} == {Reason.WRONG_ORDER}
    for run in runs[14:28]:
        _times(study, run, lane={"gpu_uuid": "another"})
    assert study.reasons() == []
    assert study.judge().document["order"] == "by the begin and end stamps on 2 GPUs"


def test_on_a_twin_no_order_is_claimed(study: Study) -> None:
    runs = _planned(study)
    stamps = [json.loads((study.runs / run / TELEMETRY).read_bytes()) for run in runs]
    for run, other in zip(runs, reversed(stamps), strict=True):
        _times(study, run, **{name: other[name] for name in ("start", "begin", "end")})
    assert study.reasons() == [] and study.judge().document["order"] == "not claimed"


def test_another_identity_is_refused_however_many_runs_agree_on_it(study: Study) -> None:
    runs = _all_runs(study)
    for run in runs:
        study.edit(run, lambda r: r["identity"].update(binary=OTHER, environment={"numpy": "1"}))
    found = study.reasons()
    assert {reason for _, reason in found} == {Reason.IDENTITY_DIFFERS} and {run for run, _ in found} == set(runs)


def test_an_identity_that_the_runs_did_not_have_as_input_is_no_expectation(study: Study) -> None:
    document = json.loads(study.identity.read_bytes())
    study.identity.write_bytes(canonical_json({**document, "more": "later"}))
    seal_identity(study.identity)
    assert study.reasons() == [(run, Reason.BROKEN_SEAL) for run in _planned(study)]


def test_an_identity_that_is_not_the_one_sealed_is_bad_input(study: Study) -> None:
    document = json.loads(study.identity.read_bytes())
    study.identity.write_bytes(canonical_json({**document, "binary": OTHER}))
    with pytest.raises(InputError, match="not the file that was sealed"):
        study.judge()
    study.identity.with_suffix(".manifest.json").unlink()
    with pytest.raises(InputError, match="no readable seal"):
        study.judge()


def test_an_identity_that_says_it_was_frozen_later_is_bad_input(study: Study) -> None:
    document = json.loads(study.identity.read_bytes())
    study.identity.write_bytes(canonical_json({**document, "frozen": "after the runs, from the runs"}))
    seal_identity(study.identity)
    with pytest.raises(InputError, match="that of runs made here is 'before the first run, as its input'"):
        study.judge()


def test_the_scorers_phrase_of_a_frozen_identity_is_the_one_that_is_written() -> None:
    assert FROZEN_BEFORE == BEFORE


def test_a_file_of_plans_is_for_captured_plans_and_demanded_there(study: Study) -> None:
    with pytest.raises(InputError, match="a file of plans for a study of stored plans"):
        read_study(study.fixture, study.prediction, study.identity, study.fixture / PLANS)
    study.edit_prediction(lambda p: p.update(plan_source="captured"))
    with pytest.raises(InputError, match="no file of plans for a study of captured plans"):
        read_study(study.fixture, study.prediction, study.identity)


def _as_captured(study: Study) -> None:
    """The study says that its plans were captured, and that the fixture's pairs serve them."""
    words = {"chosen": "within by construction, across by construction", "from": FROM_CAPTURED}

    def change(document: dict[str, Any]) -> None:
        exchange = {name: document["exchange"][name] for name in ("within", "across")}
        document.update(plan_source="captured", exchange={**exchange, **words})

    study.edit_prediction(change)
    for run in _all_runs(study):
        study.edit(run, lambda r: r.update(plan_source="captured"))


def test_the_file_of_captured_plans_has_to_be_a_sealed_input(study: Study, tmp_path: Path) -> None:
    _as_captured(study)
    plans = load_tensors(study.fixture / PLANS)
    save_tensors(tmp_path / "plans.safetensors", {**plans, "more": np.zeros(1)})  # the same plans in another file
    read = read_study(study.fixture, study.prediction, study.identity, tmp_path / "plans.safetensors")
    found = judge(read, study.runs, 5).findings
    assert {(f.reason, f.detail) for f in found} == {
        (Reason.BROKEN_SEAL, "captured plans is not among the sealed inputs")
    }
    assert len(found) == 70


def test_the_fixtures_own_plans_are_no_captured_ones(study: Study) -> None:
    _as_captured(study)
    read = read_study(study.fixture, study.prediction, study.identity, study.fixture / PLANS)
    assert {f.reason for f in judge(read, study.runs, 5).findings} == {Reason.BROKEN_SEAL}


def test_on_a_gpu_slices_that_it_cannot_report_are_refused(sound_gpu: Study, tmp_path: Path) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    study.edit(RUN, _set("consumption", "slices", to={"w13": OTHER, "w2": OTHER}))
    assert study.reasons() == [(RUN, Reason.GRID_NOT_CONSUMED)]


def _recorded(study: Study) -> ReadStudy:
    """The study as recorded evidence: an identity written after the runs, and an index of the runs as they are."""
    path = study.identity.with_name("later.json")
    document = json.loads(study.identity.read_bytes())
    path.write_bytes(canonical_json({**document, "frozen": "after the runs, from them"}))

    def line(folder: str, names: list[str], documents: dict[str, Any]) -> bytes:
        digests = {name: sha256_bytes((study.runs / folder / name).read_bytes()) for name in names}
        return canonical_json({"folder": folder, "sha256": digests, "documents": documents}) + b"\n"

    data = line(".", ["prediction.json"], {})
    for run in _all_runs(study):
        record = json.loads((study.runs / run / RECORD).read_bytes())
        data += line(run, [p.name for p in (study.runs / run).iterdir()], {RECORD: record})
    path.with_name("published.stored.jsonl").write_bytes(data)
    index = {"groups": {"published.stored": {"sha256": sha256_bytes(data)}}}
    path.with_name("evidence.json").write_bytes(canonical_json(index))
    return read_study(study.fixture, study.prediction, path, lane="recorded-gpu")


@pytest.mark.parametrize("lane", ["recorded-", "recorded-A", "recorded-a/b", "recorded-a b", "recorded", "h200"])
def test_no_other_name_is_a_recorded_lane(sound_gpu: Study, lane: str) -> None:
    with pytest.raises(InputError, match=f"cannot be filed as {lane}"):
        read_study(sound_gpu.fixture, sound_gpu.prediction, sound_gpu.identity, lane=lane)


def test_an_identity_frozen_before_is_not_that_of_recorded_runs(sound_gpu: Study) -> None:
    with pytest.raises(InputError, match="that of recorded evidence says 'after the runs' first"):
        read_study(sound_gpu.fixture, sound_gpu.prediction, sound_gpu.identity, lane="recorded-gpu")


def test_runs_are_filed_as_recorded_where_the_evidence_names_them_and_nowhere_else(
    sound_gpu: Study, tmp_path: Path
) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    recorded, names = _recorded(study), _all_runs(study)
    index = recorded.identity_path.with_name("evidence.json")
    index.rename(index.with_suffix(".aside"))
    with pytest.raises(InputError, match="no readable evidence"):
        check_recorded(recorded, study.runs, names)
    index.with_suffix(".aside").rename(index)
    check_recorded(recorded, study.runs, names)
    study.edit(RUN, lambda r: r.pop("consumption"))
    with pytest.raises(InputError, match=f"{RUN}/record.json: not the file of the recorded evidence"):
        check_recorded(recorded, study.runs, names)
    with pytest.raises(InputError, match="not the file of the recorded evidence"):
        score(
            fixture=study.fixture,
            prediction=study.prediction,
            identity=recorded.identity_path,
            runs=study.runs,
            replicates=5,
            out=tmp_path / "score.json",
            lane="recorded-gpu",
        )
    assert not (tmp_path / "score.json").exists()
    lines = index.with_name("published.stored.jsonl")
    lines.write_bytes(lines.read_bytes()[:-1])
    with pytest.raises(InputError, match="is not the file that it names"):
        check_recorded(recorded, study.runs, names)


def test_the_identity_of_another_lane_is_bad_input(study: Study) -> None:
    document = json.loads(study.identity.read_bytes())
    study.identity.write_bytes(canonical_json({**document, "lane": "twin-ampere"}))
    with pytest.raises(InputError, match=r"identity of lane twin-ampere.*runs are of lane twin-hopper"):
        study.judge()


def test_recorded_runs_without_a_read_back_are_asked_for_and_not_called_consumed(
    sound_gpu: Study, tmp_path: Path
) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    recorded = _recorded(study)
    assert judge(recorded, study.runs, 5).document["consumed"] == {"read back from the device": 70}
    study.edit(RUN, _set("consumption", to=None))
    assert [(f.run, f.reason) for f in judge(recorded, study.runs, 5).findings] == [
        (RUN, Reason.TREATMENT_NOT_CONSUMED)
    ]
    recorded = _recorded(study)  # evidence in which one run alone holds none
    assert [(f.run, f.reason) for f in judge(recorded, study.runs, 5).findings] == [
        (RUN, Reason.TREATMENT_NOT_CONSUMED)
    ]
    for run in _all_runs(study):
        study.edit(run, lambda r: r.pop("consumption"))
    recorded = _recorded(study)
    verdict = judge(recorded, study.runs, 5)
    assert verdict.findings == [] and verdict.document["consumed"] == {"asked, not read back": 70}
    assert {reason for _, reason in study.reasons()} == {Reason.TREATMENT_NOT_CONSUMED}


def test_every_mutation_of_what_was_consumed_is_tried_on_recorded_runs_without_a_read_back(
    sound_gpu: Study, tmp_path: Path
) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    for run in _all_runs(study):
        study.edit(run, lambda r: r.pop("consumption"))
    recorded = _recorded(study)
    entries = mutate(
        fixture=study.fixture,
        prediction=study.prediction,
        identity=recorded.identity_path,
        runs=study.runs,
        replicates=5,
        declared=DECLARED,
        out=tmp_path / "mutations.json",
        lane="recorded-gpu",
    )
    assert {e["name"]: e["found"] for e in entries if not e["as_declared"]} == {}
    found = {e["name"]: e["found"] for e in entries}
    for name in ("plan_consumed", "read_back_claimed", "treatment_marker"):
        assert found[name] == ["treatment_not_consumed"]
    assert found["slices_consumed"] == ["grid_not_consumed"]


def test_a_prediction_filed_as_recorded_is_the_recorded_one(sound_gpu: Study, tmp_path: Path) -> None:
    study = sound_gpu.copy(tmp_path / "study")
    recorded = _recorded(study)
    study.prediction.write_bytes(study.prediction.read_bytes().replace(b'"assumed"', b'"recorded"'))
    read = read_study(study.fixture, study.prediction, recorded.identity_path, lane="recorded-gpu")
    with pytest.raises(InputError, match=r"prediction\.json: not the file of the recorded evidence"):
        check_recorded(read, study.runs, _all_runs(study))


@pytest.mark.parametrize("replicates", [1, 4, 6])
def test_another_number_of_replicates_is_exploratory_and_no_relation_is_said_to_hold(
    tmp_path: Path, replicates: int
) -> None:
    verdict = make_study(tmp_path / "study", replicates=replicates).judge()
    assert verdict.findings == []
    said = f"exploratory ({replicates} of 5)"
    assert verdict.document["evidence"] == said
    assert {r["status"] for r in verdict.document["relations"]} == {f"{said}: holds"}


def test_a_link_to_a_run_is_no_run(study: Study) -> None:
    (study.runs / RUN).rename(study.runs.parent / "elsewhere")
    (study.runs / RUN).symlink_to(study.runs.parent / "elsewhere")
    assert study.reasons() == [(RUN, Reason.MISSING_RUN)]


@pytest.mark.parametrize("folder", ["cross/H0", "cross"])
def test_a_link_on_the_way_to_runs_is_no_folder_of_runs(study: Study, folder: str) -> None:
    runs = [run for run in _planned(study) if run.startswith(f"{folder}/")]
    (study.runs / folder).rename(study.runs.parent / "elsewhere")
    (study.runs / folder).symlink_to(study.runs.parent / "elsewhere")
    assert study.reasons() == [(run, Reason.MISSING_RUN) for run in runs]


@pytest.mark.parametrize("file", [RECORD, RECORD_MANIFEST, TELEMETRY, TELEMETRY_MANIFEST, TENSORS])
def test_a_link_in_a_run_is_no_file_of_it(study: Study, file: str) -> None:
    (study.runs / RUN / file).rename(study.runs.parent / "elsewhere")
    (study.runs / RUN / file).symlink_to(study.runs.parent / "elsewhere")
    assert study.reasons() == [(RUN, Reason.MISSING_RUN)]


@pytest.mark.parametrize("name", ["cross/H0/rep6", "more", "cross/H0/rep6.tmp", "note.txt"])
def test_a_link_beside_the_runs_is_named(study: Study, name: str) -> None:
    (study.runs / name).symlink_to(study.runs / "native")
    assert study.reasons() == [(name, Reason.EXTRA_RUN)]


def test_one_run_gone_and_one_too_many_are_both_named(study: Study) -> None:
    (study.runs / RUN).rename(study.runs / "cross/H0/rep6")
    assert study.reasons() == [(RUN, Reason.MISSING_RUN), ("cross/H0/rep6", Reason.EXTRA_RUN)]


def test_a_record_in_a_place_of_no_cell_is_named(study: Study) -> None:
    (study.runs / "elsewhere").mkdir()
    (study.runs / "elsewhere" / RECORD).write_bytes(b"{}")
    assert study.reasons() == [("elsewhere", Reason.EXTRA_RUN)]


@pytest.mark.parametrize("data", [b"", b"{}", b'{"cell":1}', b"[[[["])
def test_a_malformed_record_is_refused(study: Study, data: bytes) -> None:
    (study.runs / RUN / RECORD).write_bytes(data)
    assert study.reasons() == [(RUN, Reason.UNREADABLE_RECORD)]


def test_a_record_with_a_key_twice_is_refused(study: Study) -> None:
    path = study.runs / RUN / RECORD
    path.write_bytes(path.read_bytes().replace(b'{"cell"', b'{"cell":"native","cell"', 1))
    assert study.reasons() == [(RUN, Reason.UNREADABLE_RECORD)]


def test_truncated_tensors_are_refused(study: Study) -> None:
    path = study.runs / RUN / TENSORS
    path.write_bytes(path.read_bytes()[:-1])
    assert study.reasons() == [(RUN, Reason.BROKEN_SEAL), (RUN, Reason.UNREADABLE_TENSORS)]


def _flip(tensors: dict[str, Any]) -> None:
    tensors["w13"].view(np.uint16)[3, 5] ^= 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_flip, Reason.SURFACE_HASH),
        (lambda t: t.update(final=t["final"].astype(np.float32)), Reason.SURFACE_DTYPE),
        (lambda t: t.update(final=t["final"].reshape(9, -1)), Reason.SURFACE_SHAPE),
        (lambda t: t.update(more=t["final"]), Reason.TENSOR_SET),
        (lambda t: t.pop("w2"), Reason.TENSOR_SET),
    ],
)
def test_changed_tensors_are_refused(study: Study, change: Callable[[Any], object], reason: Reason) -> None:
    study.edit_tensors(RUN, change)
    assert study.reasons() == [(RUN, reason)]


def test_a_flipped_bit_with_its_hash_stated_anew_differs_from_the_other_replicates(study: Study) -> None:
    study.edit_tensors(RUN, _flip)
    digest = sha256_array(load_tensors(study.runs / RUN / TENSORS)["w13"])
    study.edit(RUN, _set("surfaces", "w13", "sha256", to=digest))
    assert study.reasons() == [(RUN, Reason.REPLICATES_DIFFER)]


def _follow(study: Study, run: str, *, throughout: bool = False) -> None:
    """State the digests of the stored plan anew; `throughout`: in the markers and the kernels' report too."""
    tensors = load_tensors(study.runs / run / TENSORS)
    plan = StoredPlan(tensors["sorted_token_ids"], tensors["expert_ids"], 8, 36)

    def change(record: dict[str, Any]) -> None:
        record["plan"]["fingerprint"] = plan.fingerprint
        record["plan"]["sorted_token_ids"], record["plan"]["expert_ids"] = plan.digests
        if not throughout:
            return
        if found := record.get("consumption"):
            found["sorted_token_ids"], found["expert_ids"] = plan.digests
        for marker in record["treatment"].values():
            marker["sorted_token_ids"] = plan.digests[0]

    study.edit(run, change)


def _slots(*at: int, to: Callable[[list[int]], list[int]]) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        ids = tensors["sorted_token_ids"]
        ids[list(at)] = to([int(i) for i in ids[list(at)]])

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_slots(0, 8, to=lambda x: x[::-1]), Reason.ROUTE_MEMBERSHIP),
        (_slots(0, 1, to=lambda x: x[::-1]), Reason.SLOT_ORDER),
        (_slots(0, 16, to=lambda x: x[::-1]), Reason.EXPERT_BLOCK),
        (_slots(0, 1, to=lambda x: [x[0], x[0]]), Reason.ILLEGAL_PLAN),
        (_slots(0, to=lambda x: [36]), Reason.ILLEGAL_PLAN),
        (_slots(0, to=lambda x: [-1]), Reason.ILLEGAL_PLAN),
        (_slots(0, to=lambda x: [99]), Reason.ILLEGAL_PLAN),
        (_slots(20, 21, to=lambda x: x[::-1]), Reason.ILLEGAL_PLAN),
        (lambda t: t.update(expert_ids=t["expert_ids"] + np.int32(1)), Reason.EXPERT_BLOCK),
        (lambda t: t.update(expert_ids=t["expert_ids"].astype(np.int64)), Reason.ILLEGAL_PLAN),
        (lambda t: t.update(expert_ids=t["expert_ids"][:-1].copy()), Reason.ILLEGAL_PLAN),
    ],
)
def test_a_forged_plan_is_refused(study: Study, change: Callable[[Any], object], reason: Reason) -> None:
    study.edit_tensors(RUN, change)
    _follow(study, RUN)
    assert study.reasons() == [(RUN, reason)]


@pytest.mark.parametrize("recorded", [False, True])
def test_another_plan_that_every_file_of_a_run_agrees_on_is_not_the_one_consumed(
    sound_gpu: Study, tmp_path: Path, recorded: bool
) -> None:
    """What was consumed is compared with the frozen prediction's plan, not with what the run says of itself."""
    study = sound_gpu.copy(tmp_path / "study")
    if recorded:
        for run in _all_runs(study):
            study.edit(run, lambda r: r.pop("consumption"))
    read = _recorded(study) if recorded else read_study(study.fixture, study.prediction, study.identity)
    study.edit_tensors(RUN, _slots(0, 8, to=lambda x: x[::-1]))
    _follow(study, RUN, throughout=True)
    found = {f.reason: f.detail for f in judge(read, study.runs, 5).findings}
    wanted = {Reason.ROUTE_MEMBERSHIP, Reason.TREATMENT_NOT_ASKED, Reason.TREATMENT_NOT_CONSUMED}
    assert found.keys() == wanted and "the frozen prediction has" in found[Reason.TREATMENT_NOT_CONSUMED]


def test_on_a_twin_the_native_plan_is_the_stored_one(study: Study) -> None:
    study.edit_tensors("native/H0/rep1", _slots(0, 8, to=lambda x: x[::-1]))
    _follow(study, "native/H0/rep1")
    assert ("native/H0/rep1", Reason.ROUTE_MEMBERSHIP) in study.reasons()


def _pair(document: dict[str, Any], first: list[str], second: list[str]) -> dict[str, Any]:
    return next(p for p in document["pairs"] if (p["first"], p["second"]) == (first, second))


def _too_narrow(document: dict[str, Any]) -> None:
    pair = _pair(document, ["native", "H0"], ["native", "H1"])
    pair["rows"]["w13"] = pair["rows"]["w13"][:1]


def _must_coincide(document: dict[str, Any]) -> None:
    pair = _pair(document, ["native", "H0"], ["native", "H1"])
    pair["rows"]["final"], pair["must_coincide"] = [], ["final"]


def _everything_can_differ(document: dict[str, Any]) -> None:
    for pair in document["pairs"]:
        pair["rows"] = {s: list(range(18 if s == "final" else 36)) for s in pair["rows"]}
        pair["must_coincide"] = []


def _one_row_more(document: dict[str, Any]) -> None:
    pair = _pair(document, ["native", "H0"], ["replay", "H0"])
    pair["rows"]["final"], pair["must_coincide"] = [17], ["w13", "activation", "w2"]


def _other_routes(document: dict[str, Any]) -> None:
    _pair(document, ["native", "H0"], ["native", "H1"])["changed_signature"]["w13"] = []


@pytest.mark.parametrize(
    ("change", "pairs"),
    [(_too_narrow, 1), (_must_coincide, 1), (_everything_can_differ, 91), (_one_row_more, 1), (_other_routes, 1)],
)
def test_predicted_rows_that_the_cuda_blocks_do_not_give_are_refused(
    study: Study, change: Callable[[Any], object], pairs: int
) -> None:
    study.edit_prediction(change)
    assert study.reasons() == [("prediction.json", Reason.PREDICTION_ROWS)] * pairs


def _swapped_arms(document: dict[str, Any]) -> None:
    a, b = document["arms"][:2]
    a["fingerprint"], b["fingerprint"] = b["fingerprint"], a["fingerprint"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("fixture", to=OTHER), Reason.PREDICTION_MISMATCH),
        (lambda d: d["plans"].update(H1=d["plans"]["H0"]), Reason.PREDICTION_MISMATCH),
        (_swapped_arms, Reason.PREDICTION_MISMATCH),
        (lambda d: d["arms"][0]["launches"]["w13"].__setitem__(2, 3), Reason.PREDICTION_MISMATCH),
        (lambda d: d["pairs"][0].update(must_coincide=["w13"]), Reason.PREDICTION_MISMATCH),
        (lambda d: d["pairs"].pop(), Reason.PREDICTION_INCOMPLETE),
        (lambda d: d["pairs"].append(d["pairs"][0]), Reason.PREDICTION_INCOMPLETE),
        (lambda d: d["arms"].pop(), Reason.PREDICTION_INCOMPLETE),
    ],
)
def test_a_prediction_that_contradicts_fixture_or_itself_is_refused(
    study: Study, change: Callable[[Any], object], reason: Reason
) -> None:
    study.edit_prediction(change)
    assert set(study.reasons()) == {("prediction.json", reason)}


@pytest.mark.parametrize("pair", [[0, 0], [0, 99], [0, 1]])
@pytest.mark.parametrize("source", ["stored", "captured"])
def test_an_exchange_pair_that_is_none_is_refused(study: Study, pair: list[int], source: str) -> None:
    def change(document: dict[str, Any]) -> None:
        document["exchange"]["within"], document["plan_source"] = pair, source

    study.edit_prediction(change)
    plans = study.fixture / PLANS if source == "captured" else None
    read = read_study(study.fixture, study.prediction, study.identity, plans)
    verdict = judge(read, study.runs, 5)
    found = [f for f in verdict.findings if f.run == "prediction.json" and "pair within" in f.detail]
    assert {f.reason for f in found} == {Reason.PREDICTION_MISMATCH}


@pytest.mark.parametrize("source", ["stored", "captured"])
def test_a_study_without_a_cell_that_its_plans_give_is_refused(study: Study, tmp_path: Path, source: str) -> None:
    """The cells follow from plans and fixture: a prediction that says that there is no pair does not drop them."""
    plans = tmp_path / "plans.safetensors" if source == "captured" else None
    if plans:
        _as_captured(study)
        save_tensors(plans, {**load_tensors(study.fixture / PLANS), "more": np.zeros(1)})

    def change(document: dict[str, Any]) -> None:
        document["exchange"].update(across=None, why="no across pair in the captured plans", chosen="within by search")
        document["arms"] = [a for a in document["arms"] if a["cell"] != "swap_across"]
        document["pairs"] = [p for p in document["pairs"] if "swap_across" not in (p["first"][0], p["second"][0])]

    study.edit_prediction(change)
    shutil.rmtree(study.runs / "swap_across")
    verdict = judge(read_study(study.fixture, study.prediction, study.identity, plans), study.runs, 5)
    assert [f.reason for f in verdict.findings if f.run == "prediction.json"] == [Reason.EXCHANGE_PAIR]


def test_a_within_pair_that_stands_across_a_boundary_is_refused(study: Study) -> None:
    def change(document: dict[str, Any]) -> None:
        document["exchange"]["within"] = document["exchange"]["across"]

    study.edit_prediction(change)
    details = [f.detail for f in study.judge().findings if f.run == "prediction.json"]
    assert details[0] == "exchange pairs are not the fixture's"
    assert "stands in blocks [3, 4] under H0" in details[1] and "[4, 3] under H1" in details[2]


def test_a_full_k_grid_that_splits_tiles_is_refused(study: Study) -> None:
    def change(document: dict[str, Any]) -> None:
        document["full_k_grid"] = 4
        for arm in document["arms"]:
            if arm["cell"] == "full_k":
                arm["launches"] = {gemm: [64, 128, 4] for gemm in arm["launches"]}

    study.edit_prediction(change)
    for history in ("H0", "H1"):
        for n in range(1, 6):
            grids = {g: {"asked": 4, "launched": 4, "thread_k": 64, "thread_n": 128} for g in ("w13", "w2")}
            split = json.loads((study.runs / f"replay/{history}/rep{n}" / RECORD).read_bytes())["consumption"]
            study.edit(f"full_k/{history}/rep{n}", lambda r, g=grids, c=split: r.update(grid=g, consumption=c))
    assert study.reasons() == [("prediction.json", Reason.FULL_K_SPLIT)]


def _forge(study: Study, runs: list[str], change: Callable[[dict[str, Any]], object]) -> None:
    """Change the surfaces of runs and state every hash anew, as a forger would."""
    for run in runs:
        study.edit_tensors(run, change)
        tensors = load_tensors(study.runs / run / TENSORS)

        def state(record: dict[str, Any], tensors: dict[str, Any] = tensors) -> None:
            for name, stated in record["surfaces"].items():
                stated["sha256"] = sha256_array(tensors[name])

        study.edit(run, state)


def _all_runs(study: Study) -> list[str]:
    return sorted(path.parent.relative_to(study.runs).as_posix() for path in study.runs.rglob(RECORD))


def _flip_with_what_follows(tensors: dict[str, Any]) -> None:
    _flip(tensors)
    tensors.update(following(tensors["w13"], tensors["w2"]))


def test_forged_surfaces_that_belong_together_break_prediction_and_relation(study: Study) -> None:
    """All replicates of swap_within/H0 say the same other bits: only what equal arithmetic gives is left to tell."""
    _forge(study, [f"swap_within/H0/rep{n}" for n in range(1, 6)], _flip_with_what_follows)
    found = study.reasons()
    assert ("native/H0 and swap_within/H0", Reason.PREDICTION_WRONG) in found
    assert found[-1] == ("relation 4", Reason.RELATION_FAILED)
    assert {reason for _, reason in found} == {Reason.PREDICTION_WRONG, Reason.RELATION_FAILED}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t["activation"].fill(1), Reason.ACTIVATION_NOT_OF_W13),
        (lambda t: t["w13"].__setitem__(3, 7), Reason.ACTIVATION_NOT_OF_W13),
        (lambda t: t["final"].fill(1), Reason.FINAL_NOT_OF_W2),
        (lambda t: t["final"].view(np.uint16).__setitem__((17, 127), 0x8000), Reason.FINAL_NOT_OF_W2),
        (lambda t: t["w2"].__setitem__((3, 5), 7), Reason.FINAL_NOT_OF_W2),
        (lambda t: t["w13"].__setitem__((3, 5), np.inf), Reason.NOT_FINITE),
        (lambda t: t["final"].__setitem__((3, 5), np.nan), Reason.NOT_FINITE),
    ],
)
def test_surfaces_made_up_alike_in_all_runs_are_refused(
    study: Study, change: Callable[[dict[str, Any]], object], reason: Reason
) -> None:
    runs = _all_runs(study)
    _forge(study, runs, change)
    found = study.reasons()
    assert {r for _, r in found} == {reason}
    assert sorted(run for run, _ in found) == runs


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("top_k", [1, 4, 6, 8])
def test_the_scorers_arithmetic_is_the_kernels(dtype: Any, top_k: int) -> None:
    """Against the twin, which recorded H200 outputs prove, on every finite gate and on sums that depend on order."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    gates = every[np.isfinite(every.astype(np.float32))]
    gates = gates[: gates.size // 48 * 48].reshape(48, -1)
    rng = np.random.default_rng(top_k)
    w13 = np.concatenate([gates, rng.uniform(-0.9, 0.9, gates.shape).astype(dtype)], axis=1)
    w2 = (rng.standard_normal((48, 64)) * 2.0 ** rng.integers(-9, 9, (48, 64))).astype(dtype)
    surfaces = {
        "w13": w13,
        "activation": silu_and_mul(w13),
        "w2": w2,
        "final": combine(w2.reshape(-1, top_k, 64)),
    }
    assert list(faults_of(surfaces, top_k)) == []
    surfaces["final"] = combine(w2.reshape(-1, top_k, 64), "each")
    assert bool(list(faults_of(surfaces, top_k))) is (top_k > 1)


@pytest.mark.parametrize("lane", ["twin-ampere", "twin-hopper", "cuda"])
def test_a_run_is_called_what_its_lane_is_and_nothing_more(tmp_path: Path, lane: str) -> None:
    study = make_study(tmp_path / "study", lane_name=lane, lane=SignatureLane(STATUS[lane]), replicates=1)
    assert study.reasons() == []
    runs = _all_runs(study)
    others = [*(s for s in STATUS.values() if s != STATUS[lane]), "computed on an H200", f"{STATUS[lane]} "]
    for other in others:
        for run in runs:
            study.edit(run, lambda r, other=other: r.update(status=other))
        found = study.reasons()
        assert {reason for _, reason in found} == {Reason.WRONG_STATUS} and len(found) == len(runs)


def test_the_scorers_list_of_launches_is_that_of_the_predictions(published: tuple[int, int, int]) -> None:
    """Written twice: a launch of one list that the other lacks is found here."""
    shadowed = ("0.22.0", "0.33.0")  # of other versions of vLLM, for which no prediction is made
    parts = ("gpu", "block_size", "dtype", "group_size", "n", "k", "thread_k", "thread_n", "blocks_per_sm")
    known = [x for x in SELECTED if x.version not in shadowed]
    assert [(*(getattr(x, part) for part in parts), str(x.status)) for x in known] == [
        (*(getattr(x, part) for part in parts), x.status) for x in operating_points.AUTOMATIC
    ]
    assert {name: DEVICES[name].sms for name in operating_points.SMS} == operating_points.SMS
    assert published == operating_point.PUBLISHED
    assert {name: facts.gpu for name, facts in LANES.items()} == operating_points.GPUS
    assert {name: facts.architecture for name, facts in LANES.items()} == operating_points.ARCHITECTURES
    capabilities = {tuple(map(int, c.split("."))): name for c, name in operating_points.CAPABILITIES.items()}
    assert capabilities == ARCHITECTURES


@pytest.mark.parametrize("lane", ["twin-ampere", "twin-hopper"])
@pytest.mark.parametrize(("block", "dtype", "group"), [(8, "float16", 128), (16, "float16", 128), (8, "bfloat16", 64)])
def test_the_scorers_launches_of_point_auto_are_those_that_the_selector_is_said_to_choose(
    lane: str, block: int, dtype: str, group: int
) -> None:
    spec = {"hidden": 2048, "intermediate": 768, "block_size": block, "dtype": dtype, "group_size": group}
    shapes = {"w13": (1536, 2048), "w2": (2048, 768)}
    found = operating_points.native_launches("auto", operating_points.GPUS[lane], block, dtype, group, shapes)
    try:
        wanted = operating_point.operating_point("auto", lane, spec)
    except InputError:
        assert found is None
        return
    assert found == {gemm: (tuple(wanted.launches[gemm]), str(wanted.status[gemm])) for gemm in shapes}


def _at(*path: str | int, to: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for part in path[:-1]:
            document = document[part]
        document[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_at("launch_status", "w2", to="recorded"), Reason.OPERATING_POINT),
        (_at("launch_status", to={"w13": "published"}), Reason.OPERATING_POINT),
        (_at("architecture", to="ampere"), Reason.OPERATING_POINT),
        (_at("controls", to=[]), Reason.OPERATING_POINT),
        (_at("controls", 0, "single_slice", to=True), Reason.OPERATING_POINT),
        (_at("point", to="auto"), Reason.OPERATING_POINT),
        (_at("point", to="elsewhere"), Reason.OPERATING_POINT),
        (_at("informative", to=False), Reason.PREDICTION_FIELD),
        (_at("arms", 0, "single_slice", "w13", to=True), Reason.PREDICTION_FIELD),
        (_at("arms", 0, "split_routes", "w2", to=7), Reason.PREDICTION_FIELD),
        (_at("pairs", 0, "changed_memberships", to=[]), Reason.PREDICTION_FIELD),
        (_at("exchange", "chosen", to="published prior data"), Reason.EXCHANGE_PAIR),
        (_at("exchange", "from", to="outcomes"), Reason.EXCHANGE_PAIR),
    ],
)
def test_any_field_of_a_prediction_that_does_not_follow_from_fixture_plans_and_point_is_refused(
    study: Study, change: Callable[[Any], object], reason: Reason
) -> None:
    study.edit_prediction(change)
    document = json.loads(study.prediction.read_bytes())
    for run in _all_runs(study):
        study.edit(run, lambda r: r.update(point=document["point"]))
    assert set(study.reasons()) == {("prediction.json", reason)}


def test_a_prediction_with_a_field_of_its_own_is_not_read(study: Study) -> None:
    study.edit_prediction(lambda p: p.update(more=1))
    with pytest.raises(InputError, match="more"):
        study.judge()


def test_an_identity_sealed_by_other_code_than_the_runs_is_bad_input(study: Study) -> None:
    seal = study.identity.with_suffix(".manifest.json")
    seal.write_bytes(canonical_json({**json.loads(seal.read_bytes()), "code": OTHER}))
    with pytest.raises(InputError, match=r"sealed by code .*the code that it expects of the runs"):
        study.judge()


def test_an_identity_is_sealed_by_the_code_that_its_runs_record(tmp_path: Path) -> None:
    lane = TwinLane("twin-hopper")
    freeze("twin-hopper", lane, tmp_path / "identity.json")
    seal = json.loads((tmp_path / "identity.manifest.json").read_bytes())
    assert (
        seal["code"] == code_digest(*code_of(lane)) == json.loads((tmp_path / "identity.json").read_bytes())["source"]
    )
    assert "routeblock.route_block.runs.identity" in import_closure(code_of(lane))


def test_the_scorers_status_of_each_lane_is_what_the_lanes_say() -> None:
    assert {name: facts.status for name, facts in LANES.items()} == {k: v for k, v in STATUS.items() if k != "cuda"}


def test_no_reason_code_is_without_a_test() -> None:
    text = Path(__file__).read_text()
    assert [r for r in Reason if f"Reason.{r.name}" not in text] == []


def test_the_scorer_imports_evidence_and_errors_and_nothing_else_of_the_package() -> None:
    """Neither directly nor by way of another module: what made the runs cannot vouch for them."""
    folder = PACKAGE_ROOT / "route_block" / "scorer"
    rooms = [f"routeblock.route_block.scorer.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"]
    allowed = ("routeblock.errors", "routeblock.evidence.", "routeblock.route_block.scorer.")
    # Importing a module of a package runs the package's __init__, which holds nothing but a docstring.
    packages = {"routeblock", "routeblock.evidence", "routeblock.route_block", "routeblock.route_block.scorer"}
    closure = import_closure(rooms)
    assert "routeblock.evidence.record" in closure and len(rooms) > 5
    assert [m for m in closure if not m.startswith(allowed) and m not in packages] == []
    for package in packages - {"routeblock"}:
        text = (PACKAGE_ROOT.parent / package.replace(".", "/") / "__init__.py").read_text()
        assert "import" not in text.split('"""')[2], package


def test_score_writes_a_sealed_verdict_and_exits_1_with_one_line(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def score(out: str) -> int:
        arguments = ["study-a", "score", *study.options]
        return main([*map(str, arguments), "--replicates", "5", "--out", str(tmp_path / out)])

    assert score("first.json") == 0
    assert score("again.json") == 0
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    assert (tmp_path / "first.manifest.json").is_file()
    capsys.readouterr()
    study.edit(RUN, _set("position", to=0))
    study.edit("native/H0/rep1", _set("lane", to="cuda"))
    assert score("wrong.json") == 1
    line = capsys.readouterr().out
    assert line.startswith("native/H0/rep1: wrong_place: ") and line.count("\n") == 1 and "1 more" in line
    document = json.loads((tmp_path / "wrong.json").read_bytes())
    assert not document["sound"] and document["relations"] == [] and len(document["findings"]) == 2


def test_score_says_on_the_command_line_that_a_verdict_is_exploratory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = make_study(tmp_path / "study", replicates=1)
    assert main(["study-a", "score", *study.options, "--replicates", "1", "--out", str(tmp_path / "score.json")]) == 0
    assert capsys.readouterr().out == f"{study.runs}: exploratory (1 of 5); no headline counts it\n"


def test_the_twins_proof_is_sealed_as_an_input_and_has_to_be_there(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden, out = tmp_path / "golden.json", tmp_path / "score.json"
    arguments = ["study-a", "score", *study.options]
    call = [*map(str, arguments), "--replicates", "5", "--golden", str(golden), "--out", str(out)]
    assert main(call) == 2
    assert "golden.json: no such file" in capsys.readouterr().err and not out.exists()
    good = {"name": "mma", "elements": 4, "differing": 0}

    def prove(*comparisons: dict[str, Any]) -> bytes:
        data = canonical_json({"format": "routeblock.golden.v1", "comparisons": comparisons})
        golden.write_bytes(data)
        return data

    prove(good, {**good, "differing": 1})
    assert main(call) == 2 and "mma differs in 1 of 4" in capsys.readouterr().err
    prove()
    assert main(call) == 2 and "comparisons: List should have at least 1 item" in capsys.readouterr().err
    golden.write_bytes(b"{}")
    assert main(call) == 2 and "no proof of the twin: format" in capsys.readouterr().err
    assert not out.exists()
    data = prove(good)
    assert main(call) == 0
    inputs = json.loads((tmp_path / "score.manifest.json").read_bytes())["inputs"]
    assert [e["sha256"] for e in inputs if e["path"].endswith("golden.json")] == [sha256_bytes(data)]


def test_a_fixture_whose_files_changed_is_bad_input(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    path = study.fixture / "inputs.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    arguments = ["study-a", "score", *study.options]
    assert main([*map(str, arguments), "--out", str(study.runs / "score.json")]) == 2
    assert "inputs.safetensors: its SHA-256 is" in capsys.readouterr().err
    assert not (study.runs / "score.json").exists()
