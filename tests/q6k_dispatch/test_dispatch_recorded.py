# SPDX-License-Identifier: Apache-2.0
"""The committed record of the fast paths: whole, proved again, its goals, and nothing of it can be edited."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from routeblock.cli import main
from routeblock.cuda.q6k_dispatch import compile_for
from routeblock.cuda.sanitizer import TOOLS
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file
from routeblock.q6k_dispatch import counters, record, reprove, statistics, tables, targets
from routeblock.q6k_dispatch.protocol import OURS, Side, load, shapes
from routeblock.q6k_dispatch.statistics import Comparison
from routeblock.q6k_dispatch.tables import Evidence

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / targets.RECORDED
COMMITTED = ROOT / targets.PROTOCOL
PLAN = load(COMMITTED)


@pytest.fixture(scope="module")
def found() -> record.Recorded:
    return record.read(HERE)


@pytest.fixture(autouse=True, scope="module")
def outputs_once() -> Iterator[None]:
    """The model's outputs, computed once for all tests here."""
    made: dict[tuple[Any, ...], Any] = {}
    compute = reprove.output

    def output(jobs: Any, slot: int, seed: int) -> Any:
        key = (jobs.shape, slot, seed, jobs.x.tobytes()[:64])
        if key not in made:
            made[key] = compute(jobs, slot, seed)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reprove, "output", output)
        yield


@pytest.fixture(scope="module")
def compared(found: record.Recorded) -> list[Comparison]:
    return statistics.comparisons(found.batches, PLAN)


def test_the_record_is_whole_and_recomputed(found: record.Recorded) -> None:
    assert reprove.unsealed(HERE) == record.problems(found, PLAN) == reprove.disagreements(found, PLAN) == []
    assert len(found.run["checks"]) == 28
    accepted = [b for b in found.batches if b.accepted]
    assert len(accepted) == 28 * len(PLAN.series) * PLAN.repetitions
    assert {b.reason for b in found.batches if not b.accepted} == {"throttled"}


def test_every_committed_file_is_the_recorded_one() -> None:
    listed = json.loads((HERE / "contents.json").read_text())
    files = {p.name: p for p in HERE.iterdir() if p.name not in ("README.md", "contents.json")}
    assert files.keys() == set(record.FILES)
    assert {name: sha256_file(p) for name, p in files.items()} == {name: listed[name]["sha256"] for name in files}


def test_the_kernels_are_those_of_this_source(found: record.Recorded) -> None:
    """The binary that ran on the GPU is what this source compiles to, byte for byte."""
    assert compile_for("sm_90").sha256 == found.run["cubin_sha256"]["q6k_dispatch"]


def test_every_threshold_is_reached(compared: list[Comparison]) -> None:
    bound = [c for c in compared if c.role in PLAN.threshold.roles]
    assert len(bound) == 11 + 8 and all(c.reached for c in bound)
    assert all(r is not None for c in compared for r in c.ratios.values())


def test_bits_depend_neither_on_the_path_nor_on_the_batch(found: record.Recorded) -> None:
    for check in found.run["checks"]:
        assert len({check["output_sha256"][side] for side in map(str, OURS)}) == 1
    rows = tables.batch_bits(Evidence([], found, PLAN))
    assert all(r["same_as_alone"] and r["same_as_auto"] for r in rows if r["side"] in map(str, OURS))
    # The peers are no copies of ours, and one of them changes bits with the batch.
    assert not any(r["same_as_auto"] for r in rows if r["side"] not in map(str, OURS))
    assert {r["side"] for r in rows if not r["same_as_alone"]} == {"llama_cpp"}


def test_the_sanitizer_and_the_counters_ran(found: record.Recorded) -> None:
    assert [t["outcome"] for t in found.sanitizer["tools"]] == ["clean"] * len(TOOLS)
    assert found.counters["outcome"] == "counted"
    told = [tuple(r[n] for n in ("role", "slots", "pool", "rows", "cols", "side")) for r in found.counters["rows"]]
    assert told == [(s.role, s.slots, s.pool, s.rows, s.cols, side) for s, side in counters.cases(PLAN)]


