# SPDX-License-Identifier: Apache-2.0
"""What the scorer says where a relation cannot say anything, and of a GPU whose own alignment is not repeatable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from synthetic import SignatureLane, following, make_study

from routeblock.moe.routing import AlignedPlan, exchange
from routeblock.route_block.fixtures.fixture import LayerFixture
from routeblock.route_block.runs.lane import Outcome, Request
from routeblock.route_block.scorer import score
from routeblock.route_block.scorer.relations import compare


def _statuses(document: dict[str, Any]) -> dict[int, str]:
    return {r["number"]: r["status"] for r in document["relations"]}


def _gpu(tmp_path: Path, native: Any) -> Any:
    lane = SignatureLane("observed", native)
    return make_study(tmp_path / "study", lane_name="cuda", lane=lane).judge()


def test_on_a_gpu_that_repeats_the_stored_plans_relations_are_observed(tmp_path: Path) -> None:
    verdict = _gpu(tmp_path, None)
    assert verdict.findings == []
    assert set(_statuses(verdict.document).values()) == {"holds"}
    assert {r["basis"] for r in verdict.document["relations"]} == {"observed"}
    assert all(p["right"] for p in verdict.document["pairs"])


def _unsteady(request: Request, plan: AlignedPlan) -> AlignedPlan:
    block = plan.members(0), plan.members(1)
    return exchange(plan, block[0][0], block[1][0]) if request.replicate == 2 else plan


def test_a_native_that_varies_on_a_gpu_is_reported_and_no_error(tmp_path: Path) -> None:
    verdict = _gpu(tmp_path, _unsteady)
    assert verdict.findings == []
    native = next(a for a in verdict.document["arms"] if (a["cell"], a["history"]) == ("native", "H0"))
    assert not native["reproducible"] and [o["replicates"] for o in native["outcomes"]] == [[1, 3, 4, 5], [2]]
    relations = verdict.document["relations"]
    assert {r["reference"] for r in relations} == {"replay"}
    assert _statuses(verdict.document) == {n: "holds" if n != 2 else "not informative" for n in range(1, 8)}
    assert "not reproducible on this machine" in relations[0]["note"]
    pairs = verdict.document["pairs"]
    assert all((p["right"] is None) == ("native" in (p["first"][0], p["second"][0])) for p in pairs)


def _elsewhere(request: Request, plan: AlignedPlan) -> AlignedPlan:
    block = plan.members(0), plan.members(1)
    return exchange(plan, block[0][0], block[1][0])


def test_a_native_that_repeats_another_plan_leaves_the_injected_cells_judged(tmp_path: Path) -> None:
    verdict = _gpu(tmp_path, _elsewhere)
    assert verdict.findings == []
    assert _statuses(verdict.document)[2] == "not informative"
    assert "other plans" in verdict.document["relations"][0]["note"]


def _illegal(request: Request, plan: AlignedPlan) -> AlignedPlan:
    ids = plan.sorted_token_ids.copy()
    ids[0] = ids[1]
    return AlignedPlan(ids, plan.expert_ids, plan.num_tokens_post_padded, plan.block_size, plan.num_routes)


def test_a_native_plan_on_a_gpu_has_to_be_legal(tmp_path: Path) -> None:
    reasons = {(f.run.split("/")[0], str(f.reason)) for f in _gpu(tmp_path, _illegal).findings}
    assert reasons == {("native", "illegal_plan")}


def test_without_exchange_pairs_the_exchange_relations_say_nothing(tmp_path: Path) -> None:
    study = make_study(tmp_path / "study", pairs=False)
    assert not (study.runs / "swap_within").exists()
    verdict = study.judge()
    assert verdict.findings == []
    assert [n for n, s in _statuses(verdict.document).items() if s == "not informative"] == [4, 5]
    assert verdict.document["relations"][3]["note"] == "no expert has two blocks"


def test_with_one_plan_for_both_histories_nothing_that_needs_two_is_said_to_hold(tmp_path: Path) -> None:
    verdict = make_study(tmp_path / "study", one_plan=True).judge()
    assert verdict.findings == []
    assert [n for n, s in _statuses(verdict.document).items() if s == "not informative"] == [1, 3, 5, 6]


def test_a_difference_that_the_prediction_excludes_is_not_claimed(tmp_path: Path) -> None:
    verdict = make_study(tmp_path / "study", pairs=False, one_class=True).judge()
    assert verdict.findings == []
    assert [n for n, s in _statuses(verdict.document).items() if s == "not informative"] == [1, 3, 4, 5, 6]


class _ZeroLane(SignatureLane):
    """A lane on which W2 hides every difference, as weights of zero would."""

    def run(self, fixture: LayerFixture, request: Request) -> Outcome:
        found = super().run(fixture, request)
        zero = np.zeros_like(found.surfaces["w2"])
        return replace(found, surfaces=following(found.surfaces["w13"], zero))


def test_a_difference_that_does_not_show_is_a_result_and_a_fault_of_the_published_geometry_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study(tmp_path / "study", lane=_ZeroLane())
    verdict = study.judge()
    assert [n for n, s in _statuses(verdict.document).items() if s == "fails"] == [1, 7]
    assert verdict.findings == []
    monkeypatch.setattr(score, "OWN_GEOMETRY", "small")
    assert study.reasons() == [(f"relation {n}", "relation_failed") for n in (1, 7)]


def test_comparison_is_of_bits() -> None:
    zero, minus = np.zeros((2, 3), np.float16), np.zeros((2, 3), np.float16)
    minus[1, 2] = -0.0
    assert compare(zero, minus) == {"elements": 1, "rows": [1], "max_abs_difference": 0.0}
    a = np.array([[1.0, 2.0]], ml_dtypes.bfloat16)
    b = np.array([[1.0078125, 2.0]], ml_dtypes.bfloat16)
    assert compare(a, b) == {"elements": 1, "rows": [0], "max_abs_difference": 0.0078125}
