# SPDX-License-Identifier: Apache-2.0
"""Verdicts follow from the raw batches, two computations agree, and nothing edited passes the second."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from small import FakeDevice, made_up, protocol_file, record_folder

from routeblock.alignment_cost import record
from routeblock.alignment_cost.batches import Batch
from routeblock.alignment_cost.protocol import load
from routeblock.alignment_cost.study import STUDY, pairs
from routeblock.cli import main
from routeblock.cuda.sanitizer import TOOLS
from routeblock.errors import InputError
from routeblock.timing import statistics, validation
from routeblock.timing.check import findings
from routeblock.timing.reasons import Finding
from routeblock.timing.record import BATCHES, Record
from routeblock.timing.statistics import Comparison


@pytest.fixture
def protocol(tmp_path: Path) -> Path:
    return protocol_file(tmp_path)


@pytest.fixture
def folder(tmp_path: Path, protocol: Path) -> Path:
    return record_folder(tmp_path / "record", protocol)


def compare(found: Record, protocol: Path) -> list[Comparison]:
    plan = load(protocol)
    return statistics.comparisons(STUDY.table.rows(found.batches), STUDY.key, pairs(plan, found), plan.bootstrap)


def slowed(found: Record, series: str, factor: float) -> Record:
    batches = [
        replace(b, elapsed_us=b.elapsed_us * factor, time_us=b.elapsed_us * factor / b.calls)
        if b.series == series
        else b
        for b in found.batches
    ]
    return replace(found, batches=batches)


def test_verdicts_targets_and_floor(protocol: Path) -> None:
    found = compare(made_up(FakeDevice(), protocol), protocol)
    told = {(c.campaign, c.experts, c.tokens, c.mode, c.series): c for c in found}
    canonical = told["operator", 128, 1, "graph", "canonical"]
    assert canonical.verdict == "non-inferior" and canonical.n == canonical.planned == 8
    assert (canonical.target, canonical.reached) == (0.7, True)
    assert (told["operator", 128, 128, "graph", "canonical"].target) == 1.0
    assert told["operator", 8, 4, "graph", "canonical"].target is None  # reported
    assert told["operator", 128, 1, "stream", "canonical"].target is None
    assert told["operator", 128, 1, "graph", "sort"].verdict == "inferior"
    assert told["operator", 128, 1, "host", "sort"].verdict is None
    assert (told["layer", 128, 1, "graph", "canonical"].threshold, canonical.threshold) == (0.005, 0.02)
    again = told["operator", 128, 1, "graph", "native_again"]
    assert (canonical.floor_change, canonical.floor_low) == (again.change, again.low)


def test_a_target_that_is_not_reached_is_told(protocol: Path) -> None:
    found = compare(slowed(made_up(FakeDevice(), protocol), "canonical", 1.3), protocol)
    missed = [c for c in found if c.reached is False]
    assert [(c.tokens, c.mode, c.verdict) for c in missed] == [(1, "graph", "non-inferior")]


def test_too_few_repetitions_are_undecided(protocol: Path) -> None:
    made = made_up(FakeDevice(), protocol)
    batches = [
        replace(b, accepted=b.repetition < 5, reason="" if b.repetition < 5 else "throttled") for b in made.batches
    ]
    every = compare(replace(made, batches=batches), protocol)
    found = [c for c in every if c.mode == "graph" and c.series == "canonical"]
    assert {(c.planned, c.n, c.verdict) for c in found} == {(8, 5, "undecided"), (5, 5, "non-inferior")}


def test_a_point_without_batches_has_a_row(protocol: Path) -> None:
    found = compare(replace(made_up(FakeDevice(), protocol), batches=[]), protocol)
    assert {(c.n, c.change, c.verdict) for c in found if c.mode != "host"} == {(0, None, "undecided")}


def run(folder: Path, protocol: Path, out: Path) -> Path:
    assert statistics.write(out, STUDY, [folder], protocol, rule="alignment_statistics") == []
    return out / "statistics.json"


def disagreements(made: Path, folder: Path, protocol: Path) -> tuple[int, list[Finding]]:
    return validation.disagreements(STUDY, made, [folder], protocol)


def test_the_recount_agrees_exactly(folder: Path, protocol: Path, tmp_path: Path) -> None:
    made = run(folder, protocol, tmp_path / "out")
    assert disagreements(made, folder, protocol) == (33, [])


Table = list[dict[str, Any]]


def edit_time(rows: Table) -> None:
    rows[5]["elapsed_us"] *= 0.5


def edit_both(rows: Table) -> None:
    rows[5]["elapsed_us"] *= 0.5
    rows[5]["time_us"] = rows[5]["elapsed_us"] / rows[5]["calls"]


def swap_labels(rows: Table) -> None:
    """native and canonical of one repetition, label and arm."""
    a, b = (next(r for r in rows if r["series"] == s) for s in ("native", "canonical"))
    for key in ("series", "arm", "variant"):
        a[key], b[key] = b[key], a[key]


def swap_arms(rows: Table) -> None:
    a, b = (next(r for r in rows if r["series"] == s) for s in ("native", "canonical"))
    a["arm"], b["arm"] = b["arm"], a["arm"]


def accept(rows: Table) -> None:
    rows[7]["accepted"] = False


def double(rows: Table) -> None:
    rows.append(dict(rows[3]))


@pytest.mark.parametrize(
    ("change", "sealed", "words"),
    [
        (edit_time, True, "us by 40"),
        (edit_both, True, "recounted"),
        (edit_both, False, "edited: SHA-256"),
        (swap_labels, True, "position: position is 0, the protocol gives 2"),
        (swap_arms, True, "arm: side is 'canonical', the protocol gives 'native'"),
        (accept, True, "accepted False with reason ''"),
        (double, True, "batch_twice: 2 batches"),
    ],
)
def test_a_changed_raw_batch_is_refused(
    folder: Path, protocol: Path, tmp_path: Path, change: Callable[[Table], None], sealed: bool, words: str
) -> None:
    made = run(folder, protocol, tmp_path / "out")
    rows = pq.read_table(folder / BATCHES).to_pylist()
    change(rows)
    STUDY.table.write(folder / BATCHES, [Batch(**row) for row in rows])
    if sealed:
        STUDY.seal(folder, "record_alignment", protocol, [STUDY.module])
    wrong = disagreements(made, folder, protocol)[1]
    assert any(words in str(line) for line in wrong), wrong


def change_number(found: Table) -> None:
    found[0]["change"] += 1e-15


def change_verdict(found: Table) -> None:
    next(c for c in found if c["verdict"] == "inferior")["verdict"] = "non-inferior"


def swap_series(found: Table) -> None:
    a, b = (next(c for c in found if c["series"] == s) for s in ("canonical", "sort"))
    for key in ("series", "arm"):
        a[key], b[key] = b[key], a[key]


def drop(found: Table) -> None:
    del found[2]


def widen_margin(found: Table) -> None:
    found[0]["threshold"] = 0.05


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_number, "change is"),
        (change_verdict, "verdict is 'non-inferior', recounted 'inferior'"),
        (swap_series, "operator 128 8 1 graph sort: value: change is"),
        (drop, "only in the protocol"),
        (widen_margin, "threshold is 0.05, recounted 0.02"),
    ],
)
def test_changed_statistics_are_refused(
    folder: Path, protocol: Path, tmp_path: Path, change: Callable[[Table], None], words: str
) -> None:
    made = run(folder, protocol, tmp_path / "out")
    told = json.loads(made.read_text())
    change(told["comparisons"])
    made.write_text(json.dumps(told))
    wrong = disagreements(made, folder, protocol)[1]
    assert any(words in str(line) for line in wrong), wrong


def test_the_commands_exit_as_they_should(
    folder: Path, protocol: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    common = ["--record", str(folder), "--protocol", str(protocol)]
    assert main(["alignment", "statistics", *common, "--out", str(out)]) == 0
    made = ["--statistics", str(out / "statistics.json"), "--out", str(tmp_path / "valid")]
    assert main(["alignment", "validate", *common, *made]) == 0
    assert "33 comparisons recounted" in capsys.readouterr().out
    (out / "statistics.json").write_text((out / "statistics.json").read_text().replace("non-inferior", "inferior"))
    assert main(["alignment", "validate", *common, *made]) == 1
    (folder / BATCHES).unlink()
    assert main(["alignment", "validate", *common, *made]) == 2
    assert "batches.parquet: no table of batches" in capsys.readouterr().err


def problem(folder: Path, protocol: Path, name: str, **changes: Any) -> list[str]:
    path = folder / f"{name}.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | changes))
    found = list(map(str, findings(STUDY, STUDY.read(folder), load(protocol))))
    path.write_text(before)
    return found


def test_a_record_that_does_not_show_it_is_told(folder: Path, protocol: Path) -> None:
    lines = ["1 cases, 0 differences", "========= ERROR SUMMARY: 0 errors"]
    clean = [{"tool": t, "outcome": "clean", "exit_code": 0, "lines": lines} for t in TOOLS]
    tools = [{"tool": "memcheck", "outcome": "found", "exit_code": 86, "lines": ["x", "3 errors"]}, *clean[1:]]
    assert problem(folder, protocol, "sanitizer", tools=tools) == ["sanitizer.json: sanitizer: memcheck: 3 errors"]
    absent = {"outcome": "absent", "exit_code": None, "lines": ["compute-sanitizer is not on PATH"]}
    assert problem(folder, protocol, "sanitizer", tools=[{"tool": t, **absent} for t in TOOLS]) == []
    for wrong, said in (
        ([*clean[1:]], "tools racecheck, synccheck, initcheck, where memcheck"),
        ([{**clean[0], "outcome": "absent"}, *clean[1:]], "memcheck: absent does not follow from exit code 0"),
        ([{**clean[0], "exit_code": 1}, *clean[1:]], "memcheck: clean does not follow from exit code 1"),
        ([{**clean[0], "lines": lines[1:]}, *clean[1:]], "memcheck: clean does not follow"),
        ([{**clean[0], "exit_code": None}, *clean[1:]], "memcheck: clean without an exit code"),
    ):
        assert problem(folder, protocol, "sanitizer", tools=wrong)[0].startswith(f"sanitizer.json: sanitizer: {said}")
    different = {"1": {"calls": 9, "different": 1, "fingerprint": "0" * 64}}
    assert problem(folder, protocol, "exactness", repeated=different) == [
        "exactness.json: bits: 1 of 9 repeated calls at 1 tokens differ"
    ]
    fewer = {"routings": 3, "variants": {"tiles_512x4": 2}}
    assert problem(folder, protocol, "exactness", random=fewer) == [
        "exactness.json: bits: 3 random routings compared, by all variants 2"
    ]
    assert problem(folder, protocol, "exactness", differs="random: x") == ["exactness.json: bits: random: x"]
    told = problem(folder, protocol, "run", extension={"sha256": "0" * 64, "vllm": None})
    assert "none of the protocol's builds" in told[0]


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run.json: cannot be used"):
        STUDY.read(tmp_path)


def test_the_rival_mode_is_read_from_the_build(tmp_path: Path) -> None:
    plain, later = tmp_path / "a.so", tmp_path / "b.so"
    plain.write_bytes(b"moe")
    later.write_bytes(b"x VLLM_BATCH_INVARIANT y")
    assert not record.full_k(plain, {"gemm": "gemm(int a)"})["in_build"]
    assert record.full_k(later, {"gemm": "gemm(int a)"})["in_build"]
    assert record.full_k(plain, {"gemm": "gemm(bool batch_invariant)"})["in_build"]
