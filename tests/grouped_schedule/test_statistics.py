# SPDX-License-Identifier: Apache-2.0
"""Statistics of constructed batches, and a validator that finds any value that was changed."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tiny import PLAN, MadeUpClock, recorded, write

from routeblock.cli import main
from routeblock.errors import InputError
from routeblock.evidence.digest import PACKAGE_ROOT
from routeblock.grouped_schedule import tables, verification
from routeblock.grouped_schedule.edits import ROOM
from routeblock.grouped_schedule.statistics import write as write_statistics
from routeblock.grouped_schedule.study import STUDY, pairs, study
from routeblock.grouped_schedule.tables import Evidence
from routeblock.timing import mutations, statistics, validation
from routeblock.timing.check import findings
from routeblock.timing.estimate import paired_change
from routeblock.timing.record import Record

PUBLISHED = PACKAGE_ROOT.parents[1] / "fixtures/published/grouped_schedule.json"


def noisy(arm: str, call: int) -> float:
    """Made up: an arm's level and noise that depends on the call."""
    return 100 + 3 * len(arm) + float(np.random.PCG64(call).random_raw() % 1000) / 300


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep and a confirmation of a made-up clock, with their statistics."""
    root = tmp_path_factory.mktemp("made")
    protocol = write(root)
    clock = MadeUpClock(noisy, lambda arm, call: "throttled" if call % 17 == 0 else "")
    folders = [root / "sweep", root / "confirmation"]
    for folder in folders:
        recorded(folder, clock, folder.name, protocol)
    assert write_statistics(root / "out", folders, protocol, minimum_effect=0.01) == []
    return root


def check(root: Path, statistics_file: Path | None = None) -> tuple[int, list[str]]:
    path = statistics_file or root / "out/statistics.json"
    if statistics_file:
        shutil.copy(root / "out/ratios.parquet", statistics_file.parent)
    folders = [root / "sweep", root / "confirmation"]
    number, wrong = validation.disagreements(study(0.01), path, folders, root / "protocol.json", sealed=False)
    return number, list(map(str, wrong))


def compare(found: Record, minimum_effect: float = 0.01) -> list[statistics.Comparison]:
    every = pairs(minimum_effect, PLAN, found)
    return statistics.comparisons(STUDY.table.rows(found.batches), STUDY.key, every, PLAN.bootstrap)


def test_two_computations_agree_exactly(made: Path) -> None:
    number, wrong = check(made)
    assert wrong == []
    # sweep 6 + 5, floors 2, prototype 1, confirmation 1, its floor 1; two scopes each
    assert number == 2 * (11 + 2 + 1 + 1 + 1)


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c.update(change=np.nextafter(c["change"], 1)),
        lambda c: c.update(low=np.nextafter(c["low"], -1)),
        lambda c: c.update(high=c["high"] + 1e-12),
        lambda c: c.update(baseline_us=c["baseline_us"] * (1 + 1e-15)),
        lambda c: c.update(verdict="faster" if c["verdict"] != "faster" else "slower"),
        lambda c: c.update(n=c["n"] - 1),
        lambda c: c.update(floor_low=0.0),
        lambda c: c.update(series="band33"),
    ],
)
def test_the_validator_finds_a_changed_value(
    made: Path, tmp_path: Path, edit: Callable[[dict[str, object]], None]
) -> None:
    told = json.loads((made / "out/statistics.json").read_text())
    edit(next(c for c in told["comparisons"] if c["campaign"] == "sweep"))
    (tmp_path / "s.json").write_text(json.dumps(told))
    assert check(made, tmp_path / "s.json")[1]


def test_the_validator_finds_a_missing_comparison(made: Path, tmp_path: Path) -> None:
    told = json.loads((made / "out/statistics.json").read_text())
    gone = told["comparisons"].pop()
    (tmp_path / "s.json").write_text(json.dumps(told))
    wrong = check(made, tmp_path / "s.json")[1]
    assert len(wrong) == 1 and gone["series"] in wrong[0] and "only in the protocol" in wrong[0]


def test_a_changed_ratio_is_found(made: Path, tmp_path: Path) -> None:
    for name in ("sweep", "confirmation", "out"):
        shutil.copytree(made / name, tmp_path / name)
    shutil.copy(made / "protocol.json", tmp_path)
    path = tmp_path / "out/ratios.parquet"
    table = pq.read_table(path)
    values = table["ratio"].to_pylist()
    values[7] *= 1.001
    pq.write_table(table.set_column(table.schema.get_field_index("ratio"), "ratio", [values]), path)
    assert any("row 7 of" in line for line in check(tmp_path)[1])


def test_declared_edits_of_a_record_are_refused_for_their_reasons(made: Path) -> None:
    """The sweep has floors and rejected batches; three repetitions are too few for two kinds of edit."""
    again = partial(verification.recompute, threads=1)
    declared = PACKAGE_ROOT.parents[1] / "fixtures/record_edits.json"
    protocol = made / "protocol.json"
    entries = {e["name"]: e for e in mutations.mutate(study(0.01), ROOM, [made / "sweep"], protocol, declared, again)}
    for name in ("repetition_deleted", "last_repetitions_deleted", "rotation", "slow_repetitions_deleted"):
        entries.pop(name)
    assert mutations.misjudged(entries.values()) == [] and len(entries) > 70


def test_rejected_batches_take_no_part(made: Path) -> None:
    found = STUDY.read(made / "sweep")
    assert any(not b.accepted for b in found.batches)
    accepted = replace(found, batches=[b for b in found.batches if b.accepted])
    assert compare(accepted) == compare(found)


def test_a_repetition_accepted_twice_is_refused(made: Path) -> None:
    found = STUDY.read(made / "confirmation")
    with pytest.raises(InputError, match="accepted twice"):
        compare(replace(found, batches=[*found.batches, found.batches[-1]]))


def test_pairs_are_of_one_repetition(made: Path) -> None:
    found = STUDY.read(made / "confirmation")
    rows = pq.read_table(made / "out/ratios.parquet").to_pylist()
    mine = [r for r in rows if r["campaign"] == "confirmation"]
    times = {(b.series, b.scope, b.repetition): b.time_us for b in found.batches if b.accepted and "/" not in b.series}
    assert len(mine) == 2 * PLAN.repetitions
    for row in mine:
        new, old = (times[row[side], row["scope"], row["repetition"]] for side in ("series", "baseline"))
        assert row["ratio"] == new / old


def test_baselines_are_the_incumbent_and_the_control(made: Path) -> None:
    found = statistics.read(made / "out/statistics.json")
    sweep = {(c.family, c.baseline) for c in found if c.campaign == "sweep"}
    assert sweep == {("paired", "paired_incumbent"), ("independent", "job_major")}
    assert all(c.floor_low is not None for c in found if not c.campaign.endswith("_floor"))


def test_a_shorter_interval_needs_a_larger_minimum(made: Path) -> None:
    """The verdict follows the setting, from the same batches."""
    found = STUDY.read(made / "sweep")
    assert {c.verdict for c in compare(found, 0.9)} == {"undecided"}
    loose = {c.verdict for c in compare(found, 0.0)}
    assert loose & {"faster", "slower"}


@pytest.mark.parametrize("rejects", [1, 2, 3])
def test_a_median_of_few_is_no_estimate(made: Path, tmp_path: Path, rejects: int) -> None:
    """One arm's batches of so many of three repetitions never get accepted: the verdict says so, and no number."""
    turns = itertools.count()
    size = PLAN.acceptance.attempts * len(PLAN.scopes)

    def reason(arm: str, call: int) -> str:
        # A call takes both scopes, and both are rejected with it.
        return "throttled" if arm == "band32" and next(turns) < rejects * PLAN.acceptance.attempts else ""

    protocol = made / "protocol.json"
    recorded(tmp_path / "c", MadeUpClock(noisy, reason), "confirmation", protocol)
    wrong = write_statistics(tmp_path / "s", [tmp_path / "c"], protocol, minimum_effect=0.01)
    assert f"confirmation has {12 - 2 * rejects} accepted batches, the protocol asks for 12" in " ".join(wrong)
    few = [c for c in statistics.read(tmp_path / "s/statistics.json") if c.campaign == "confirmation"]
    assert len(few) == 2
    for c in few:
        assert (c.n, c.planned, c.verdict) == (3 - rejects, 3, "too few accepted")
        assert c.change is c.low is c.high is c.baseline_us is c.candidate_us is c.clear_of_floor is None
        assert c.floor_low is not None
    assert (
        f"confirmation independent 16 8 37 256 0 call inclusive job_major band32 band32: {3 - rejects} of 3"
        in " ".join(wrong)
    )
    assert check_only(tmp_path, made) == []
    given = Evidence(few, [STUDY.read(tmp_path / "c")], {})
    (row,) = tables.rejections(given)
    # The next call sees, right before it, the event that was seen right after the last attempt.
    rejected = rejects * size + len(PLAN.scopes)
    assert (row["rejected"], row["reason"], row["clock_events"]) == (rejected, "throttled", "sw_power_cap")


