# SPDX-License-Identifier: Apache-2.0
"""The committed record: whole, proved again, the goals at every bound point, and nothing of it can be edited."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small import COMMITTED

from routeblock.alignment_cost import tables, targets, verification
from routeblock.alignment_cost.protocol import Campaign, Role, load, points
from routeblock.alignment_cost.study import STUDY, pairs
from routeblock.alignment_cost.tables import Evidence
from routeblock.cli import main
from routeblock.cuda.align_kernels import compile_for
from routeblock.cuda.align_variants import Gpu
from routeblock.cuda.sanitizer import TOOLS
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file
from routeblock.timing.check import findings
from routeblock.timing.reasons import Reason
from routeblock.timing.record import Record
from routeblock.timing.statistics import Comparison, comparisons
from routeblock.timing.validation import unsealed
from routeblock.timing.verification import unlisted

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / targets.RECORDED
EARLIER = HERE.parent / "earlier"
PLAN = load(COMMITTED)
RUN = "run.json"


@pytest.fixture(scope="module")
def found() -> Record:
    return STUDY.read(HERE)


@pytest.fixture(scope="module")
def compared(found: Record) -> list[Comparison]:
    return compare(found)


def compare(found: Record) -> list[Comparison]:
    return comparisons(STUDY.table.rows(found.batches), STUDY.key, pairs(PLAN, found), PLAN.bootstrap)


def test_the_record_is_whole_and_recomputed(found: Record) -> None:
    assert unlisted(STUDY, HERE, HERE / "contents.json") == verification.recompute(found, PLAN) == []
    assert findings(STUDY, found, PLAN) == []
    assert len(found.run["checks"]) == 84 and not found.run["not_measured"]
    counted = sum(found.run["batches"].values())
    assert counted == len(found.batches) and {b.reason for b in found.batches} == {"", "late", "throttled"}


@pytest.mark.parametrize("folder", [HERE, EARLIER])
def test_every_committed_file_is_the_recorded_one(folder: Path) -> None:
    listed = json.loads((folder / "contents.json").read_text())
    files = {p.name: p for p in folder.iterdir() if p.name not in ("README.md", "contents.json")}
    assert files.keys() == set(STUDY.files)
    assert {name: sha256_file(p) for name, p in files.items()} == {name: listed[name]["sha256"] for name in files}


def test_the_kernels_are_those_of_this_source(found: Record) -> None:
    """The binary that ran on the GPU is what this source compiles to, byte for byte."""
    assert compile_for(Gpu((9, 0), verification.SHARED_BYTES["sm_90"])).sha256 == found.run["cubin_sha256"]


def test_the_goals_are_reached_at_every_bound_point(compared: list[Comparison]) -> None:
    held = [c for c in compared if c.target is not None]
    assert len(held) == 14 and all(c.reached for c in held)
    ours = [c for c in compared if c.series == "canonical" and c.verdict]
    assert len(ours) == 2 * 84 and {c.verdict for c in ours} == {"non-inferior"}


def test_the_stopped_recording_says_the_same_where_it_measured() -> None:
    earlier = STUDY.read(EARLIER)
    assert len(earlier.run["not_measured"]) == 56
    assert unlisted(STUDY, EARLIER, EARLIER / "contents.json") == verification.recompute(earlier, PLAN) == []
    left = findings(STUDY, earlier, PLAN)
    assert [f.where for f in left] == [p.label for p in points(PLAN, Campaign.OPERATOR) if p.role is Role.REPORTED]
    assert {f.reason for f in left} == {Reason.POINT_MISSING}
    told = compare(earlier)
    assert all(c.reached for c in told if c.target is not None)
    layer = [c for c in told if c.series == "canonical" and c.campaign == "layer"]
    assert {c.verdict for c in layer} == {"non-inferior"}


def test_a_row_holds_a_point_and_its_growth(found: Record, compared: list[Comparison]) -> None:
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


def test_the_checks_are_told(found: Record, compared: list[Comparison]) -> None:
    rows = {r["check"]: r for r in tables.checks(Evidence(compared, found))}
    assert (rows["random routings"]["cases"], rows["random routings"]["outcome"]) == (10_000, "equal")
    assert [rows[t]["outcome"] for t in TOOLS] == ["clean"] * 4
    assert rows["repeated call, M=16384"]["outcome"] == "0 different"
    assert rows["full_k"]["outcome"] == "not in the build"
    found.documents["exactness"]["differs"] = "random: x"
    try:
        assert tables.checks(Evidence(compared, found))[1]["outcome"] == "different"
    finally:
        found.documents["exactness"]["differs"] = ""


def test_the_rules_name_the_tables_and_files() -> None:
    assert [t.name for t in targets.tables()] == list(tables.TABLES) and STUDY.files == targets.FILES
    with pytest.raises(InputError, match="no table is called 'costs'"):
        tables.write("costs", ROOT, ROOT, ROOT, ROOT)


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE, tmp_path / "record"))


def edit(folder: Path, change: Any, *, list_too: bool) -> None:
    told = json.loads((folder / RUN).read_text())
    change(told)
    (folder / RUN).write_text(json.dumps(told))
    if list_too:
        listed = json.loads((folder / "contents.json").read_text())
        listed[RUN]["sha256"] = sha256_file(folder / RUN)
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
    command = ["alignment", "recorded", "--source", str(folder), "--protocol", str(COMMITTED), "--out", str(out)]
    assert main(command) == 1
    assert words in capsys.readouterr().out and not out.exists()


def test_a_record_without_its_contents_is_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "contents.json").unlink()
    with pytest.raises(InputError, match="no list of contents"):
        unlisted(STUDY, folder, folder / "contents.json")


def test_a_restored_record_is_sealed_for_the_validator(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert verification.write(out, HERE, COMMITTED) == []
    assert unsealed(STUDY, out) == []
    (out / "exactness.json").write_text("{}")
    assert [Path(f.where).name for f in unsealed(STUDY, out)] == ["exactness.json"]
