# SPDX-License-Identifier: Apache-2.0
"""Does history shift what native alignment gives? A permutation test whose unit is the process.

A process under H0 and its neighbour under H1 make a pair. If history did nothing, the two could have carried each
other's label: so labels are exchanged inside pairs at random, and the statistic is computed anew each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.route_block.native.protocol import HistoryTest

TIE = 1e-12  # statistics are sums of fractions of calls: equal ones may differ in the last bits


@dataclass(frozen=True)
class Shift:
    """What the test gives for one kind of outcome."""

    outcome: str
    statistic: float
    null_median: float
    null_95: float
    p: float


def total_variation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Half the summed difference of two distributions: 0 if they are equal, 1 if they share no outcome."""
    return float(np.abs(first - second).sum() / 2)


def distributions(processes: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """[processes, outcomes]: the share of each outcome among the calls of each process."""
    numbers: dict[str, int] = {}
    for calls in processes:
        for outcome in calls:
            numbers.setdefault(outcome, len(numbers))
    found = np.zeros((len(processes), len(numbers)))
    for i, calls in enumerate(processes):
        for outcome, count in Counter(calls).items():
            found[i, numbers[outcome]] = count / len(calls)
    return found


def shift(outcome: str, pairs: Sequence[tuple[Sequence[str], Sequence[str]]], plan: HistoryTest) -> Shift:
    """The test for one kind of outcome; each pair holds the outcomes of the calls under H0 and under H1."""
    flat = distributions([calls for pair in pairs for calls in pair])
    gaps = flat[0::2] - flat[1::2]  # H0 minus H1, a row a pair
    observed = float(np.abs(gaps.mean(0)).sum() / 2)
    signs = np.random.default_rng(plan.seed).choice((-1.0, 1.0), (plan.permutations, len(gaps)))
    null = np.abs(signs @ gaps / len(gaps)).sum(1) / 2
    p = (1 + int((null >= observed - TIE).sum())) / (1 + plan.permutations)
    return Shift(outcome, observed, float(np.median(null)), float(np.quantile(null, 0.95)), p)


def outcomes(process: dict[str, Any], outcome: str) -> list[str]:
    """The outcomes of a recorded process's calls: every `plan` or `final`, or the `first_plan` alone."""
    seen = process["finals" if outcome == "final" else "plans"]
    calls = [str(seen["outcomes"][i]) for i in seen["calls"]]
    return calls[:1] if outcome == "first_plan" else calls


def paired(processes: Sequence[dict[str, Any]], outcome: str) -> list[tuple[list[str], list[str]]]:
    """Neighbouring processes as (under H0, under H1)."""
    found = []
    for first, second in zip(processes[0::2], processes[1::2], strict=True):
        h0, h1 = (first, second) if first["what"] == "H0" else (second, first)
        found.append((outcomes(h0, outcome), outcomes(h1, outcome)))
    return found
