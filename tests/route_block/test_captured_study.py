# SPDX-License-Identifier: Apache-2.0
"""A study of captured plans when both captures gave one plan: what can be is run, and called uninformative."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import LAUNCH, SignatureLane, make_fixture, write_identity

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json
from routeblock.evidence.tensors import save_tensors
from routeblock.route_block import operating_point
from routeblock.route_block.facts import CELLS, HISTORIES, cells_of
from routeblock.route_block.fixtures.fixture import plan_tensors
from routeblock.route_block.operating_point import LaneFacts
from routeblock.route_block.prediction import predict
from routeblock.route_block.runs.run import run
from routeblock.route_block.scorer.inputs import read_study
from routeblock.route_block.scorer.relations import Status
from routeblock.route_block.scorer.score import judge


def test_captures_with_one_plan_give_a_sound_study_without_the_exchange_across(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operating_point, "PUBLISHED", LAUNCH)
    monkeypatch.setattr(predict, "lane_facts", lambda _: LaneFacts("test", "hopper", "observed"))
    fixture = make_fixture(tmp_path / "fixture")
    plan = fixture.plans["H0"]
    captured = dict.fromkeys(HISTORIES, plan)
    save_tensors(tmp_path / "plans.safetensors", plan_tensors(captured))
    document = predict.predict(fixture, "cuda", "published", "captured", captured)
    assert document["informative"] is False
    assert cells_of(document["exchange"]) == [cell for cell in CELLS if cell != "swap_across"]
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "prediction.json").write_bytes(canonical_json(document))

    write_identity(tmp_path / "identity.json", "cuda")

    def start(cell: str, history: str) -> None:
        run(
            lane_name="cuda",
            # A native alignment that gives H1 the captured plan too.
            lane=SignatureLane("observed", native=lambda request, own: plan),
            fixture_folder=tmp_path / "fixture",
            prediction_path=runs / "prediction.json",
            plans_path=tmp_path / "plans.safetensors",
            cell=cell,
            history=history,
            replicate=1,
            out=runs / cell / history / "rep1",
            identity_path=tmp_path / "identity.json",
        )

    for history in HISTORIES:
        for cell in cells_of(document["exchange"]):
            start(cell, history)
    with pytest.raises(InputError, match=r"swap_across: no exchange pair.*no across pair in the captured plans"):
        start("swap_across", "H0")
    study = read_study(
        tmp_path / "fixture", runs / "prediction.json", tmp_path / "identity.json", tmp_path / "plans.safetensors"
    )
    score = judge(study, runs, 1)
    assert score.document["sound"] and not score.findings
    relations = score.document["relations"]
    assert not any(relation["status"].endswith(Status.FAILS) for relation in relations)
    across = next(relation for relation in relations if "no across pair" in relation["note"])
    assert across["status"] == f"exploratory (1 of 5): {Status.NOT_INFORMATIVE}"
