# SPDX-License-Identifier: Apache-2.0
"""Tables say per lane what is modelled, computed or observed, and put measured beside published with the right word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from synthetic import Study, make_study

from routeblock.cli import main
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file
from routeblock.route_block.document_tables import Evidence, write
from routeblock.route_block.fixtures import published_geometry
from routeblock.route_block.scorer.audit import STATUS
from routeblock.route_block.tables import differences
from routeblock.route_block.targets import TABLES

PUBLISHED = Path(__file__).resolve().parents[2] / "fixtures" / "published" / "route_block.json"


@pytest.fixture(scope="module")
def scored(sound: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scored") / "score.json"
    sound.score(out)
    return out


def _rows(name: str, out: Path, *sources: Path) -> list[dict[str, Any]]:
    write(TABLES[name], sources, PUBLISHED, out)
    rows: list[dict[str, Any]] = pq.read_table(out / f"{name}.parquet").to_pylist()
    return rows


def test_equal_bits_share_a_letter(scored: Path, tmp_path: Path) -> None:
    rows = {(r["cell"], r["history"]): r for r in _rows("trajectories", tmp_path, scored)}
    assert len(rows) == 14
    letters = {arm: r["final"] for arm, r in rows.items()}
    assert letters["native", "H0"] == letters["replay", "H0"] == letters["cross", "H1"] == letters["swap_across", "H1"]
    assert letters["native", "H1"] == letters["swap_within", "H1"] == letters["cross", "H0"]
    assert len({letters[arm] for arm in (("native", "H0"), ("native", "H1"), ("canonical", "H0"))}) == 3
    assert rows["full_k", "H0"]["w13"] == rows["full_k", "H1"]["w13"]
    assert rows["full_k", "H0"]["w13_grid"] == 3
    assert {len(r["w13_sha256"]) for r in rows.values()} == {64}


def test_relations_say_on_what_they_rest(scored: Path, tmp_path: Path) -> None:
    rows = _rows("relations", tmp_path, scored)
    assert [r["number"] for r in rows] == list(range(1, 8))
    assert rows[1]["basis"] == "by construction" and rows[4]["basis"] == "computed"
    assert {r["arithmetic"] for r in rows} == {STATUS["twin-hopper"]}
    assert rows[0]["compared"] == "native/H0 != native/H1 on w13 activation w2 final"


def test_what_depends_on_the_checkpoint_is_not_called_reproduced(scored: Path, tmp_path: Path) -> None:
    rows = _rows("differences", tmp_path, scored)
    relations = {r["quantity"]: r["comparison"] for r in rows if r["quantity"].startswith("relation")}
    assert set(relations.values()) == {"holds on another fixture", "by construction"}
    assert [name for name, said in relations.items() if said == "by construction"] == ["relation 2", "relation 3"]
    assert {r["comparison"] for r in rows if "SHA-256" in r["quantity"]} == {"not comparable", "form not published"}
    assert [r["surface"] for r in rows if r["comparison"] == "inconsistent in source"] == ["activation"]
    assert "reproduced" not in {r["comparison"] for r in rows}
    elements = next(r for r in rows if r["quantity"] == "elements that differ" and r["surface"] == "w13")
    assert elements["published_number"] == 7.0 and elements["measured_number"] > 0


def test_rows_that_the_fixtures_author_placed_are_its_design_and_no_finding(scored: Path, tmp_path: Path) -> None:
    score = json.loads(scored.read_bytes())
    published = json.loads(PUBLISHED.read_bytes())
    rows_of_w13 = next(d["rows"] for d in published["native_difference"] if d["surface"] == "w13")
    natives = next(p for p in score["pairs"] if [p["first"], p["second"]] == [["native", "H0"], ["native", "H1"]])
    natives["found"]["w13"]["rows"] = rows_of_w13

    def comparison(chosen: str) -> str:
        score["exchange"]["chosen"] = chosen
        rows = differences(Evidence([score], published))
        return next(str(r["comparison"]) for r in rows if (r["quantity"], r["surface"]) == ("rows that differ", "w13"))

    assert comparison("by construction") == "by the fixture's design"
    assert comparison("by search") == "holds on another fixture"


def test_studies_count_relations_by_basis_and_say_what_was_verified(scored: Path, tmp_path: Path) -> None:
    (row,) = _rows("studies", tmp_path, scored)
    counts = [row[f"{basis}_hold"] for basis in ("computed", "observed", "by_construction")]
    assert counts == [5, 0, 2] and (row["evidence"], row["exploratory"]) == ("protocol", 0)
    assert (row["order"], row["identity"]) == ("not claimed", "before the first run, as its input")
    assert (row["plan"], row["plans_read_back"], row["runs"]) == ("returned by the twin's loops", 70, 70)


def test_exploratory_relations_hold_in_no_table(tmp_path: Path) -> None:
    study = make_study(tmp_path / "study", replicates=2)
    study.score(tmp_path / "score.json")
    (row,) = _rows("studies", tmp_path / "t", tmp_path / "score.json")
    assert row["exploratory"] == 7 and row["evidence"] == "exploratory (2 of 5)"
    assert not any(row[f"{basis}_hold"] for basis in ("computed", "observed", "by_construction"))
    rows = _rows("relations", tmp_path / "t", tmp_path / "score.json")
    assert {r["status"] for r in rows} == {"exploratory (2 of 5): holds"}
    said = {
        r["comparison"]
        for r in _rows("differences", tmp_path / "t", tmp_path / "score.json")
        if "relation" in r["quantity"]
    }
    assert said == {"exploratory"}


def test_geometry_is_reproduced_only_where_it_is_published(sound: Study, tmp_path: Path) -> None:
    (row,) = _rows("geometry", tmp_path, sound.fixture / "fixture.json")
    assert (row["published"], row["found"], row["status"]) == ("168", "36", "differs")


def test_every_published_fact_is_one_that_the_fixture_checks() -> None:
    told = json.loads(PUBLISHED.read_bytes())["geometry"]
    code = Path(published_geometry.__file__).read_text()
    assert [fact for fact in told if f'"{fact}"' not in code] == []


def test_the_same_documents_give_the_same_bytes(scored: Path, tmp_path: Path) -> None:
    for name in ("trajectories", "relations", "differences"):
        for out in ("a", "b"):
            write(TABLES[name], [scored, scored], PUBLISHED, tmp_path / out)
    digests = [{p.name: sha256_file(p) for p in (tmp_path / out).iterdir() if "manifest" not in p.name} for out in "ab"]
    assert digests[0] == digests[1] and len(digests[0]) == 9


def test_runs_that_are_not_sound_make_no_table(study: Study, tmp_path: Path) -> None:
    study.edit("cross/H0/rep1", lambda r: r.update(position=0))
    out = tmp_path / "score.json"
    study.score(out)
    with pytest.raises(InputError, match="not sound"):
        write(TABLES["relations"], [out], PUBLISHED, tmp_path)


def test_an_unknown_table_and_a_wrong_document_are_bad_input(scored: Path, tmp_path: Path) -> None:
    for name in ("nothing", "mutations"):
        arguments = [
            "study-a",
            "table",
            name,
            "--from",
            str(scored),
            "--published",
            str(PUBLISHED),
            "--out",
            str(tmp_path),
        ]
        assert main(arguments) == 2
    assert list(tmp_path.iterdir()) == []