def check_only(root: Path, made: Path) -> list[str]:
    made_statistics, protocol = root / "s/statistics.json", made / "protocol.json"
    wrong = validation.disagreements(study(0.01), made_statistics, [root / "c"], protocol, sealed=False)[1]
    return list(map(str, wrong))


def test_a_floor_that_reaches_the_interval_is_told(made: Path) -> None:
    for c in statistics.read(made / "out/statistics.json"):
        if c.floor_low is not None:
            apart = c.low > c.floor_high or c.high < c.floor_low
            assert c.clear_of_floor is apart
        else:
            assert c.clear_of_floor is None


def test_totals_are_of_two_devices_only(made: Path) -> None:
    told = json.loads(PUBLISHED.read_text())
    found = STUDY.read(made / "sweep")
    alone = tables.counts(Evidence([], [found], told))
    assert {r["device"] for r in alone} == {"cpu0"} and not any("published_batches" in r for r in alone)
    other = replace(
        found,
        batches=[replace(b, device="cpu1") for b in found.batches],
        documents=found.documents | {"comparisons": [c | {"device": "cpu1"} for c in found.documents["comparisons"]]},
    )
    both = tables.counts(Evidence([], [found, other], told))
    (total,) = [r for r in both if r["device"] == "cpu0 + cpu1" and r["campaign"] == "sweep"]
    expected = PLAN.expected_per_device
    assert (total["equal"], total["accepted"]) == (2 * expected.sweep_comparisons, 2 * expected.sweep_batches)
    assert (total["published_comparisons"], total["published_batches"]) == (136, 3264)


