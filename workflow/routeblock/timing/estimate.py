# SPDX-License-Identifier: Apache-2.0
"""Paired changes with percentile bootstrap intervals. Nothing is trimmed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Change:
    """A paired change of times: `change` = median of the ratios minus 1, with its interval [low, high].

    Not the ratio of the medians: those are given for the reader, in the unit of the times.
    """

    n: int
    baseline: float
    candidate: float
    change: float
    low: float
    high: float


def bootstrap_medians(values: NDArray[np.float64], *, seed: int, resamples: int) -> NDArray[np.float64]:
    """Medians of `resamples` resamples of `values` [n], float64 [resamples].

    The draw is `Generator(PCG64(seed)).integers(0, n, size=(resamples, n))`, made anew for every call.
    """
    n = values.size
    draw = np.random.Generator(np.random.PCG64(seed)).integers(0, n, size=(resamples, n))
    return np.asarray(np.median(values[draw], axis=1), np.float64)


def paired_change(candidate: ArrayLike, baseline: ArrayLike, *, seed: int, resamples: int, confidence: float) -> Change:
    """The change of `candidate` against `baseline`, float [n] each, paired by position.

    The interval is the percentile bootstrap of the median ratio, quantiles by linear interpolation, minus 1. It is
    descriptive. Raises ValueError on unequal or empty input, or a time that is not a positive number.
    """
    new, old = np.asarray(candidate, np.float64), np.asarray(baseline, np.float64)
    if new.ndim != 1 or new.shape != old.shape or new.size == 0:
        raise ValueError(f"paired times have shapes {new.shape} and {old.shape}")
    if not (np.isfinite(new).all() and np.isfinite(old).all() and (new > 0).all() and (old > 0).all()):
        raise ValueError("times are positive numbers")
    ratios = new / old
    tail = (1 - confidence) / 2
    medians = bootstrap_medians(ratios, seed=seed, resamples=resamples)
    low, high = np.quantile(medians, [tail, 1 - tail], method="linear")
    return Change(
        n=new.size,
        baseline=float(np.median(old)),
        candidate=float(np.median(new)),
        change=float(np.median(ratios) - 1),
        low=float(low - 1),
        high=float(high - 1),
    )
