# SPDX-License-Identifier: Apache-2.0
"""Every mutation is refused for its declared reasons on every backend, the unchanged copy accepted, originals stay."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic import SignatureLane, Study, make_study

from routeblock.cli import main
from routeblock.evidence.digest import sha256_file
from routeblock.route_block.scorer.mutations import MUTATE

DECLARED = Path(__file__).resolve().parents[2] / "fixtures" / "mutations.json"


def _run(study: Study, out: Path, *more: str) -> int:
    arguments = ["study-a", "mutate", *study.options]
    rest = ["--replicates", study.replicates, "--declared", DECLARED, "--out", out, *more]
    return main([str(a) for a in (*arguments, *rest)])


def _digests(folder: Path) -> dict[str, str]:
    return {str(p): sha256_file(p) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A study of a GPU's lane."""
    root = tmp_path_factory.mktemp("observed") / "study"
    return make_study(root, lane_name="cuda", lane=SignatureLane("observed"))


@pytest.mark.parametrize(
    ("backend", "impossible"),
    [("sound", ["read_back_claimed", "order", "gpu_of_its_own"]), ("observed", ["read_back_claimed"])],
)
def test_every_mutation_is_refused_for_its_declared_reason_and_originals_stay(
    request: pytest.FixtureRequest, tmp_path: Path, backend: str, impossible: list[str]
) -> None:
    study = request.getfixturevalue(backend).copy(tmp_path / "study")
    before = _digests(study.runs)
    out = study.runs / "mutations.json"
    assert _run(study, out) == 0
    entries = {e["name"]: e for e in json.loads(out.read_bytes())["mutations"]}
    assert list(entries) == list(MUTATE)
    # An order is claimed on a GPU alone; runs made here hold a read-back.
    assert [n for n, e in entries.items() if e["as_declared"] is None] == impossible
    assert [n for n, e in entries.items() if e["as_declared"] is False] == []
    assert [n for n, e in entries.items() if not e["found"]] == sorted(
        [*impossible, "unchanged"], key=list(MUTATE).index
    )
    for name in ("source", "source_unsealed", "binary", "binary_unsealed", "binary_of_all"):
        assert "identity_differs" in entries[name]["found"]
    after = _digests(study.runs)
    new = {str(out), str(out.with_suffix(".manifest.json"))}
    assert {p: d for p, d in after.items() if p not in new} == before


@pytest.mark.parametrize("replicates", [1, 3])
def test_of_fewer_replicates_the_mutations_of_those_that_there_are_are_tried(tmp_path: Path, replicates: int) -> None:
    study = make_study(tmp_path / "study", replicates=replicates)
    assert _run(study, tmp_path / "mutations.json") == 0
    entries = json.loads((tmp_path / "mutations.json").read_bytes())["mutations"]
    beyond = [
        e["name"]
        for e in entries
        if e["runs"] != "all" and max(int(r.rpartition("rep")[2]) for r in e["runs"]) > replicates
    ]
    assert beyond and [e["name"] for e in entries if "replicates has no run" in (e["note"] or "")] == beyond
    assert all(
        e["as_declared"] for e in entries if e["name"] not in [*beyond, "order", "gpu_of_its_own", "read_back_claimed"]
    )


def test_kept_copies_are_whole_and_a_link_to_nothing(study: Study, tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    assert _run(study, tmp_path / "m.json", "--keep", str(keep)) == 0
    assert sorted(p.name for p in keep.iterdir()) == sorted(MUTATE)
    assert all(p.stat().st_nlink == 1 for p in keep.rglob("*.safetensors"))
    assert _run(study, tmp_path / "m.json", "--keep", str(keep)) == 2


def test_a_scorer_that_accepts_a_mutation_is_found_out(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("routeblock.route_block.scorer.audit._identity", lambda study, record: iter(()))
    assert _run(study, tmp_path / "m.json") == 1
    expected = "full_k/H1/rep1: mutation source: nothing found, declared identity_differs\n"
    assert capsys.readouterr().out == expected


def test_runs_that_were_not_sound_are_no_basis(study: Study, tmp_path: Path) -> None:
    study.edit("cross/H0/rep1", lambda r: r.update(position=0))
    assert _run(study, tmp_path / "m.json") == 1


def test_a_declaration_that_leaves_one_out_is_bad_input(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = json.loads(DECLARED.read_bytes())
    declared["mutations"].pop()
    path = tmp_path / "declared.json"
    path.write_text(json.dumps(declared))
    monkeypatch.setattr("test_mutate.DECLARED", path)
    assert _run(study, tmp_path / "m.json") == 2
    assert "one entry for each of route" in capsys.readouterr().err


def test_a_missing_run_is_bad_input_and_leaves_nothing(study: Study, tmp_path: Path) -> None:
    (study.runs / "cross/H0/rep1/record.json").unlink()
    out = tmp_path / "results"
    assert _run(study, out / "m.json") == 2
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["order"].update(untried=[]), "mutation order: nothing found, .*not tried, on a twin no order"),
        (lambda m: m["order"].update(untried=["cuda"]), "mutation order: nothing found, .*not tried, on a twin"),
        (
            lambda m: m["route"].update(runs=["native/H0/rep9"]),
            "mutation route: .*this study has no run native/H0/rep9",
        ),
        (
            lambda m: m["replicate_dropped"].update(runs=["swap_within/H1/rep9"]),
            "mutation replicate_dropped: .*this study has no run swap_within/H1/rep9",
        ),
    ],
)
def test_a_mutation_that_was_not_tried_and_not_declared_to_be_impossible_there_fails(
    study: Study,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], object],
    said: str,
) -> None:
    declared = json.loads(DECLARED.read_bytes())
    change({m["name"]: m for m in declared["mutations"]})
    path = tmp_path / "declared.json"
    path.write_text(json.dumps(declared))
    monkeypatch.setattr("test_mutate.DECLARED", path)
    assert _run(study, tmp_path / "m.json") == 1
    assert re.search(said, capsys.readouterr().out)
