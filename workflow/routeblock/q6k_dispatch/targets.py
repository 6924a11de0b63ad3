# SPDX-License-Identifier: Apache-2.0
"""Targets of the fast paths: where their record and results lie, what tables are made from."""

from __future__ import annotations

from routeblock.q6k_dispatch.study import STUDY
from routeblock.q6k_dispatch.tables import TABLES
from routeblock.target import Given, Target

CATEGORY = "Fast paths"
PROTOCOL = "fixtures/protocols/q6k_dispatch.json"
FILES = STUDY.files
RECORDED = "fixtures/recorded/q6k_dispatch/h200"
RESULTS = "results/q6k_dispatch/recorded-h200"
GIVEN = (
    Given("record", tuple(f"{RESULTS}/{name}" for name in FILES), folder=True),
    *(Given(name, (f"{RESULTS}/{name}/{name}.json",)) for name in ("statistics", "validation")),
    Given("protocol", (PROTOCOL,)),
)
MUTATIONS = Given("mutations", (f"{RESULTS}/mutations/mutations.json",))


def tables() -> list[Target]:
    """Every table."""
    given = {"dispatch_mutations": (*GIVEN, MUTATIONS)}
    return [Target(table, "fast-paths table", CATEGORY, given.get(name, GIVEN)) for name, table in TABLES.items()]
