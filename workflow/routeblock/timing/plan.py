# SPDX-License-Identifier: Apache-2.0
"""What a protocol orders, as data: stages to time and pairs to compare. A study makes it; loop, check and statistics
read it.

Rows here are batches with the names of `batches.BatchTable.rows`. A study whose batches have one clock only may leave
the column out: the clock is then called "".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Series:
    """One side of a comparison: a name of its own, so that a side can be timed against itself."""

    name: str
    side: str


@dataclass(frozen=True)
class Stage:
    """Series timed together at one shape.

    key: names the stage by the values of the study's key columns. families: timed one after another; each is a tuple of
    groups of clocks, and the clocks of a group are read in one run. calls: in a batch, by clock. labels, of_side:
    further columns of every batch, and of those of a side. whole: a repetition is accepted or rejected whole; else each
    batch is. checked: the sides that have a check of their own before timing; ("",) where one check covers all.
    """

    key: Key
    label: str
    series: tuple[Series, ...]
    families: tuple[tuple[tuple[str, ...], ...], ...]
    repetitions: int
    order: Callable[[int], tuple[Series, ...]]
    calls: Mapping[str, int]
    labels: Mapping[str, Any] = field(default_factory=dict)
    of_side: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    whole: bool = True
    checked: tuple[str, ...] = ("",)
    pause_s: float = 0.0
    shape: Any = None
    """What the study makes of it: its own object for the shape."""

    @property
    def clocks(self) -> Iterator[str]:
        """Every clock, family by family."""
        return (clock for family in self.families for group in family for clock in group)


class Rule(StrEnum):
    """How an interval becomes a verdict."""

    NONE = "none"
    EFFECT = "effect"
    """Faster or slower where the whole interval lies at least `threshold` from no change."""
    MARGIN = "margin"
    """Non-inferior or inferior: the whole interval at or below `threshold`, or above it."""
    BEST = "best"
    """The candidate against the fastest baseline of its `contest`; `target` bounds the upper end of that ratio."""


class Verdict(StrEnum):
    """What an interval says, by a `Rule`."""

    FASTER = "faster"
    SLOWER = "slower"
    NON_INFERIOR = "non-inferior"
    INFERIOR = "inferior"
    UNDECIDED = "undecided"
    INCOMPLETE = "too few accepted"


@dataclass(frozen=True)
class Pair:
    """A candidate and its baseline, series of one stage on one clock.

    columns: of the row that the comparison becomes. planned: repetitions. estimate_from, verdict_from: with fewer pairs
    there is no estimate, no verdict. floor: the series whose comparison with the same baseline, in the stage
    `floor_stage` (default: this one), shows the noise. target: the largest ratio allowed.
    """

    columns: Mapping[str, Any]
    stage: Key
    clock: str
    candidate: str
    baseline: str
    planned: int
    rule: Rule = Rule.NONE
    threshold: float | None = None
    target: float | None = None
    estimate_from: int = 1
    verdict_from: int = 1
    floor: tuple[Key, str, str] | None = None
    """Stage, candidate and baseline of the comparison that is the floor."""
    contest: Key | None = None


@dataclass(frozen=True)
class Checked:
    """One check before timing, as the record has it: of a stage, of all sides or one, and the sides that are wrong."""

    key: Key
    side: str
    wrong: tuple[str, ...]
    where: str
