# SPDX-License-Identifier: Apache-2.0
"""What a run reports as used comes from the loops or the device, and a lane that used something else is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from synthetic import HIDDEN, INTERMEDIATE, LAUNCH, SignatureLane, Study, make_study

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_json
from routeblock.evidence.record import BY_LOOPS, Record
from routeblock.moe.partition import partition
from routeblock.moe.routing import align, exchange
from routeblock.route_block.fixtures.fixture import LayerFixture, load_fixture
from routeblock.route_block.runs import twin as twin_lane
from routeblock.route_block.runs.lane import Lane, Outcome, Request
from routeblock.route_block.runs.run import run
from routeblock.route_block.runs.twin import TwinLane
from routeblock.twin import weights as twin_weights
from routeblock.twin.gemm import Visits, moe_gemm

GROUP = 32


def _weights(fixture: LayerFixture, gemm: str) -> tuple[NDArray[Any], None, NDArray[Any]]:
    """Drawn weights in the place of the fixture's, which has none."""
    rng = np.random.default_rng(3)
    n, k = (2 * INTERMEDIATE, HIDDEN) if gemm == "w13" else (HIDDEN, INTERMEDIATE)
    experts = len(fixture.experts)
    scales = (rng.random((experts, k // GROUP, n)) * 0.01).astype(np.float16)
    return rng.integers(0, 16, (experts, k, n), np.uint8), None, scales


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A fixture with its prediction and no runs."""
    return make_study(tmp_path_factory.mktemp("predicted") / "study", replicates=0)


@pytest.fixture
def run_twin(predicted: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Record]:
    monkeypatch.setattr(twin_weights, "unpack", _weights)

    def start(lane: Lane | None = None, cell: str = "replay") -> Record:
        return run(
            lane_name="twin-hopper",
            lane=lane or TwinLane("twin-hopper"),
            fixture_folder=predicted.fixture,
            prediction_path=predicted.prediction,
            cell=cell,
            history="H0",
            replicate=1,
            out=tmp_path / "run",
        )

    return start


@pytest.mark.parametrize("grid", [1, 3, 4, 5, 7, 12, 82])
@pytest.mark.parametrize(("thread_k", "thread_n"), [(64, 128), (128, 64)])
def test_the_loops_report_every_slice_that_they_computed(
    predicted: Study, grid: int, thread_k: int, thread_n: int
) -> None:
    fixture = load_fixture(predicted.fixture)
    q, zeros, scales = _weights(fixture, "w13")
    plan, visits = fixture.compact(fixture.plans["H1"]), Visits()
    moe_gemm(
        fixture.hidden, q, zeros, scales, plan, top_k=2, architecture="hopper", thread_k=thread_k, thread_n=thread_n,
        grid=grid, group_size=GROUP, visits=visits,
    )  # fmt: skip
    cut = partition(plan.num_blocks, 2 * INTERMEDIATE, HIDDEN, thread_n, thread_k, grid, GROUP)
    assert visits.slices() == [cut.slices(*divmod(tile, cut.n_tiles)) for tile in range(cut.tiles)]
    seen = fixture.expand(visits.plan(plan.num_routes))
    assert np.array_equal(seen.sorted_token_ids, fixture.plans["H1"].sorted_token_ids)
    assert np.array_equal(seen.expert_ids, fixture.plans["H1"].expert_ids)


def test_a_block_whose_expert_is_elsewhere_is_not_reported_as_computed(predicted: Study) -> None:
    fixture = load_fixture(predicted.fixture)
    q, zeros, scales = _weights(fixture, "w13")
    rows = fixture.expert_rows.copy()
    rows[fixture.experts[-1]] = -1
    plan = align(fixture.topk_ids, 8, 8, expert_map=rows)
    visits = Visits()
    moe_gemm(
        fixture.hidden, q, zeros, scales, plan, top_k=2, architecture="hopper", thread_k=64, thread_n=128, grid=4,
        group_size=GROUP, visits=visits,
    )  # fmt: skip
    computed = {int(route) for route in visits.rows[visits.rows >= 0]}
    assert computed == {r for r, e in enumerate(fixture.topk_ids.reshape(-1)) if e != fixture.experts[-1]}


def test_a_twins_record_holds_what_its_loops_went_through(run_twin: Callable[..., Record]) -> None:
    record = run_twin()
    assert record.consumption is not None and record.consumption.source == BY_LOOPS
    assert record.consumption.sorted_token_ids == record.treatment.asked.sorted_token_ids
    cut = partition(6, 2 * INTERMEDIATE, HIDDEN, LAUNCH.thread_n, LAUNCH.thread_k, LAUNCH.grid, GROUP)
    slices = [cut.slices(*divmod(tile, cut.n_tiles)) for tile in range(cut.tiles)]
    assert record.consumption.slices is not None and record.consumption.slices["w13"] == sha256_json(slices)


def test_a_twin_made_to_run_another_plan_than_asked_is_refused(
    run_twin: Callable[..., Record], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = twin_lane.compute

    def other_plan(fixture: LayerFixture, weights: Any, plan: Any, *rest: Any) -> Any:
        return real(fixture, weights, fixture.plans["H1"], *rest)

    monkeypatch.setattr(twin_lane, "compute", other_plan)
    with pytest.raises(InputError, match=r"the lane used plan .* was asked for"):
        run_twin()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("cell", ["replay", "full_k"])
def test_a_twin_made_to_run_another_grid_than_asked_is_refused(
    run_twin: Callable[..., Record], monkeypatch: pytest.MonkeyPatch, cell: str, tmp_path: Path
) -> None:
    real = twin_lane.compute

    def other_grid(fixture: LayerFixture, weights: Any, plan: Any, launches: Any, *rest: Any) -> Any:
        other = {gemm: launch._replace(grid=7 - launch.grid) for gemm, launch in launches.items()}
        return real(fixture, weights, plan, other, *rest)

    monkeypatch.setattr(twin_lane, "compute", other_grid)
    with pytest.raises(InputError, match=r"w13: the loops cut tile .*a grid of . blocks was asked for"):
        run_twin(cell=cell)
    assert not (tmp_path / "run").exists()


class _OtherPlan(SignatureLane):
    """A lane whose device holds, after the run, a plan with two routes of one block exchanged."""

    def run(self, fixture: LayerFixture, request: Request) -> Outcome:
        found = super().run(fixture, request)
        first, second = found.plan.members(0)[:2]
        return replace(found, plan=exchange(found.plan, first, second))


def test_a_plan_read_back_that_is_not_the_injected_one_byte_for_byte_is_refused(
    run_twin: Callable[..., Record],
) -> None:
    with pytest.raises(InputError, match="the lane used plan"):
        run_twin(_OtherPlan())
    assert run_twin(_OtherPlan(), cell="native").plan.fingerprint  # asked for nothing: what was there is recorded
