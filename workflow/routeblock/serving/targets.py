# SPDX-License-Identifier: Apache-2.0
"""Targets of the engine's record: where it and its results lie, what tables are made from."""

from __future__ import annotations

from routeblock.serving.figures import FIGURES
from routeblock.serving.tables import TABLES
from routeblock.serving.verification import FILES as RECORD
from routeblock.target import Given, Target, from_tables

CATEGORY = "In the engine"
PROTOCOL = "fixtures/protocols/serving.json"
FILES = RECORD
RECORDED = "fixtures/recorded/serving/h200"
RESULTS = "results/serving/recorded-h200"
GIVEN = (
    Given("record", tuple(f"{RESULTS}/{name}" for name in FILES), folder=True),
    *(Given(name, (f"{RESULTS}/{name}/{name}.json",)) for name in ("statistics", "validation", "layer")),
    Given("protocol", (PROTOCOL,)),
)
MUTATIONS = Given("mutations", (f"{RESULTS}/mutations/mutations.json",))


def tables() -> list[Target]:
    """Every table."""
    given = {"serving_mutations": (*GIVEN, MUTATIONS)}
    return [Target(table, "serving table", CATEGORY, given.get(name, GIVEN)) for name, table in TABLES.items()]


def figures() -> list[Target]:
    """Every figure."""
    return from_tables(FIGURES.values(), "workflow figure", CATEGORY)
