# SPDX-License-Identifier: Apache-2.0
"""How often the interval of a paired change holds the true change: a simulation with the protocols' own settings.

python tests/reliability/intervals.py --trials 4000 --seed 1 --out FILE
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.evidence.files import write_json
from routeblock.timing.estimate import paired_change

# Repetitions, resamples and confidence of fixtures/protocols/{grouped_schedule,q6k_dispatch,alignment_cost}.json.
REPETITIONS, RESAMPLES, CONFIDENCE = (12, 24, 40), 2000, 0.95
LEAST = 0.93  # the percentile bootstrap of a median of few pairs holds the truth a little less often than it says
CHANGE, NOISE = 0.02, 0.01  # true change, standard deviation of the logarithm of a time


def coverage(repetitions: int, *, trials: int, seed: int) -> dict[str, Any]:
    """The share of `trials` simulated comparisons whose interval holds the true change, and its standard error.

    Times are log-normal around 100 us, those of the candidate by `CHANGE` longer: the true median ratio is known.
    """
    rng, held = np.random.default_rng([seed, repetitions]), 0
    for trial in range(trials):
        old, new = 100 * np.exp(NOISE * rng.standard_normal((2, repetitions)))
        drawn = {"seed": trial, "resamples": RESAMPLES, "confidence": CONFIDENCE}
        found = paired_change((1 + CHANGE) * new, old, **drawn)
        held += found.low <= CHANGE <= found.high
    share = held / trials
    error = math.sqrt(share * (1 - share) / trials)
    return {
        "repetitions": repetitions,
        "trials": trials,
        "confidence": CONFIDENCE,
        "coverage": round(share, 4),
        "standard_error": round(error, 4),
    }


def main() -> None:
    """Write the coverage at each number of repetitions as JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--trials", type=int, required=True)
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    rows = [coverage(n, trials=given.trials, seed=given.seed) for n in REPETITIONS]
    document = {"seed": given.seed, "change": CHANGE, "noise": NOISE, "resamples": RESAMPLES, "rows": rows}
    write_json(given.out, document)
    for row in rows:
        print(f"{row['repetitions']} repetitions: {row['coverage']:.1%} of {row['trials']} hold the true change")


if __name__ == "__main__":
    main()
