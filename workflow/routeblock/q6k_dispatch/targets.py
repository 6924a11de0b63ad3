# SPDX-License-Identifier: Apache-2.0
"""Targets of the fast paths: where their record and results lie, what tables are made from."""

from __future__ import annotations

from routeblock.q6k_dispatch.record import FILES
from routeblock.q6k_dispatch.tables import TABLES
from routeblock.target import Given, Target

CATEGORY = "Fast paths"
PROTOCOL = "fixtures/protocols/q6k_dispatch.json"
RECORDED = "fixtures/recorded/q6k_dispatch/h200"
RESULTS = "results/q6k_dispatch/recorded-h200"
GIVEN = (
    Given("record", tuple(f"{RESULTS}/{name}" for name in FILES), folder=True),
    Given("statistics", (f"{RESULTS}/statistics/statistics.json",)),
    Given("protocol", (PROTOCOL,)),
)


def tables() -> list[Target]:
    """Every table."""
    return [Target(table, "dispatch-table", CATEGORY, GIVEN) for table in TABLES.values()]
