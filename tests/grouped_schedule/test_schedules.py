# SPDX-License-Identifier: Apache-2.0
"""Orders, walks and fusion: every row of every job once, the same bits from every schedule, sentinels left alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeblock.grouped_schedule import cpu, sanitizer_cases
from routeblock.grouped_schedule.measure import POISON
from routeblock.grouped_schedule.schedules import ARMS, BY_NAME, Arm, Family, Grouping, geometry, is_fused

LEGAL = [name for name in sanitizer_cases.CASES if name != "ids beyond the pool"]


def arms_of(family: Family) -> list[Arm]:
    return [arm for arm in ARMS if family is Family.PAIRED or not arm.fused]


@settings(deadline=None)  # the first example compiles
@given(st.lists(st.integers(-3, 9), max_size=80))
def test_rank_order_is_a_stable_sort_with_sentinels_last(values: list[int]) -> None:
    ids = np.array(values, np.int32)
    active = [(v, job) for job, v in enumerate(values) if v >= 0]
    want = [v << 16 | job for v, job in sorted(active)] + [cpu.IDLE] * (len(values) - len(active))
    for name in ("band32", "serial_band32"):
        assert cpu.make_order(BY_NAME[name], ids).tolist() == want


@pytest.mark.parametrize("tile_rows", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("rows", [1, 4, 31, 37, 512, 513])
@pytest.mark.parametrize("arm", [a for a in ARMS if a.band], ids=lambda a: a.name)
def test_a_walk_meets_every_row_once(arm: Arm, rows: int, tile_rows: int) -> None:
    g = geometry(arm, 1, rows, tile_rows)
    met = Counter(
        row
        for band in range(g.bands)
        for tile in range(g.tiles)
        for in_band in range(tile * tile_rows, (tile + 1) * tile_rows)
        if in_band < g.band_rows and (row := band * g.band_rows + in_band) < rows
    )
    assert met == Counter(range(rows))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("name", LEGAL)
def test_every_schedule_gives_the_definitions_bits(name: str, family: Family, threads: int) -> None:
    fixture = sanitizer_cases.make(name, family)
    want = sanitizer_cases.expected(fixture)
    for arm in arms_of(family):
        out = np.full(want.shape, POISON, np.uint32).view(np.float32)
        cpu.launch(arm, fixture, out, min(threads, cpu.numba.config.NUMBA_NUM_THREADS))
        assert np.array_equal(out.view(np.uint32), want.view(np.uint32)), arm.name


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=2, max_size=16).filter(lambda v: len(v) % 2 == 0))
def test_fusion_runs_every_job_once(values: list[int]) -> None:
    """Also where one token names an expert twice, which a router does not do."""
    ids = np.array(values, np.int32)
    for arm in ARMS:
        order = cpu.make_order(arm, ids)
        leaders = cpu._leaders(ids, order, arm.grouping is not Grouping.NONE, is_fused(arm, Family.PAIRED))
        run = [int(job) for pair in leaders for job in pair if job >= 0]
        assert sorted(run) == [job for job, v in enumerate(values) if v >= 0], arm.name
        assert all(values[a] == values[b] for a, b in leaders.tolist() if b >= 0)


def test_two_tokens_share_every_expert_that_both_chose() -> None:
    ids = np.array([5, 2, -1, 7, 2, 9, 5, 7], np.int32)
    for name, pairs in (("paired_incumbent", {(0, 6), (1, 4), (3, 7)}), ("band4", {(0, 6), (1, 4), (3, 7)})):
        arm = BY_NAME[name]
        leaders = cpu._leaders(ids, cpu.make_order(arm, ids), arm.grouping is not Grouping.NONE, True).tolist()
        assert {(a, b) for a, b in leaders if b >= 0} == pairs
        assert [a for a, b in leaders if b < 0] == [5]


def test_the_control_of_two_tokens_is_not_fused() -> None:
    assert [arm.name for arm in ARMS if not is_fused(arm, Family.PAIRED)] == ["job_major"]
    assert [arm.name for arm in ARMS if is_fused(arm, Family.INDEPENDENT)] == ["paired_incumbent"]


def test_arms_are_numbered_as_the_study_numbers_them() -> None:
    names = ["job_major", "expert_sorted", "band4", "band32", "band128", "band512", "paired_incumbent", "serial_band32"]
    assert [(arm.index, arm.name) for arm in ARMS] == list(enumerate(names))
