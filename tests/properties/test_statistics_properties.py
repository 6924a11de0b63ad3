# SPDX-License-Identifier: Apache-2.0
"""Estimates for any times: constants, what order cannot change, scale, and how often an interval holds the truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from intervals import LEAST, coverage

from routeblock.timing.estimate import bootstrap_medians, paired_change
from routeblock.timing.recount import recount

SETTINGS = {"seed": 20250609, "resamples": 400, "confidence": 0.95}
TIMES = st.floats(0.1, 1e6)
PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.lists(TIMES, min_size=1, max_size=40), st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]))
def test_a_constant_ratio_has_no_width(times: list[float], ratio: float) -> None:
    found = paired_change([ratio * t for t in times], times, **SETTINGS)
    assert (found.low, found.change, found.high) == (ratio - 1,) * 3


@settings(max_examples=60, deadline=None)
@given(PAIRS, st.randoms(use_true_random=False), st.sampled_from([0.125, 2.0, 1024.0]))
def test_order_and_unit_change_no_estimate(pairs: list[tuple[float, float]], random: object, unit: float) -> None:
    shuffled = sorted(pairs, key=lambda _: random.random())  # type: ignore[attr-defined]
    one, two = (paired_change(*zip(*p, strict=True), **SETTINGS) for p in (pairs, shuffled))
    assert (one.n, one.baseline, one.candidate, one.change) == (two.n, two.baseline, two.candidate, two.change)
    scaled = paired_change([unit * a for a, _ in pairs], [unit * b for _, b in pairs], **SETTINGS)
    assert (scaled.change, scaled.low, scaled.high) == (one.change, one.low, one.high)
    assert one.low <= one.high


@settings(max_examples=40, deadline=None)
@given(st.lists(TIMES, min_size=1, max_size=40))
def test_medians_of_resamples_stay_among_the_values(values: list[float]) -> None:
    found = bootstrap_medians(np.array(values), seed=1, resamples=300)
    assert min(values) <= found.min() and found.max() <= max(values)


@settings(max_examples=40, deadline=None)
@given(PAIRS, st.randoms(use_true_random=False))
def test_the_recount_does_not_depend_on_the_order_of_rows_and_equals_the_estimate(
    pairs: list[tuple[float, float]], random: object
) -> None:
    rows = [
        {"stage": "s", "series": name, "repetition": r, "accepted": True, "time_us": time}
        for r, both in enumerate(pairs)
        for name, time in zip(("new", "old"), both, strict=True)
    ]
    pair = {"stage": ("s",), "clock": "", "candidate": "new", "baseline": "old", "rule": "none", "threshold": None}
    pair |= {"columns": {}, "planned": len(pairs), "target": None, "estimate_from": 1, "verdict_from": 1}
    pair |= {"floor": None, "contest": None}
    shuffled = sorted(rows, key=lambda _: random.random())  # type: ignore[attr-defined]
    one, two = (recount(some, ("stage",), [pair], SETTINGS) for some in (rows, shuffled))
    assert one == two
    ours = paired_change(*zip(*pairs, strict=True), **SETTINGS)
    assert (one[0]["change"], one[0]["low"], one[0]["high"]) == (ours.change, ours.low, ours.high)


@pytest.mark.parametrize("repetitions", [12, 24])
def test_an_interval_holds_the_true_median_nearly_as_often_as_it_says(repetitions: int) -> None:
    found = coverage(repetitions, trials=600, seed=20251201)
    assert LEAST - 3 * found["standard_error"] <= found["coverage"] <= 0.99
