# SPDX-License-Identifier: Apache-2.0
"""The committed protocol of the native alignment: how many processes and calls, the test, the conditions looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from routeblock.route_block.facts import HISTORIES
from routeblock.timing.protocol import Count, Natural, Seed, Strict, Whole, read

STUDY = "native"


class LaunchPlan(Strict):
    """Thread sizes and blocks per SM of both GEMMs."""

    thread_k: Count
    thread_n: Count
    blocks_per_sm: Count


class HistoryTest(Strict):
    """A permutation test whose unit is the process: labels are exchanged inside pairs of neighbouring processes.

    statistic: total variation between the outcomes of all calls under H0 and under H1. p = (1 + permutations whose
    statistic is at least the observed one) / (1 + permutations). The verdict is that of `primary` alone.
    """

    statistic: Literal["total_variation"]
    primary: Literal["plan"]
    descriptive: tuple[Literal["final", "first_plan"], ...]
    permutations: Count
    seed: Seed
    alpha: Annotated[float, Field(gt=0, lt=1)]


class HistoryPlan(Strict):
    """`pairs` processes a history, H0 and H1 by turns, the order of a pair alternating; `calls` alignments in each."""

    pairs: Annotated[int, Field(ge=20)]
    calls: Count
    launch: LaunchPlan
    test: HistoryTest


class Condition(Strict):
    """One way to call the alignment: how it is launched, and on which routing.

    routing `fixture`: the fixture's ids; `fixture_modulo`: the same modulo `experts`; `one_expert`: `routes` routes of
    expert 0 of `experts`, one a token.
    """

    name: str
    mode: Literal["default_stream", "side_stream", "graph_replay"]
    routing: Literal["fixture", "fixture_modulo", "one_expert"]
    experts: Count
    routes: Natural = 0


class RepetitionPlan(Strict):
    """Looked at without a hypothesis: what was found is reported, none included."""

    processes: Count
    calls: Count
    block_size: Count
    conditions: tuple[Condition, ...]


class Protocol(Whole):
    """The whole protocol."""

    name: Literal["native"]
    version: Count
    history: HistoryPlan
    repetition: RepetitionPlan
    changes: tuple[str, ...]

    def order(self) -> Iterator[str]:
        """The history of each process in the order of execution."""
        for pair in range(self.history.pairs):
            yield from HISTORIES[::-1] if pair % 2 else HISTORIES


def load(path: Path) -> Protocol:
    """Read the protocol; raises InputError as `protocols.read`."""
    return read(path, Protocol, STUDY)
