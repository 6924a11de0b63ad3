# SPDX-License-Identifier: Apache-2.0
"""The twin against recorded surfaces: each differing element is counted, and nothing is compared that was exchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import SignatureLane, Study

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, sha256_array
from routeblock.evidence.record import RECORD, TENSORS
from routeblock.evidence.tensors import load_tensors
from routeblock.route_block.facts import SURFACES
from routeblock.route_block.gpu import agreement as agree
from routeblock.route_block.runs.lane import Request

RUN = "replay/H1/rep2"


@pytest.fixture(autouse=True)
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The study's arithmetic in the twin's place; the plans that it was asked for."""
    asked: list[str] = []

    def compute(fixture: Any, weights: Any, plan: Any, launches: Any, architecture: str) -> Any:
        asked.append(plan.fingerprint())
        return SignatureLane().run(fixture, Request(plan, launches, "H0", 1)).surfaces

    monkeypatch.setattr(agree, "unpack", lambda fixture, gemm: None)
    monkeypatch.setattr(agree, "compute", compute)
    return asked


def compared(study: Study, out: Path) -> tuple[list[str], dict[str, Any]]:
    differing = agree.agree(study.fixture, study.prediction, study.runs, "cuda", out)
    return differing, json.loads(out.read_bytes())


def change_surface(study: Study, surface: str, bits: dict[int, int]) -> None:
    """Exclusive-or these elements of a surface, and let record and manifest vouch for it."""

    def change(tensors: dict[str, Any]) -> None:
        words = tensors[surface].reshape(-1).view(np.uint16)
        for place, bit in bits.items():
            words[place] ^= bit

    study.edit_tensors(RUN, change)
    digest = sha256_array(load_tensors(study.runs / RUN / TENSORS)[surface])
    study.edit(RUN, lambda record: record["surfaces"][surface].update(sha256=digest))


def test_a_sound_study_agrees_in_every_element(study: Study, tmp_path: Path, arithmetic: list[str]) -> None:
    differing, document = compared(study, tmp_path / "agreement.json")
    assert differing == []
    assert len(document["runs"]) == 70
    assert [row["position"] for row in document["runs"]] == sorted(row["position"] for row in document["runs"])
    assert all(s["differing"] == 0 and s["elements"] > 0 for row in document["runs"] for s in row["surfaces"].values())
    # H0's and H1's plans, two exchanges each, the canonical one, and both once more on the single-slice grid.
    assert document["computations"] == len(arithmetic) == 9


@pytest.mark.parametrize("surface", SURFACES)
def test_changed_elements_of_one_run_are_counted(study: Study, tmp_path: Path, surface: str) -> None:
    change_surface(study, surface, {3: 0x0001, 40: 0x8000})
    differing, document = compared(study, tmp_path / "agreement.json")
    assert differing == [f"{RUN} {surface}"]
    counts = {
        (row["cell"], row["history"], row["replicate"], name): found["differing"]
        for row in document["runs"]
        for name, found in row["surfaces"].items()
    }
    assert counts.pop(("replay", "H1", 2, surface)) == 2
    assert not any(counts.values())


def test_signs_of_zero_and_payloads_of_nan_are_differences() -> None:
    ours = np.array([0x0000, 0x7E00, 0x7E00, 0x3C00], np.uint16).view(np.float16)
    theirs = np.array([0x8000, 0x7E01, 0x7E00, 0x3C00], np.uint16).view(np.float16)
    assert agree._differing(ours, theirs) == 2
    assert agree._differing(ours, theirs[:3]) == ours.size


def test_a_surface_that_is_not_the_recorded_one_is_refused(study: Study, tmp_path: Path) -> None:
    study.edit_tensors(RUN, lambda tensors: tensors["w2"].reshape(-1).view(np.uint16).__setitem__(0, 1))
    with pytest.raises(InputError, match="w2 is not what the record says"):
        compared(study, tmp_path / "agreement.json")
    assert not (tmp_path / "agreement.json").exists()


def test_runs_of_another_fixture_are_refused(study: Study, tmp_path: Path) -> None:
    study.edit(RUN, lambda record: record.update(fixture="0" * 64))
    with pytest.raises(InputError, match=r"recorded on fixture 0{16}"):
        compared(study, tmp_path / "agreement.json")


def test_tensor_cores_without_a_twin_are_refused(study: Study, tmp_path: Path) -> None:
    prediction = json.loads(study.prediction.read_bytes())
    study.prediction.write_bytes(canonical_json({**prediction, "architecture": "no twin"}))
    with pytest.raises(InputError, match="tensor cores 'no twin'"):
        compared(study, tmp_path / "agreement.json")


def test_no_runs_are_no_agreement(study: Study, tmp_path: Path) -> None:
    for path in study.runs.rglob(RECORD):
        path.unlink()
    with pytest.raises(InputError, match="no runs"):
        compared(study, tmp_path / "agreement.json")
