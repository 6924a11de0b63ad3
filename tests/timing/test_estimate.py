# SPDX-License-Identifier: Apache-2.0
"""The estimators on constructed ratios, and the verdicts that intervals give."""

from __future__ import annotations

import numpy as np
import pytest

from routeblock.timing.estimate import Change, bootstrap_medians, paired_change
from routeblock.timing.plan import Pair, Rule, Verdict
from routeblock.timing.statistics import judge

SETTINGS = {"seed": 20250609, "resamples": 2000, "confidence": 0.95}


def change_of(ratios: list[float]) -> Change:
    return paired_change(ratios, np.ones(len(ratios)), **SETTINGS)


@pytest.mark.parametrize("below", [4, 5])
def test_published_kind_of_interval_needs_four_or_five_low_ratios(below: int) -> None:
    """Constructed, not measured: +0.66% [-0.60, +0.79] is what a median of 12 does with some ratios near -0.6%."""
    upper = [1.0066, 1.0066, 1.0066, 1.0066, 1.0070, 1.0075, 1.0079, 1.0079]
    got = change_of([0.994] * below + upper[: 12 - below])
    assert round(100 * got.change, 2) == 0.66
    assert round(100 * got.low, 2) == -0.60
    assert 0.66 < round(100 * got.high, 2) <= 0.79


@pytest.mark.parametrize("below", [0, 1])
def test_fewer_low_ratios_do_not_give_that_interval(below: int) -> None:
    upper = [1.0066, 1.0066, 1.0066, 1.0066, 1.0070, 1.0075, 1.0079, 1.0079, 1.0066, 1.0066, 1.0066, 1.0066]
    assert change_of([0.994] * below + upper[: 12 - below]).low > 0


def test_change_is_the_median_of_ratios_not_the_ratio_of_medians() -> None:
    old = [100.0, 200.0, 300.0]
    new = [110.0, 190.0, 310.0]
    got = paired_change(new, old, **SETTINGS)
    assert got.change == np.median(np.array(new) / np.array(old)) - 1
    assert got.change != got.candidate / got.baseline - 1


def test_an_outlier_is_kept() -> None:
    assert change_of([1.0] * 6 + [50.0] * 6).high == 49.0


def test_the_draw_is_the_named_one() -> None:
    values = np.arange(12.0)
    draw = np.random.Generator(np.random.PCG64(7)).integers(0, 12, size=(50, 12))
    assert np.array_equal(bootstrap_medians(values, seed=7, resamples=50), np.median(values[draw], axis=1))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.03, -0.02, Verdict.FASTER),
        (-0.03, -0.01, Verdict.FASTER),
        (-0.03, -0.009, Verdict.UNDECIDED),
        (0.01, 0.02, Verdict.SLOWER),
        (-0.006, 0.0079, Verdict.UNDECIDED),
        (0.0059, 0.0076, Verdict.UNDECIDED),
    ],
)
def test_verdict_needs_the_whole_interval_beyond_the_minimum(low: float, high: float, expected: Verdict) -> None:
    pair = Pair({}, (), "", "a", "b", 12, rule=Rule.EFFECT, threshold=0.01)
    assert judge(pair, Change(12, 1.0, 1.0, (low + high) / 2, low, high)) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.5, 0.02, Verdict.NON_INFERIOR),
        (-0.5, 0.0201, Verdict.UNDECIDED),
        (0.02, 0.5, Verdict.UNDECIDED),
        (0.0201, 0.5, Verdict.INFERIOR),
    ],
)
def test_the_whole_interval_decides_against_a_margin(low: float, high: float, expected: Verdict) -> None:
    pair = Pair({}, (), "", "a", "b", 12, rule=Rule.MARGIN, threshold=0.02)
    assert judge(pair, Change(12, 1.0, 1.0, (low + high) / 2, low, high)) == expected


@pytest.mark.parametrize("bad", [[], [1.0, 0.0], [1.0, float("nan")], [1.0]])
def test_times_must_be_positive_and_paired(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="times"):
        paired_change(bad, [1.0, 1.0], **SETTINGS)
