# SPDX-License-Identifier: Apache-2.0
"""Statistics of several records of study B, and whether the protocol's counts are reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from routeblock.grouped_schedule.protocol import load
from routeblock.grouped_schedule.study import missing_counts, study
from routeblock.timing import statistics


def write(out: Path, folders: Sequence[Path], protocol: Path, *, minimum_effect: float) -> list[str]:
    """Write the statistics of several records (see `timing.statistics`); returns what does not hold, one line each."""
    plan = load(protocol)
    given = {"minimum_effect": minimum_effect}
    made = study(minimum_effect)
    wrong = statistics.write(out, made, folders, protocol, rule="statistics", module=__name__, parameters=given)
    return missing_counts([made.read(folder) for folder in folders], plan.expected_per_device) + wrong
