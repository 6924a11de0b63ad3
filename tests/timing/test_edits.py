# SPDX-License-Identifier: Apache-2.0
"""The recount shares no code with the statistics, and every study polices its record by the same edits."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from routeblock.alignment_cost.edits import ROOM as ALIGNMENT
from routeblock.evidence.digest import PACKAGE_ROOT
from routeblock.grouped_schedule.edits import ROOM as GROUPED
from routeblock.q6k_dispatch.edits import ROOM as DISPATCH
from routeblock.serving.edits import ROOM as SERVING
from routeblock.timing import edits, mutations
from routeblock.timing.edits import Room
from routeblock.timing.reasons import Reason

DECLARED = Path(__file__).resolve().parents[2] / "fixtures/record_edits.json"
ROOMS = {"alignment_cost": ALIGNMENT, "grouped_schedule": GROUPED, "q6k_dispatch": DISPATCH, "serving": SERVING}
# Edits that leave no trace where a batch is judged alone, or of columns, clocks and fields that a study does not have.
ABSENT = {
    "grouped_schedule": {
        *("throttled_unseen", "attempt_beyond", "temperature_of_one", "time_of_calls", "time_a_call"),
        *("statistics_target", "statistics_reached", "statistics_best"),
    },
    "q6k_dispatch": {
        *("warmups", "throttled_unseen", "host_clock_deleted", "attempt_beyond", "time_of_calls", "time_a_call"),
        *("statistics_margin", "statistics_floor"),
    },
    "alignment_cost": {"statistics_best"},
    # Its record has no rejected repetition, and it has no targets, roles, kernels of ours or contests.
    "serving": {
        *("graph_late", "rejected_accepted", "rejected_deleted", "retry_deleted", "rejections_uncounted"),
        *(
            "host_clock_deleted",
            "statistics_target",
            "statistics_reached",
            "statistics_best",
            "statistics_floor_labels",
        ),
    },
}


def test_the_recount_imports_nothing_of_the_package() -> None:
    tree = ast.parse((PACKAGE_ROOT / "timing/recount.py").read_text())
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    names |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    assert names == {"__future__", "math", "numpy", "scipy.stats", "statistics", "typing"}
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert not used & {"quantile", "percentile", "mean"}


@pytest.mark.parametrize(("study", "room"), ROOMS.items())
def test_every_edit_is_declared_for_every_study_that_can_show_it(study: str, room: Room) -> None:
    names = {entry.name for entry in mutations.read_declared(DECLARED, study, room)}
    assert names == edits.known(room).keys() - ABSENT[study]


def test_every_reason_is_declared_for_an_edit() -> None:
    told = json.loads(DECLARED.read_text())["edits"]
    reasons = {reason for edit in told for its in edit["studies"].values() for reason in its["reasons"]}
    # A broken seal is no edit that a forger leaves.
    assert reasons == set(map(str, Reason)) - {"seal"}
    silent = [(edit["name"], study) for edit in told for study, its in edit["studies"].items() if not its["reasons"]]
    assert silent == [(edits.UNCHANGED, study) for study in ROOMS]
