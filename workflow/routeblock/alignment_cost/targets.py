# SPDX-License-Identifier: Apache-2.0
"""Targets of the alignment's cost: where its record and results lie, what tables are made from."""

from __future__ import annotations

from routeblock.alignment_cost.figures import FIGURES
from routeblock.alignment_cost.study import STUDY
from routeblock.alignment_cost.tables import TABLES
from routeblock.target import Given, Target, from_tables

CATEGORY = "Canonical alignment"
PROTOCOL = "fixtures/protocols/alignment_cost.json"
FILES = STUDY.files
RECORDED = "fixtures/recorded/alignment_cost/h200"
RESULTS = "results/alignment_cost/recorded-h200"
GIVEN = (
    Given("record", tuple(f"{RESULTS}/{name}" for name in FILES), folder=True),
    *(Given(name, (f"{RESULTS}/{name}/{name}.json",)) for name in ("statistics", "validation")),
)
HOST = Given("host", ("fixtures/recorded/host_enqueue/h200/host.json",))
MUTATIONS = Given("mutations", (f"{RESULTS}/mutations/mutations.json",))


def tables() -> list[Target]:
    """Every table."""
    given = {"alignment_mutations": (*GIVEN, MUTATIONS), "host_enqueue": (*GIVEN, HOST)}
    return [Target(table, "alignment table", CATEGORY, given.get(name, GIVEN)) for name, table in TABLES.items()]


def figures() -> list[Target]:
    """Every figure."""
    return from_tables(FIGURES.values(), "workflow figure", CATEGORY)