def test_another_protocol_is_named(made: Path) -> None:
    other = PLAN.model_copy(update={"version": PLAN.version + 1})
    lines = list(map(str, findings(STUDY, STUDY.read(made / "confirmation"), other)))
    assert len(lines) == 1 and "carries protocol" in lines[0]


def agreed(folder: Path) -> Path:
    """A validation that found nothing."""
    path = folder / "validation.json"
    path.write_text('{"comparisons": 1, "disagreements": []}')
    return path


@pytest.mark.parametrize("name", list(tables.TABLES))
def test_tables_are_equal_when_made_twice(made: Path, tmp_path: Path, name: str) -> None:
    folders = [made / "sweep", made / "confirmation"]
    statistics_file = made / "out/statistics.json"
    for out in ("a", "b"):
        tables.write(name, tmp_path / out, statistics_file, folders, PUBLISHED, agreed(tmp_path))
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == [f"{name}.{s}" for s in ("csv", "manifest.json", "md", "parquet")]
    for file in files[:1] + files[2:]:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_discovery_is_complete_and_shows_the_published_numbers_beside_the_mode_they_were_timed_in(made: Path) -> None:
    told = json.loads(PUBLISHED.read_text())
    found = statistics.read(made / "out/statistics.json")
    assert not [r for r in tables.discovery(Evidence(found, [], told)) if "v100_gpu0_change" in r]
    streamed = [replace(c, columns={**c.columns, "mode": "stream"}) for c in found]
    rows = tables.discovery(Evidence(streamed, [], told))
    assert len(rows) == 2 * (6 + 5)
    assert {("note" in r) for r in rows if r["baseline"] == "paired_incumbent"} == {True}
    assert {("note" in r) for r in rows if r["baseline"] != "paired_incumbent"} == {False}
    beside = [r for r in rows if "v100_gpu0_change" in r]
    assert {(r["family"], r["v100_gpu0_change"], r["v100_gpu1_change"]) for r in beside} == {
        ("paired", 11.04, 11.24),
        ("independent", 9.40, 9.13),
    }
    assert all(r["schedule"] == "band32" and r["scope"] == "inclusive" for r in beside)


