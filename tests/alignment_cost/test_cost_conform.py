# SPDX-License-Identifier: Apache-2.0
"""Every batch is walked against the protocol: each declared edit is refused for its reason, by code of its own."""

from __future__ import annotations

import ast
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from small import COMMITTED, FakeRig, documents, measured, protocol_file, record_folder, write_record

from routeblock.alignment_cost import conform, edits, mutate, record, reprove, statistics, targets, validate
from routeblock.alignment_cost import protocol as protocols
from routeblock.alignment_cost.batches import Batch
from routeblock.alignment_cost.edits import Copy, ImpossibleError
from routeblock.alignment_cost.mutate import By, Declared
from routeblock.alignment_cost.protocol import Arm, load
from routeblock.alignment_cost.reasons import Reason
from routeblock.cli import main
from routeblock.cuda.telemetry import CLOCK_EVENTS, State
from routeblock.errors import InputError
from routeblock.evidence.digest import PACKAGE_ROOT, canonical_json, sha256_file
from routeblock.moe.routing import block_size_for

ROOT = Path(__file__).resolve().parents[2]
DECLARED = ROOT / "fixtures/alignment_mutations.json"
ENTRIES = mutate.read_declared(DECLARED)
RULES = json.loads(COMMITTED.read_text())


@pytest.fixture
def protocol(tmp_path: Path) -> Path:
    return protocol_file(tmp_path)


@pytest.fixture
def folder(tmp_path: Path, protocol: Path) -> Path:
    return record_folder(tmp_path / "record", protocol)


@pytest.fixture
def made(folder: Path, protocol: Path, tmp_path: Path) -> Path:
    statistics.write(tmp_path / "statistics", folder, protocol)
    return tmp_path / "statistics/statistics.json"


def test_the_made_up_record_conforms_and_holds_late_repetitions(folder: Path, protocol: Path) -> None:
    found = record.read(folder)
    assert reprove.deviations(found, protocol) == reprove.disagreements(found, load(protocol)) == []
    assert {b.attempt for b in found.batches if b.campaign == "layer" and not b.accepted} == {0, 1, 2}


def imported(module: str) -> set[str]:
    """The package's modules that `module` imports, anywhere in its code."""
    tree = ast.parse(PACKAGE_ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{name.name}" for name in node.names}
            modules = {m for m in whole if PACKAGE_ROOT.joinpath(*m.split(".")[1:]).with_suffix(".py").is_file()}
            found |= modules or {str(node.module)}
    return {name for name in found if name.startswith("routeblock")}


def test_the_validator_shares_no_code_with_the_measurement() -> None:
    own = {f"routeblock.alignment_cost.{name}" for name in ("validate", "conform", "reasons")}
    shared = {"routeblock.errors"} | {f"routeblock.evidence.{name}" for name in ("digest", "files", "manifest")}
    assert {name for module in own for name in imported(module)} <= own | shared


def test_its_own_facts_are_those_of_the_measurement() -> None:
    assert conform.protocol_digest(RULES) == load(COMMITTED).digest()
    assert conform._EVENTS == CLOCK_EVENTS
    plan = load(COMMITTED)
    ours = {point.key: point for point in conform.planned(RULES)}
    theirs = [p for campaign in protocols.Campaign for p in protocols.points(plan, campaign)]
    assert len(ours) == len(theirs) == 84
    for p in theirs:
        point = ours[str(p.campaign), p.experts, p.top_k, p.tokens]
        assert (point.block_size, point.role, point.repetitions) == (p.block_size, p.role, p.repetitions)
        assert point.calls["graph"] == p.graph_calls and point.calls["stream"] == p.stream_calls
    sizes = [(m, k, e) for m in range(1, 600, 7) for k in (1, 2, 8) for e in (1, 8, 60, 128, 256)]
    assert all(conform.block_size(*shape) == block_size_for(*shape) for shape in sizes)


@pytest.mark.parametrize("changes", [{"minimum_pairs": 1}, {"margins": {"operator": 0, "layer": 1}}])
def test_the_digest_of_a_protocol_does_not_depend_on_how_a_number_is_written(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = protocol_file(tmp_path, **changes)
    assert conform.protocol_digest(json.loads(path.read_text())) == load(path).digest()


def test_every_reason_is_declared_for_an_edit() -> None:
    # A broken seal is no edit that a forger leaves.
    assert {reason for entry in ENTRIES for reason in entry.reasons} == set(Reason) - {Reason.SEAL}
    assert [entry.name for entry in ENTRIES if not entry.reasons] == [edits.UNCHANGED]


def edited(name: str, folder: Path, protocol: Path, made: Path) -> None:
    """Edit the files of a record or its statistics, and make anew whatever follows from them."""
    found = record.read(folder)
    told = (found.run, found.exactness, found.sanitizer)
    copy = Copy([dict(vars(b)) for b in found.batches], *told, json.loads(protocol.read_text()), {})
    copy.statistics = json.loads(made.read_text())
    edits.EDITS[name](copy)
    if name in edits.STATISTICS:
        made.write_text(json.dumps(copy.statistics))
        return
    if name in edits.BATCHES:
        copy.count()
    documents = {record.RUN: copy.run, record.EXACT: copy.exactness, record.SANITIZER: copy.sanitizer}
    protocol.write_text(json.dumps(copy.rules))
    write_record(folder, protocol, [Batch(**row) for row in copy.rows], documents)
    with suppress(InputError, ValueError):  # twice accepted, or no JSON for a time: the old ones stay
        statistics.write(made.parent, folder, protocol)


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.by is not By.REPROVE], ids=lambda e: e.name)
def test_the_validator_refuses_an_edit_of_files_for_the_declared_reason(
    entry: Declared, folder: Path, protocol: Path, made: Path
) -> None:
    edited(entry.name, folder, protocol, made)
    number, wrong = validate.disagreements(made, folder, protocol)
    assert {f.reason for f in wrong} == set(entry.reasons), list(map(str, wrong))
    # What leaves the protocol is not computed with, but for points that are not there.
    assert number == (33 if set(entry.reasons) <= {Reason.POINT_MISSING} or entry.by is By.VALIDATE else 0)


