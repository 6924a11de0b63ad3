# SPDX-License-Identifier: Apache-2.0
"""The committed record of the fast paths: whole, proved again, its goals, and nothing of it can be edited."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from routeblock.cli import main
from routeblock.cuda.q6k_dispatch import compile_for
from routeblock.cuda.sanitizer import TOOLS
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file
from routeblock.q6k_dispatch import counters, tables, targets, verification
from routeblock.q6k_dispatch.edits import ROOM
from routeblock.q6k_dispatch.protocol import OURS, Side, load, shapes
from routeblock.q6k_dispatch.study import KEY, STUDY, pairs
from routeblock.q6k_dispatch.tables import Evidence
from routeblock.timing import edits, mutations, statistics
from routeblock.timing.check import findings
from routeblock.timing.edits import Copy
from routeblock.timing.reasons import Reason
from routeblock.timing.record import Record
from routeblock.timing.statistics import Comparison, comparisons
from routeblock.timing.verification import unlisted

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / targets.RECORDED
COMMITTED = ROOT / targets.PROTOCOL
PLAN = load(COMMITTED)


@pytest.fixture(scope="module")
def found() -> Record:
    return STUDY.read(HERE)


@pytest.fixture(scope="module")
def compared(found: Record) -> list[Comparison]:
    return comparisons(STUDY.table.rows(found.batches), KEY, pairs(PLAN, found), PLAN.bootstrap)


def test_the_record_is_whole_and_recomputed(found: Record) -> None:
    assert unlisted(STUDY, HERE, HERE / "contents.json") == verification.recompute(found, PLAN) == []
    assert findings(STUDY, found, PLAN) == []
    assert len(found.run["checks"]) == 28
    accepted = [b for b in found.batches if b.accepted]
    assert len(accepted) == 28 * len(PLAN.series) * PLAN.repetitions
    assert {b.reason for b in found.batches if not b.accepted} == {"throttled"}


def test_every_committed_file_is_the_recorded_one() -> None:
    listed = json.loads((HERE / "contents.json").read_text())
    files = {p.name: p for p in HERE.iterdir() if p.name not in ("README.md", "contents.json")}
    assert files.keys() == set(STUDY.files) == set(targets.FILES)
    assert {name: sha256_file(p) for name, p in files.items()} == {name: listed[name]["sha256"] for name in files}


def test_the_kernels_are_those_of_this_source(found: Record) -> None:
    """The binary that ran on the GPU is what this source compiles to, byte for byte."""
    assert compile_for("sm_90").sha256 == found.run["cubin_sha256"]["q6k_dispatch"]


def test_every_threshold_is_reached(compared: list[Comparison]) -> None:
    bound = [c for c in compared if c.best and c.role in PLAN.threshold.roles]
    assert len(bound) == 11 + 8 and all(c.reached for c in bound)
    assert all(c.change is not None for c in compared)


def test_every_declared_edit_of_the_record_is_refused_for_its_reason() -> None:
    declared = ROOT / "fixtures/record_edits.json"
    entries = mutations.mutate(STUDY, ROOM, [HERE], COMMITTED, declared, verification.recompute)
    assert len(entries) > 80 and mutations.misjudged(entries) == []
    assert all(entry["as_declared"] for entry in entries)


def test_one_batch_less_of_the_best_peer_is_refused_and_leaves_its_shape_undecided(found: Record) -> None:
    copy = Copy(STUDY, ROOM, STUDY.table.rows(found.batches), dict(found.documents), {}, {}).again()
    copy.rows = [dict(row) for row in STUDY.table.rows(found.batches)]
    edits.apply(copy, "baseline_batch_deleted")
    forged = Record(found.folder, [STUDY.table.batch(row) for row in copy.rows], copy.documents)
    assert {f.reason for f in findings(STUDY, forged, PLAN)} == {Reason.BATCH_MISSING}
    peers = tables.peers(Evidence(comparisons(copy.rows, KEY, pairs(PLAN, forged), PLAN.bootstrap), forged, PLAN))
    assert [(r["best"], r["reached"]) for r in peers if "ratio" not in r] == [
        ("undecided: vllm_batched 11 of 12", None)
    ]


def test_bits_depend_neither_on_the_path_nor_on_the_batch(found: Record) -> None:
    for check in found.run["checks"]:
        assert len({check["output_sha256"][side] for side in map(str, OURS)}) == 1
    rows = tables.batch_bits(Evidence([], found, PLAN))
    assert all(r["same_as_alone"] and r["same_as_auto"] for r in rows if r["side"] in map(str, OURS))
    # The peers are no copies of ours, and one of them changes bits with the batch.
    assert not any(r["same_as_auto"] for r in rows if r["side"] not in map(str, OURS))
    assert {r["side"] for r in rows if not r["same_as_alone"]} == {"llama_cpp"}


def test_the_sanitizer_and_the_counters_ran(found: Record) -> None:
    assert [t["outcome"] for t in found.documents["sanitizer"]["tools"]] == ["clean"] * len(TOOLS)
    assert found.documents["counters"]["outcome"] == "counted"
    told = [
        tuple(r[n] for n in ("role", "slots", "pool", "rows", "cols", "side"))
        for r in found.documents["counters"]["rows"]
    ]
    assert told == [(s.role, s.slots, s.pool, s.rows, s.cols, side) for s, side in counters.cases(PLAN)]


def test_rows_hold_the_tables_columns(found: Record, compared: list[Comparison]) -> None:
    given = Evidence(compared, found, PLAN)
    for name, table in tables.TABLES.items():
        rows = table.rows(given)
        columns = {c.name for c in table.columns}
        assert (rows or name == "dispatch_mutations") and all(row.keys() <= columns for row in rows)
    assert [r["role"] for r in tables.peers(given)] == [str(s.role) for s in shapes(PLAN)]


def test_a_counter_says_what_binds_and_what_remains(found: Record, compared: list[Comparison]) -> None:
    rows = tables.counters(Evidence(compared, found, PLAN))
    ours = [r for r in rows if r["side"] == Side.AUTO]
    assert len(ours) == 11 + 8 and all(0 < r["remains_us"] < r["replay_us"] for r in ours)
    # What docs/fast-paths.md says of them.
    assert {r["binds"] for r in ours} == {"l2", "wait", "long_scoreboard", "barrier"}
    peers = [r for r in tables.peers(Evidence(compared, found, PLAN)) if r["role"] in PLAN.threshold.roles]
    assert {r["limit"] for r in peers} == {"read"}
    reading = {(r["slots"], r["pool"], r["cols"]): r for r in rows if r["side"] == Side.READ}
    for r in ours:
        alone = reading[r["slots"], r["pool"], r["cols"]]
        assert (r["binds"] == "l2") == (r["dram_percent"] > 50)
        assert alone["l2_percent"] > r["l2_percent"] and alone["dram_percent"] > r["dram_percent"]
        assert r["binds"] != "l2" or r["waits"].startswith("long_scoreboard")
    schedules = [r for r in rows if r["side"] not in (*OURS, Side.READ)]
    assert {r["binds"] for r in schedules} == {"issue"} and all("remains_us" not in r for r in schedules)


def _counted(found: Record, **changes: Any) -> dict[str, Any]:
    """The first row's table row, were its counters these, and were the profiler's time that of the replay."""
    told = {
        **found.documents["counters"]["rows"][0],
        **{f"{name}_percent": 10 for name in tables.RESOURCES},
        "replay_us": 2.0,
    }
    told |= {"time_ns": 2e3 * PLAN.counters.calls, "cycles": 100, "cycles_active": 80} | changes
    documents = found.documents | {"counters": {"rows": [told]}}
    (row,) = tables.counters(Evidence([], replace(found, documents=documents), PLAN))
    return row


def test_below_the_threshold_the_largest_loss_is_named(found: Record) -> None:
    stalls = {"selected": 9.0, "not_selected": 9.0, "wait": 1.0, "barrier": 3.0}
    row = _counted(found, stalls=stalls)
    assert (row["binds"], row["waits"], row["idle_percent"]) == ("barrier", "barrier 75, wait 25", 20)
    assert _counted(found, stalls=stalls, cycles_active=40)["binds"] == "idle"
    assert _counted(found, stalls=stalls, dram_percent=60)["binds"] == "dram"


def test_shares_of_the_profilers_time_become_shares_of_the_replay(found: Record) -> None:
    row = _counted(found, replay_us=1.0, cycles_active=45, issue_percent=31)
    assert (row["issue_percent"], row["idle_percent"], row["binds"]) == (62, 10, "issue")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE, tmp_path / "record"))


def edit(folder: Path, change: Any) -> Record:
    """The record with `run.json` changed, and sealed again as one would who hides it."""
    run = json.loads((folder / "run.json").read_text())
    change(run)
    (folder / "run.json").write_text(json.dumps(run))
    contents = json.loads((folder / "contents.json").read_text())
    contents["run.json"]["sha256"] = sha256_file(folder / "run.json")
    (folder / "contents.json").write_text(json.dumps(contents))
    return STUDY.read(folder)


def _other_sample(run: Any) -> None:
    run["checks"][3]["samples"][1]["sha256"] = "0" * 64


def _other_jobs(run: Any) -> None:
    run["checks"][5]["ids_sha256"] = "0" * 64


def _other_plan(run: Any) -> None:
    run["checks"][7]["plan"]["tiles"] += 1


def _other_bits(run: Any) -> None:
    for b in run["batch_bits"]:
        b["sha256"] = "1" * 64


def _lost_shape(run: Any) -> None:
    del run["checks"][2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_other_sample, "sampled outputs are not the model's"),
        (_other_jobs, "the jobs are not those of the seed"),
        (_other_plan, "launched as"),
        (_other_bits, "is not the model's"),
        (_lost_shape, "not checked"),
    ],
)
def test_a_resealed_edit_is_found(copy: Path, change: Any, says: str) -> None:
    found = edit(copy, change)
    wrong = findings(STUDY, found, PLAN) + verification.recompute(found, PLAN)
    assert any(says in str(finding) for finding in wrong)


def test_an_edited_file_and_a_moved_batch_are_refused(copy: Path, found: Record) -> None:
    (copy / "counters.json").write_text((copy / "counters.json").read_text().replace("auto", "dp4a", 1))
    wrong = unlisted(STUDY, copy, copy / "contents.json")
    assert list(map(str, wrong)) == [f"{copy / 'counters.json'}: seal: not the bytes that were recorded"]
    batches = list(found.batches)
    batches[0] = replace(batches[0], series="vllm_vec")
    batches[1] = replace(batches[1], clock_events=0x8)
    wrong = findings(STUDY, replace(found, batches=batches), PLAN)
    assert {f.reason for f in wrong} >= {Reason.POSITION, Reason.ARM, Reason.STATE, Reason.NOT_REJECTED}


def test_an_edited_record_stops_the_command(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "run.json").write_text("{}")
    out = tmp_path / "out"
    arguments = ["--source", str(copy), "--protocol", str(COMMITTED), "--out", str(out)]
    (copy / "batches.parquet").write_bytes(b"no")
    assert main(["fast-paths", "recorded", *arguments]) == 2
    assert "no table of batches" in capsys.readouterr().err and not out.exists()


def test_what_is_no_record_or_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run.json: cannot be used"):
        STUDY.read(tmp_path)
    with pytest.raises(InputError, match="no list of contents"):
        unlisted(STUDY, tmp_path, tmp_path / "contents.json")
    with pytest.raises(InputError, match="no statistics"):
        statistics.read(tmp_path / "statistics.json")
    with pytest.raises(InputError, match="known ones are peers"):
        tables.write("nothing", tmp_path, tmp_path, tmp_path, tmp_path, COMMITTED)
    options = [f"--{name}={tmp_path}" for name in ("out", "record", "statistics", "validation")]
    assert main(["fast-paths", "table", "nothing", *options]) == 2
