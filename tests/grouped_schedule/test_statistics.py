# SPDX-License-Identifier: Apache-2.0
"""Statistics of constructed batches, and a validator that finds any value that was changed."""

from __future__ import annotations

import ast
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tiny import PLAN, MadeUpClock, write

from routeblock import stats
from routeblock.cli import main
from routeblock.errors import InputError
from routeblock.evidence.digest import PACKAGE_ROOT
from routeblock.grouped_schedule import campaigns, record, statistics, tables, validate
from routeblock.grouped_schedule.campaigns import Mode
from routeblock.grouped_schedule.tables import Evidence

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
    for rule, stages in (("sweep", campaigns.sweep), ("confirmation", campaigns.confirmation)):
        record.write(
            root / rule,
            clock,
            stages(PLAN, Mode.CALL, 0),
            PLAN,
            rule=rule,
            inputs=[protocol],
            modules=["routeblock.grouped_schedule.lanes"],
        )
    folders = [root / "sweep", root / "confirmation"]
    wrong = statistics.write(root / "out", folders, PLAN, minimum_effect=0.01, inputs=[protocol])
    assert wrong == []
    return root


def check(root: Path, statistics_file: Path | None = None) -> tuple[int, list[str]]:
    path = statistics_file or root / "out/statistics.json"
    if statistics_file:
        shutil.copy(root / "out/ratios.parquet", statistics_file.parent)
    return validate.disagreements(path, [root / "sweep", root / "confirmation"], root / "protocol.json")


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
    assert len(wrong) == 1 and gone["series"] in wrong[0] and "only in the raw batches" in wrong[0]


def test_the_validator_shares_no_computation() -> None:
    tree = ast.parse((PACKAGE_ROOT / "grouped_schedule/validate.py").read_text())
    ours = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module and "routeblock" in n.module}
    assert ours == {"routeblock.errors", *(f"routeblock.evidence.{name}" for name in ("digest", "files", "manifest"))}
    called = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert not called & {"median", "quantile", "percentile", "mean"}


def test_rejected_batches_take_no_part(made: Path) -> None:
    found = record.read(made / "sweep")
    assert any(not b.accepted for b in found.batches)
    accepted = [b for b in found.batches if b.accepted]
    some, all_of_them = (sorted(statistics.paired(b), key=lambda p: p.key) for b in (accepted, found.batches))
    assert some == all_of_them


def test_a_repetition_accepted_twice_is_refused(made: Path) -> None:
    found = record.read(made / "confirmation")
    with pytest.raises(InputError, match="accepted twice"):
        statistics.paired([*found.batches, found.batches[-1]])


def test_pairs_are_of_one_repetition(made: Path) -> None:
    found = record.read(made / "confirmation")
    pair = statistics.paired(found.batches)[0]
    told = dict(zip(statistics._KEY, pair.key, strict=True))
    times = {
        (b.series, b.repetition): b.time_us
        for b in found.batches
        if b.accepted and b.scope == told["scope"] and b.campaign == told["campaign"]
    }
    assert pair.candidate_us == [times[told["series"], r] for r in pair.repetitions]
    assert pair.baseline_us == [times[told["baseline"], r] for r in pair.repetitions]


def test_baselines_are_the_incumbent_and_the_control(made: Path) -> None:
    found = statistics.read(made / "out/statistics.json")
    sweep = {(c.family, c.baseline) for c in found if c.campaign == "sweep"}
    assert sweep == {("paired", "paired_incumbent"), ("independent", "job_major")}
    assert all(c.floor_low is not None for c in found if not c.campaign.endswith("_floor"))


def test_a_shorter_interval_needs_a_larger_minimum(made: Path) -> None:
    """The verdict follows the setting, from the same batches."""
    pairs = statistics.paired(record.read(made / "sweep").batches)
    strict = statistics.comparisons(pairs, PLAN, 0.9)
    assert {c.verdict for c in strict} == {"undecided"}
    loose = {c.verdict for c in statistics.comparisons(pairs, PLAN, 0.0)}
    assert loose & {"faster", "slower"}


@pytest.mark.parametrize("rejects", [1, 2, 3])
def test_a_median_of_few_is_no_estimate(made: Path, tmp_path: Path, rejects: int) -> None:
    """One arm's batches of so many of three repetitions never get accepted: the verdict says so, and no number."""
    turns = itertools.count()
    size = PLAN.acceptance.attempts * len(PLAN.scopes)

    def reason(arm: str, call: int) -> str:
        return "throttled" if arm == "band32" and next(turns) < rejects * size else ""

    stages = list(campaigns.confirmation(PLAN, Mode.CALL, 0))
    inputs = [made / "protocol.json"]
    record.write(
        tmp_path / "c",
        MadeUpClock(noisy, reason),
        stages,
        PLAN,
        rule="x",
        inputs=inputs,
        modules=["routeblock.grouped_schedule.lanes"],
    )
    wrong = statistics.write(tmp_path / "s", [tmp_path / "c"], PLAN, minimum_effect=0.01, inputs=[])
    assert f"confirmation has {12 - 2 * rejects} accepted batches, the protocol asks for 12" in " ".join(wrong)
    few = [c for c in statistics.read(tmp_path / "s/statistics.json") if c.campaign == "confirmation"]
    assert len(few) == 2
    for c in few:
        assert (c.n, c.repetitions, c.verdict) == (3 - rejects, 3, "too few accepted")
        assert c.change is c.low is c.high is c.baseline_us is c.candidate_us is c.clear_of_floor is None
        assert c.floor_low is not None
    told = [line for line in check_only(tmp_path, made) if "expected" not in line]
    assert told == []
    given = Evidence(few, [record.read(tmp_path / "c")], {})
    (row,) = tables.rejections(given)
    assert (row["rejected"], row["reason"], row["clock_events"]) == (rejects * size, "throttled", "sw_power_cap")


