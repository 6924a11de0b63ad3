# SPDX-License-Identifier: Apache-2.0
"""Fixtures: exact job counts, one sentinel, ids below the pool bound, the same bytes from the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from routeblock.errors import InputError
from routeblock.grouped_schedule import fixture
from routeblock.grouped_schedule.protocol import Cell
from routeblock.grouped_schedule.schedules import Family


def make(family: Family, slots: int, pool: int, *, seed: int = 7, rows: int = 5, cols: int = 256) -> fixture.Fixture:
    weights = fixture.weights(seed, pool, rows, cols)
    return fixture.make(Cell(family, slots, pool, rows, cols), seed, sentinels=1, checked_rows=3, pool_weights=weights)


@pytest.mark.parametrize("pool", [8, 32, 256])
@pytest.mark.parametrize("slots", [16, 64, 256])
def test_one_sentinel_and_ids_below_the_bound(slots: int, pool: int) -> None:
    made = make(Family.INDEPENDENT, slots, pool)
    told = made.record()
    assert (made.ids == fixture.SENTINEL).sum() == told["sentinels"] == 1
    assert told["active_jobs"] == slots - 1
    assert made.ids.max() < pool
    assert told["distinct_experts"] == len(set(made.ids.tolist()) - {-1}) <= min(pool, slots - 1)


@pytest.mark.parametrize("pool", [8, 32])
def test_tokens_choose_distinct_experts(pool: int) -> None:
    made = make(Family.PAIRED, 16, pool)
    for token in made.ids.reshape(2, 8):
        active = token[token >= 0]
        assert len(set(active.tolist())) == len(active)
    if pool == 8:
        assert made.record()["groups_of_two"] == 7


def test_a_seed_gives_these_bytes() -> None:
    """Frozen: a change here would make recorded GPU outputs meaningless."""
    told = make(Family.INDEPENDENT, 16, 32, seed=20250607, rows=64, cols=512).record()
    assert told["ids"] == [31, -1, 17, 8, 3, 25, 5, 6, 5, 18, 24, 11, 19, 5, 8, 1]
    assert {k: v[:16] for k, v in told["sha256"].items()} == {
        "ids": "9341ac2fe37fb72a",
        "activations": "a0a77987189c714b",
        "weights": "61da04442bc58b17",
        "check_rows": "589aff469c9813cf",
    }


def test_another_seed_gives_other_data() -> None:
    one, two = (make(Family.INDEPENDENT, 64, 32, seed=s).record()["sha256"] for s in (1, 2))
    assert all(one[k] != two[k] for k in one)


def test_an_experts_weights_do_not_depend_on_the_pool() -> None:
    assert np.array_equal(fixture.weights(3, 2, 4, 512), fixture.weights(3, 5, 4, 512)[:2])


def test_checked_rows_are_distinct() -> None:
    made = make(Family.INDEPENDENT, 16, 8, rows=9)
    assert made.check_rows.shape == (16, 3)
    assert all(len(set(rows)) == 3 and min(rows) >= 0 and max(rows) < 9 for rows in made.check_rows.tolist())


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("jobs", "pool", "rows", "cols", "message"),
    [
        (ids(0, 8), 8, 4, 256, "expert id 8; ids lie below the pool bound 8"),
        (np.zeros(65_536, np.int32), 8, 4, 256, "65,536 job slots"),
        (ids(0), 8, 4, 300, "multiple of 256"),
        (ids(0), 0, 4, 256, "a pool of 0 experts"),
        (ids(0), 65_536, 4, 256, "a pool of 65,536 experts"),
        (ids(0), 8, 0, 256, "0 rows"),
        (ids(0), 8, 262_141, 256, "262,141 rows"),
        (np.zeros(3, np.int64), 8, 4, 256, "int64"),
    ],
)
def test_jobs_that_no_kernel_can_run_are_refused(
    jobs: np.ndarray, pool: int, rows: int, cols: int, message: str
) -> None:
    with pytest.raises(InputError, match=message) as e:
        fixture.check_jobs(jobs, pool, rows, cols)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("jobs", [ids(-1, -1), ids(-(2**31)), ids()])
def test_jobs_without_work_are_accepted(jobs: np.ndarray) -> None:
    fixture.check_jobs(jobs, 8, 4, 256)


@pytest.mark.parametrize(("slots", "pool"), [(15, 8), (18, 8)])
def test_two_tokens_need_an_even_number_of_slots_and_enough_experts(slots: int, pool: int) -> None:
    with pytest.raises(InputError, match="two tokens"):
        make(Family.PAIRED, slots, pool)
