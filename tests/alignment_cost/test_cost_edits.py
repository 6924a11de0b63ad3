# SPDX-License-Identifier: Apache-2.0
"""Every batch is held against the protocol: each declared edit is refused for its reason."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small import COMMITTED, FakeDevice, made_up, protocol_file, record_folder, write_record

from routeblock.alignment_cost import targets, verification
from routeblock.alignment_cost.edits import ROOM
from routeblock.alignment_cost.protocol import Arm, load
from routeblock.alignment_cost.study import STUDY
from routeblock.cli import main
from routeblock.cuda.telemetry import State
from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, sha256_file
from routeblock.timing import edits, edits_table, mutations, statistics, validation
from routeblock.timing.check import INCOMPLETE, check, findings
from routeblock.timing.edits import Copy, ImpossibleError
from routeblock.timing.mutations import By, Entry
from routeblock.timing.reasons import Reason
from routeblock.timing.record import BATCHES

ROOT = Path(__file__).resolve().parents[2]
DECLARED = ROOT / "fixtures/record_edits.json"
ENTRIES = mutations.read_declared(DECLARED, STUDY.name, ROOM)


@pytest.fixture
def protocol(tmp_path: Path) -> Path:
    return protocol_file(tmp_path)


@pytest.fixture
def folder(tmp_path: Path, protocol: Path) -> Path:
    return record_folder(tmp_path / "record", protocol)


@pytest.fixture
def made(folder: Path, protocol: Path, tmp_path: Path) -> Path:
    statistics.write(tmp_path / "statistics", STUDY, [folder], protocol, rule="alignment_statistics")
    return tmp_path / "statistics/statistics.json"


def test_the_made_up_record_conforms_and_holds_late_repetitions(folder: Path, protocol: Path) -> None:
    found = STUDY.read(folder)
    assert findings(STUDY, found, load(protocol)) == verification.recompute(found, load(protocol)) == []
    assert {b.attempt for b in found.batches if b.campaign == "layer" and not b.accepted} == {0, 1, 2}


def edited(name: str, folder: Path, protocol: Path, made: Path) -> None:
    """Edit the files of a record or its statistics, and make anew whatever follows from them."""
    found, rules = STUDY.read(folder), json.loads(protocol.read_text())
    copy = Copy(STUDY, ROOM, STUDY.table.rows(found.batches), found.documents, rules, json.loads(made.read_text()))
    edits.apply(copy, name)
    if edits.is_of_statistics(name):
        made.write_text(json.dumps(copy.statistics))
        return
    protocol.write_text(json.dumps(copy.rules))
    write_record(folder, protocol, [STUDY.table.batch(row) for row in copy.rows], copy.documents)
    with suppress(InputError, ValueError):  # twice accepted, or no JSON for a time: the old ones stay
        statistics.write(made.parent, STUDY, [folder], protocol, rule="alignment_statistics")


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.by is not By.VERIFICATION], ids=lambda e: e.name)
def test_the_validation_refuses_an_edit_of_files_for_the_declared_reason(
    entry: Entry, folder: Path, protocol: Path, made: Path
) -> None:
    edited(entry.name, folder, protocol, made)
    number, wrong = validation.disagreements(STUDY, made, [folder], protocol)
    assert {f.reason for f in wrong} == set(entry.reasons), list(map(str, wrong))
    # What leaves the protocol is not computed with, but for points that are not there.
    assert number == (33 if set(entry.reasons) <= INCOMPLETE or entry.by is By.RECOUNT else 0)


def test_edits_are_judged_as_declared_and_a_wrong_declaration_is_found(
    folder: Path, protocol: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["alignment", "mutate", "--record", str(folder), "--protocol", str(protocol)]
    out = tmp_path / "mutations"
    assert main([*common, "--declared", str(DECLARED), "--out", str(out)]) == 0
    assert f"{len(ENTRIES)} copies judged as declared" in capsys.readouterr().out
    entries = edits_table.read(out / "mutations.json")
    assert all(e["as_declared"] for e in entries) and len(entries) == len(ENTRIES)

    told = json.loads(DECLARED.read_text())
    mine = {e["name"]: e["studies"].get(STUDY.name) for e in told["edits"]}
    mine["warmups"]["reasons"] = ["calls"]
    mine["check_plans"]["by"] = "protocol check"
    mine["unchanged"]["reasons"] = ["seal"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(told))
    assert main([*common, "--declared", str(other), "--out", str(out)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "warmups: warmups found, declared calls",
        "check_plans: plans found, declared plans",
        "unchanged: nothing found, declared seal",
    ]


def test_an_edit_without_room_is_no_success(protocol: Path) -> None:
    found = made_up(FakeDevice(), protocol)
    rows, rules = STUDY.table.rows(found.batches), json.loads(protocol.read_text())
    with pytest.raises(ImpossibleError, match="no rejected repetition"):
        edits.apply(Copy(STUDY, ROOM, rows, found.documents, rules, {}), "rejected_deleted")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "Input should be an object"),
        ('{"format": "routeblock.declared_record_edits.v1", "edits": []}', "not each known edit once"),
        (DECLARED.read_text().replace('"variant"', '"cold"'), "reasons"),
    ],
)
def test_a_declaration_that_is_none_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "declared.json").write_text(text)
    with pytest.raises(InputError, match=words):
        mutations.read_declared(tmp_path / "declared.json", STUDY.name, ROOM)


def reasons(device: FakeDevice, protocol: Path) -> set[Reason]:
    found = made_up(device, protocol)
    return {f.reason for f in check(STUDY, found, STUDY.table.rows(found.batches), load(protocol))}


def test_rejections_by_the_rules_conform(protocol: Path) -> None:
    """Throttled once, throttled always until the extra repetitions are used up, another process throughout."""
    once = FakeDevice()
    once.states = [once.always, State(0x4, 1, 1500, 70), once.always]
    always = FakeDevice()
    always.always = State(0x20, 2, 1500, 70)
    assert reasons(once, protocol) == reasons(always, protocol) == set()
    # An arm that is wrong is told, and its batches conform: each was rejected, once.
    assert reasons(FakeDevice(wrong={Arm.SORT}), protocol) == {Reason.PLAN_WRONG}


def test_extra_repetitions_end_and_then_no_retry_is_due(tmp_path: Path) -> None:
    told = json.loads(COMMITTED.read_text())["acceptance"] | {"extra_repetitions": 5, "pause_ms": 0}
    path = protocol_file(tmp_path, acceptance=told)
    device = FakeDevice()
    device.always = State(0x4, 1, 1500, 70)
    assert reasons(device, path) == set()


def test_what_nvml_refused_to_tell_rejects_nothing(protocol: Path) -> None:
    device = FakeDevice()
    device.always = State(-1, -1, -1, -1)
    assert reasons(device, protocol) == set()


def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / targets.RECORDED, tmp_path / "source"))


def listed_anew(folder: Path) -> None:
    """Write digests as a forger would."""
    path = folder / "contents.json"
    told = json.loads(path.read_text())
    for name in STUDY.files:
        told[name] = {"size": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
    path.write_bytes(canonical_json(told))


@pytest.mark.parametrize("name", ["repetition_deleted"])
def test_the_committed_record_is_not_restored_after_an_edit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    entry = next(e for e in ENTRIES if e.name == name)
    folder, out = source(tmp_path), tmp_path / "out"
    found = STUDY.read(folder)
    copy = Copy(STUDY, ROOM, STUDY.table.rows(found.batches), found.documents, {}, {})
    edits.apply(copy, name)
    schema = pq.read_schema(folder / BATCHES)
    STUDY.table.write(folder / BATCHES, [STUDY.table.batch(row) for row in copy.rows])
    assert pq.read_schema(folder / BATCHES).equals(schema)
    (folder / "run.json").write_bytes(canonical_json(copy.run))
    listed_anew(folder)
    command = ["alignment", "recorded", "--source", str(folder), "--protocol", str(COMMITTED), "--out", str(out)]
    assert main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(f": {entry.reasons[0]}: " in line for line in lines) and not out.exists()