def check_only(root: Path, made: Path) -> list[str]:
    return validate.disagreements(root / "s/statistics.json", [root / "c"], made / "protocol.json")[1]


def test_a_floor_that_reaches_the_interval_is_told(made: Path) -> None:
    for c in statistics.read(made / "out/statistics.json"):
        if c.floor_low is not None:
            apart = c.low > c.floor_high or c.high < c.floor_low
            assert c.clear_of_floor is apart
        else:
            assert c.clear_of_floor is None


def test_totals_are_of_two_devices_only(made: Path) -> None:
    told = json.loads(PUBLISHED.read_text())
    found = record.read(made / "sweep")
    alone = tables.counts(Evidence([], [found], told))
    assert {r["device"] for r in alone} == {"cpu0"} and not any("published_batches" in r for r in alone)
    other = replace(
        found,
        batches=[replace(b, device="cpu1") for b in found.batches],
        comparisons=[c | {"device": "cpu1"} for c in found.comparisons],
    )
    both = tables.counts(Evidence([], [found, other], told))
    (total,) = [r for r in both if r["device"] == "cpu0 + cpu1" and r["campaign"] == "sweep"]
    expected = PLAN.expected_per_device
    assert (total["equal"], total["accepted"]) == (2 * expected.sweep_comparisons, 2 * expected.sweep_batches)
    assert (total["published_comparisons"], total["published_batches"]) == (136, 3264)


def test_another_protocol_is_named(made: Path) -> None:
    other = PLAN.model_copy(update={"version": PLAN.version + 1})
    lines = record.other_protocol([record.read(made / "confirmation")], other)
    assert len(lines) == 1 and "carries protocol" in lines[0]


def agreed(folder: Path) -> Path:
    """A validation that found nothing."""
    path = folder / "validation.json"
    path.write_text('{"comparisons": 1, "disagreements": []}')
    return path


@pytest.mark.parametrize("name", list(tables.TABLES))
def test_tables_are_equal_when_made_twice(made: Path, tmp_path: Path, name: str) -> None:
    folders = [made / "sweep", made / "confirmation"]
    statistics_file, validation = made / "out/statistics.json", agreed(tmp_path)
    for out in ("a", "b"):
        tables.write(name, tmp_path / out, statistics_file, folders, PUBLISHED, validation)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == [f"{name}.{s}" for s in ("csv", "manifest.json", "md", "parquet")]
    for file in files[:1] + files[2:]:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_discovery_is_complete_and_shows_the_published_numbers_beside(made: Path) -> None:
    told = json.loads(PUBLISHED.read_text())
    rows = tables.discovery(Evidence(statistics.read(made / "out/statistics.json"), [], told))
    assert len(rows) == 2 * (6 + 5)
    beside = [r for r in rows if "v100_gpu0_change" in r]
    assert {(r["family"], r["v100_gpu0_change"], r["v100_gpu1_change"]) for r in beside} == {
        ("paired", 11.04, 11.24),
        ("independent", 9.40, 9.13),
    }
    assert all(r["schedule"] == "band32" and r["scope"] == "inclusive" for r in beside)


def test_positions_count_every_accepted_batch(made: Path) -> None:
    found = [record.read(made / "sweep"), record.read(made / "confirmation")]
    rows = tables.positions(Evidence([], found, {}))
    total = sum(v for r in rows for k, v in r.items() if k.startswith("position"))
    expected = PLAN.expected_per_device
    assert total == expected.sweep_batches + expected.confirmation_batches
    assert total == sum(r.get("forward", 0) + r.get("reversed", 0) for r in rows)


def test_cardinalities_list_each_fixture_once(made: Path) -> None:
    found = [record.read(made / "sweep")] * 2
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
    validation = tmp_path / "validation.json"
    validation.write_text(json.dumps({"comparisons": comparisons, "disagreements": disagreements}))
    folders = [made / "sweep", made / "confirmation"]
    with pytest.raises(InputError, match=f"disagrees {len(disagreements)} times in {comparisons} comparisons"):
        tables.write("counts", tmp_path / "t", made / "out/statistics.json", folders, PUBLISHED, validation)
    assert not (tmp_path / "t").exists()


def test_published_changes_are_medians_of_ratios() -> None:
    """-4.21% and +0.66% do not follow from the published medians, so the estimator is not the ratio of medians."""
    rows = json.loads(PUBLISHED.read_text())["confirmation"]
    ratios = [round(100 * (r["candidate_us"] / r["control_us"] - 1), 2) for r in rows]
    assert [r["change"] for r in rows] != ratios
    assert stats.paired_change([2.0, 1.0], [1.0, 2.0], seed=1, resamples=10, confidence=0.95).change == 0.25


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
    assert main(["validate-timings", *given, "--out", str(tmp_path / "o")]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"{path}: ") and told.err.count("\n") == 1 and told.out == ""
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
    with pytest.raises(InputError, match="time"):
        check(tmp_path)
