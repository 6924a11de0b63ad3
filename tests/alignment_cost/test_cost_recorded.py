# SPDX-License-Identifier: Apache-2.0
"""The committed record: whole, proved again, the goals at every bound point, and nothing of it can be edited."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small import COMMITTED

from routeblock.alignment_cost import record, reprove, statistics, tables, targets, validate
from routeblock.alignment_cost.protocol import Campaign, Role, load, points
from routeblock.alignment_cost.reasons import Reason
from routeblock.alignment_cost.statistics import Comparison
from routeblock.alignment_cost.tables import Evidence
from routeblock.cli import main
from routeblock.cuda.align_kernels import compile_for
from routeblock.cuda.align_variants import Gpu
from routeblock.cuda.sanitizer import TOOLS
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / targets.RECORDED
EARLIER = HERE.parent / "earlier"
PLAN = load(COMMITTED)


@pytest.fixture(scope="module")
def found() -> record.Recorded:
    return record.read(HERE)


@pytest.fixture(scope="module")
def compared(found: record.Recorded) -> list[Comparison]:
    return statistics.comparisons(found.batches, PLAN)


def test_the_record_is_whole_and_recomputed(found: record.Recorded) -> None:
    assert reprove.unsealed(HERE) == record.problems(found, PLAN) == reprove.disagreements(found, PLAN) == []
    assert reprove.deviations(found, COMMITTED) == []
    assert len(found.run["checks"]) == 84 and not found.run["not_measured"]
    counted = sum(found.run["batches"].values())
    assert counted == len(found.batches) and {b.reason for b in found.batches} == {"", "late", "throttled"}


@pytest.mark.parametrize("folder", [HERE, EARLIER])
def test_every_committed_file_is_the_recorded_one(folder: Path) -> None:
    listed = json.loads((folder / "contents.json").read_text())
    files = {p.name: p for p in folder.iterdir() if p.name not in ("README.md", "contents.json")}
    assert files.keys() == set(record.FILES)
    assert {name: sha256_file(p) for name, p in files.items()} == {name: listed[name]["sha256"] for name in files}


def test_the_kernels_are_those_of_this_source(found: record.Recorded) -> None:
    """The binary that ran on the GPU is what this source compiles to, byte for byte."""
    assert compile_for(Gpu((9, 0), reprove.SHARED_BYTES["sm_90"])).sha256 == found.run["cubin_sha256"]


def test_the_goals_are_reached_at_every_bound_point(compared: list[Comparison]) -> None:
    held = [c for c in compared if c.target is not None]
    assert len(held) == 14 and all(c.reached for c in held)
    ours = [c for c in compared if c.series == "canonical" and c.verdict]
    assert len(ours) == 2 * 84 and {c.verdict for c in ours} == {"non-inferior"}


def test_the_stopped_recording_says_the_same_where_it_measured() -> None:
    earlier = record.read(EARLIER)
    assert len(earlier.run["not_measured"]) == 56
    assert record.problems(earlier, PLAN) == [f"{point}: not measured" for point in earlier.run["not_measured"]]
    assert reprove.unsealed(EARLIER) == reprove.disagreements(earlier, PLAN) == []
    left = reprove.deviations(earlier, COMMITTED)
    assert [f.where for f in left] == [p.label for p in points(PLAN, Campaign.OPERATOR) if p.role is Role.REPORTED]
    assert {f.reason for f in left} == {Reason.POINT_MISSING}
    told = statistics.comparisons(earlier.batches, PLAN)
    assert all(c.reached for c in told if c.target is not None)
    layer = [c for c in told if c.series == "canonical" and c.campaign == "layer"]
    assert {c.verdict for c in layer} == {"non-inferior"}


def test_a_row_holds_a_point_and_its_growth(found: record.Recorded, compared: list[Comparison]) -> None:
    rows = tables.cost(Evidence(compared, found))
    assert len(rows) == 3 * 70 + 2 * 14
    columns = {c.name for c in tables.TABLES["alignment_cost"].columns}
    assert all(row.keys() == columns for row in rows)
    one, most = (
        next(r for r in rows if (r["campaign"], r["mode"], r["experts"], r["top_k"], r["tokens"]) == (*key, m))
        for key in [("operator", "graph", 128, 8)]
        for m in (1, 16384)
    )
    assert one["canonical_growth"] == one["native_growth"] == 1
    assert most["canonical_growth"] == most["canonical_us"] / one["canonical_us"]
    assert most["native_growth"] == most["native_us"] / one["native_us"]
    assert (one["margin_percent"], one["target"], most["target"]) == (2, 0.7, 1.0)


def test_the_checks_are_told(found: record.Recorded, compared: list[Comparison]) -> None:
    rows = {r["check"]: r for r in tables.checks(Evidence(compared, found))}
    assert (rows["random routings"]["cases"], rows["random routings"]["outcome"]) == (10_000, "equal")
    assert [rows[t]["outcome"] for t in TOOLS] == ["clean"] * 4
    assert rows["repeated call, M=16384"]["outcome"] == "0 different"
    assert rows["full_k"]["outcome"] == "not in the build"
    found.exactness["differs"] = "random: x"
    try:
        assert tables.checks(Evidence(compared, found))[1]["outcome"] == "different"
    finally:
        found.exactness["differs"] = ""


def test_a_table_that_is_not_declared_is_refused() -> None:
    with pytest.raises(InputError, match="no table is called 'costs'"):
        tables.write("costs", ROOT, ROOT, ROOT, ROOT, ROOT)


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE, tmp_path / "record"))


def edit(folder: Path, change: Any, *, list_too: bool) -> None:
    told = json.loads((folder / record.RUN).read_text())
    change(told)
    (folder / record.RUN).write_text(json.dumps(told))
    if list_too:
        listed = json.loads((folder / "contents.json").read_text())
        listed[record.RUN]["sha256"] = sha256_file(folder / record.RUN)
        (folder / "contents.json").write_text(json.dumps(listed))


def other_plan(run: dict[str, Any]) -> None:
    run["checks"][3]["canonical_sha256"][1] = "0" * 64


def other_variant(run: dict[str, Any]) -> None:
    run["checks"][3]["variant"] = "tiles_512x4"


def other_point(run: dict[str, Any]) -> None:
    run["checks"][3]["tokens"] = 9


@pytest.mark.parametrize(
    ("change", "list_too", "words"),
    [
        (other_plan, False, "run.json: seal: not the bytes that were recorded"),
        (other_plan, True, "operator E=128 k=8 M=8: plans: the plans are not those of the protocol's seed"),
        (
            other_variant,
            True,
            "operator E=128 k=8 M=8: variant: variant tiles_512x4, where the table has staged_512x1b",
        ),
        (other_point, True, "check of operator E=128 k=8 M=9: point_unknown: no point of the protocol"),
        (other_point, True, "operator E=128 k=8 M=8: not_checked: timed, not checked"),
    ],
)
def test_an_edited_record_is_not_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, list_too: bool, words: str
) -> None:
    folder, out = copied(tmp_path), tmp_path / "out"
    edit(folder, change, list_too=list_too)
    command = ["recorded-alignment", "--source", str(folder), "--protocol", str(COMMITTED), "--out", str(out)]
    assert main(command) == 1
    assert words in capsys.readouterr().out and not out.exists()


def test_a_record_without_its_contents_is_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "contents.json").unlink()
    with pytest.raises(InputError, match="no list of contents"):
        reprove.unsealed(folder)


def test_a_restored_record_is_sealed_for_the_validator(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert reprove.write(out, HERE, COMMITTED) == []
    assert validate.unsealed(out) == []
    (out / record.EXACT).write_text("{}")
    assert [Path(f.where).name for f in validate.unsealed(out)] == [record.EXACT]