def test_rows_hold_the_tables_columns(found: record.Recorded, compared: list[Comparison]) -> None:
    given = Evidence(compared, found, PLAN)
    for table in tables.TABLES.values():
        rows = table.rows(given)
        assert rows and all(row.keys() <= {c.name for c in table.columns} for row in rows)
    assert [r["role"] for r in tables.peers(given)] == [str(s.role) for s in shapes(PLAN)]


def test_a_counter_says_what_binds_and_what_remains(found: record.Recorded, compared: list[Comparison]) -> None:
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


def _counted(found: record.Recorded, **changes: Any) -> dict[str, Any]:
    """The first row's table row, were its counters these, and were the profiler's time that of the replay."""
    told = {**found.counters["rows"][0], **{f"{name}_percent": 10 for name in tables.RESOURCES}, "replay_us": 2.0}
    told |= {"time_ns": 2e3 * PLAN.counters.calls, "cycles": 100, "cycles_active": 80} | changes
    (row,) = tables.counters(Evidence([], replace(found, counters={"rows": [told]}), PLAN))
    return row


def test_below_the_threshold_the_largest_loss_is_named(found: record.Recorded) -> None:
    stalls = {"selected": 9.0, "not_selected": 9.0, "wait": 1.0, "barrier": 3.0}
    row = _counted(found, stalls=stalls)
    assert (row["binds"], row["waits"], row["idle_percent"]) == ("barrier", "barrier 75, wait 25", 20)
    assert _counted(found, stalls=stalls, cycles_active=40)["binds"] == "idle"
    assert _counted(found, stalls=stalls, dram_percent=60)["binds"] == "dram"


def test_shares_of_the_profilers_time_become_shares_of_the_replay(found: record.Recorded) -> None:
    row = _counted(found, replay_us=1.0, cycles_active=45, issue_percent=31)
    assert (row["issue_percent"], row["idle_percent"], row["binds"]) == (62, 10, "issue")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE, tmp_path / "record"))


def edit(folder: Path, change: Any) -> record.Recorded:
    """The record with `run.json` changed, and sealed again as one would who hides it."""
    run = json.loads((folder / "run.json").read_text())
    change(run)
    (folder / "run.json").write_text(json.dumps(run))
    contents = json.loads((folder / "contents.json").read_text())
    contents["run.json"]["sha256"] = sha256_file(folder / "run.json")
    (folder / "contents.json").write_text(json.dumps(contents))
    return record.read(folder)


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
    assert any(says in line for line in reprove.disagreements(edit(copy, change), PLAN))


def test_an_edited_file_and_a_moved_batch_are_refused(copy: Path, found: record.Recorded) -> None:
    (copy / "counters.json").write_text((copy / "counters.json").read_text().replace("auto", "dp4a", 1))
    assert reprove.unsealed(copy) == [f"{copy / 'counters.json'}: not the bytes that were recorded"]
    batches = list(found.batches)
    batches[0] = replace(batches[0], series="vllm_vec")
    batches[1] = replace(batches[1], clock_events=0x8)
    wrong = reprove._batches(replace(found, batches=batches), PLAN)
    assert len(wrong) == 2 and "not at position" in wrong[0] and "accepted True" in wrong[1]


def test_an_edited_record_stops_the_command(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "run.json").write_text("{}")
    out = tmp_path / "out"
    arguments = ["--source", str(copy), "--protocol", str(COMMITTED), "--out", str(out)]
    (copy / "batches.parquet").write_bytes(b"no")
    assert main(["recorded-dispatch", *arguments]) == 2
    assert "no table of batches" in capsys.readouterr().err and not out.exists()


def test_what_is_no_record_or_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a record"):
        record.read(tmp_path)
    with pytest.raises(InputError, match="no list of contents"):
        reprove.unsealed(tmp_path)
    with pytest.raises(InputError, match="no statistics"):
        statistics.read(tmp_path / "statistics.json")
    with pytest.raises(InputError, match="known ones are peers"):
        tables.write("nothing", tmp_path, tmp_path, tmp_path, COMMITTED)
    options = [f"--{name}={tmp_path}" for name in ("out", "record", "statistics")]
    assert main(["dispatch-table", "nothing", *options]) == 2