def test_edits_are_judged_as_declared_and_a_wrong_declaration_is_found(
    folder: Path, protocol: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["mutate-alignment", "--record", str(folder), "--statistics", str(made), "--protocol", str(protocol)]
    out = tmp_path / "mutations"
    assert main([*common, "--declared", str(DECLARED), "--out", str(out)]) == 0
    assert f"{len(ENTRIES)} copies judged as declared" in capsys.readouterr().out
    entries = mutate.read(out / "mutations.json")
    assert all(e["as_declared"] for e in entries) and len(entries) == len(ENTRIES)

    told = json.loads(DECLARED.read_text())
    next(e for e in told["mutations"] if e["name"] == "warmups")["reasons"] = ["calls"]
    next(e for e in told["mutations"] if e["name"] == "check_plans")["by"] = "conform"
    next(e for e in told["mutations"] if e["name"] == "unchanged")["reasons"] = ["seal"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(told))
    assert main([*common, "--declared", str(other), "--out", str(out)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "warmups: warmups found, declared calls",
        "check_plans: plans found, declared plans",
        "unchanged: nothing found, declared seal",
    ]


def test_an_edit_without_room_is_no_success(tmp_path: Path, protocol: Path) -> None:
    found = measured(FakeRig(), protocol)
    told = documents(found, protocol).values()
    copy = Copy([vars(b) for b in found.batches], *told, json.loads(protocol.read_text()), {})
    with pytest.raises(ImpossibleError, match="no rejected repetition"):
        edits.EDITS["rejected_deleted"](copy)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "Input should be an object"),
        ('{"format": "routeblock.declared_alignment_mutations.v1", "mutations": []}', "not each known edit once"),
        (DECLARED.read_text().replace('"warmups"', '"cold"'), "reasons.0"),
    ],
)
def test_a_declaration_that_is_none_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "declared.json").write_text(text)
    with pytest.raises(InputError, match=words):
        mutate.read_declared(tmp_path / "declared.json")


def walked(rig: FakeRig, protocol: Path) -> set[Reason]:
    found = measured(rig, protocol)
    run, exact, tools = documents(found, protocol).values()
    rules = json.loads(protocol.read_text())
    return {f.reason for f in conform.deviations([vars(b) for b in found.batches], run, exact, tools, rules)}


def test_rejections_by_the_rules_conform(protocol: Path) -> None:
    """Throttled once, throttled always until the extra repetitions are used up, another process throughout."""
    once = FakeRig()
    once.states = [once.always, State(0x4, 1, 1500, 70), once.always]
    always = FakeRig()
    always.always = State(0x20, 2, 1500, 70)
    assert walked(once, protocol) == walked(always, protocol) == set()
    # An arm that is wrong is told, and its batches conform: each was rejected, once.
    assert walked(FakeRig(wrong={Arm.SORT}), protocol) == {Reason.PLAN_WRONG}


def test_extra_repetitions_end_and_then_no_retry_is_due(tmp_path: Path) -> None:
    told = json.loads(COMMITTED.read_text())["acceptance"] | {"extra_repetitions": 5, "pause_ms": 0}
    path = protocol_file(tmp_path, acceptance=told)
    rig = FakeRig()
    rig.always = State(0x4, 1, 1500, 70)
    assert walked(rig, path) == set()


def test_what_nvml_refused_to_tell_rejects_nothing(protocol: Path) -> None:
    rig = FakeRig()
    rig.always = State(-1, -1, -1, -1)
    assert walked(rig, protocol) == set()


def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / targets.RECORDED, tmp_path / "source"))


def listed_anew(folder: Path) -> None:
    """Write digests as a forger would."""
    path = folder / "contents.json"
    told = json.loads(path.read_text())
    for name in record.FILES:
        told[name] = {"size": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
    path.write_bytes(canonical_json(told))


@pytest.mark.parametrize("name", ["repetition_deleted"])
def test_the_committed_record_is_not_restored_after_an_edit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    entry = next(e for e in ENTRIES if e.name == name)
    folder, out = source(tmp_path), tmp_path / "out"
    found = record.read(folder)
    copy = Copy([vars(b) for b in found.batches], found.run, {}, {}, {}, {})
    edits.EDITS[name](copy)
    copy.count()
    schema = pq.read_schema(folder / record.BATCHES)
    record.raw.write(folder / record.BATCHES, [Batch(**row) for row in copy.rows])
    assert pq.read_schema(folder / record.BATCHES).equals(schema)
    (folder / record.RUN).write_bytes(canonical_json(copy.run))
    listed_anew(folder)
    command = ["recorded-alignment", "--source", str(folder), "--protocol", str(COMMITTED), "--out", str(out)]
    assert main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(f": {entry.reasons[0]}: " in line for line in lines) and not out.exists()
