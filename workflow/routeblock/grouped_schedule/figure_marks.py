# SPDX-License-Identifier: Apache-2.0
"""What study B's figures have in common: their columns, and the marks of an estimate."""

from __future__ import annotations

from typing import Any

from matplotlib.lines import Line2D

from routeblock.figure_style import DARK, Row
from routeblock.grouped_schedule.schedules import Scope

WHERE = ("lane", "device", "family", "slots", "pool", "scope", "schedule", "baseline")
ESTIMATE = ("change_percent", "low_percent", "high_percent", "floor_low_percent", "floor_high_percent", "verdict")
GPUS = (0, 1)  # of the published study
CPU = "cpu"  # the lane that says nothing of a GPU

# The place of a mark says how much, its shape which way: faster, slower, or neither.
_MARKERS = {"faster": "<", "slower": ">"}


def marker(verdict: str) -> str:
    """The shape that stands for a verdict."""
    return _MARKERS.get(verdict, "o")


def is_paid(row: Row) -> bool:
    """Whether an estimate includes grouping."""
    return bool(row["scope"] == Scope.INCLUSIVE)


def entry(label: str, **style: Any) -> Line2D:
    """An entry of a figure's key."""
    look: dict[str, Any] = {"color": DARK, "ls": "", "ms": 4.2, "mew": 0.9} | style
    return Line2D([], [], label=label, **look)