def test_positions_count_every_accepted_batch(made: Path) -> None:
    found = [STUDY.read(made / "sweep"), STUDY.read(made / "confirmation")]
    rows = tables.positions(Evidence([], found, {}))
    total = sum(v for r in rows for k, v in r.items() if k.startswith("position"))
    expected = PLAN.expected_per_device
    assert total == expected.sweep_batches + expected.confirmation_batches
    assert total == sum(r.get("forward", 0) + r.get("reversed", 0) for r in rows)


def test_cardinalities_list_each_fixture_once(made: Path) -> None:
    found = [STUDY.read(made / "sweep")] * 2
    rows = tables.cardinalities(Evidence([], found, {}))
    assert [(r["family"], r["active_jobs"], r["sentinels"]) for r in rows] == [
        ("paired", 15, 1),
        ("independent", 15, 1),
    ]


def test_an_unknown_table_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="known ones are"):
        tables.write("x", tmp_path, made / "out/statistics.json", [], PUBLISHED, PUBLISHED)


@pytest.mark.parametrize(("comparisons", "disagreements"), [(7, ["a median"]), (0, [])])
def test_no_table_is_made_of_what_the_second_computation_did_not_find(
    made: Path, tmp_path: Path, comparisons: int, disagreements: list[str]
) -> None:
    found = tmp_path / "validation.json"
    found.write_text(json.dumps({"comparisons": comparisons, "disagreements": disagreements}))
    folders = [made / "sweep", made / "confirmation"]
    with pytest.raises(InputError, match=f"disagrees {len(disagreements)} times in {comparisons} comparisons"):
        tables.write("counts", tmp_path / "t", made / "out/statistics.json", folders, PUBLISHED, found)
    assert not (tmp_path / "t").exists()


def test_published_changes_are_medians_of_ratios() -> None:
    """-4.21% and +0.66% do not follow from the published medians, so the estimator is not the ratio of medians."""
    rows = json.loads(PUBLISHED.read_text())["confirmation"]
    ratios = [round(100 * (r["candidate_us"] / r["control_us"] - 1), 2) for r in rows]
    assert [r["change"] for r in rows] != ratios
    assert paired_change([2.0, 1.0], [1.0, 2.0], seed=1, resamples=10, confidence=0.95).change == 0.25


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("out/statistics.json", content) for content in (b"", b'{"comp', b"\xff\xfe", b"[]", b"{}", DEEP)),
        *(("protocol.json", content) for content in (b"", b"\xff", b"[]", b"{}", DEEP)),
        ("out/ratios.parquet", b"PAR1"),
        ("sweep/batches.parquet", b""),
        ("sweep/batches.parquet", None),
        ("confirmation/run.json", b"{}"),
        ("confirmation/comparisons.json", b"[1]"),
    ],
)
def test_a_file_that_the_validator_cannot_use_is_one_line(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None
) -> None:
    root = tmp_path / "made"
    shutil.copytree(made, root)
    path = root / name
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    records = [word for folder in ("sweep", "confirmation") for word in ("--record", str(root / folder))]
    given = [*records, "--statistics", str(root / "out/statistics.json"), "--protocol", str(root / "protocol.json")]
    given += ["--minimum-effect", "0.01"]
    assert main(["study-b", "validate", *given, "--out", str(tmp_path / "o")]) == 2
    told = capsys.readouterr()
    assert told.err.startswith((f"{path}: ", f"{path.parent}: ")) and told.err.count("\n") == 1 and told.out == ""
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("change", ["no column", "text for numbers", "an empty cell", "a time of 0"])
def test_batches_of_another_form_are_told(made: Path, tmp_path: Path, change: str) -> None:
    for name in ("sweep", "confirmation", "out"):
        shutil.copytree(made / name, tmp_path / name)
    shutil.copy(made / "protocol.json", tmp_path)
    path = tmp_path / "sweep/batches.parquet"
    table = pq.read_table(path)
    values = table["time_us"].to_pylist()
    place = table.schema.get_field_index("time_us")
    if change == "no column":
        table = table.remove_column(place)
    else:
        values = [str(v) for v in values] if change == "text for numbers" else values
        values[0] = {"text for numbers": "1", "an empty cell": None, "a time of 0": 0.0}[change]
        table = table.set_column(place, "time_us", [values])
    pq.write_table(table, path)
    if change == "a time of 0":
        assert any(": time: " in line for line in check(tmp_path)[1])
        return
    with pytest.raises(InputError, match="time"):
        check(tmp_path)
