# SPDX-License-Identifier: Apache-2.0
"""Where the declared edits of a record of study B are made, and those of its own documents."""

from __future__ import annotations

from collections.abc import Mapping

from routeblock.timing import edits
from routeblock.timing.edits import Copy, Edit, Room, change, other_digest


def _seeds(copy: Copy) -> None:
    for plan in ("sweep", "confirmation"):
        copy.rules[plan]["seed"] += 1
    copy.carry()


def _clock(copy: Copy) -> None:
    copy.rows[2:2] = [row | {"clock": "wall"} for row in copy.rows[:2]]
    copy.count()


def _outputs(copy: Copy) -> None:
    for check in edits.checks(copy):
        check["sha256"] = other_digest(check["sha256"])


def _wrong(copy: Copy) -> None:
    edits.checks(copy)[0].update(rows_exact=0, holds=False)


def _fixture(copy: Copy) -> None:
    copy.documents["fixtures"][0]["distinct_experts"] += 1


FURTHER: Mapping[str, Edit] = {
    "clock_unknown": _clock,
    "baseline": lambda c: change(c.rows[:1], baseline="band4"),
    "protocol_seed": _seeds,
    "bits": lambda c: edits.checks(c)[1].update(rows_exact=0),
    "fixture": _fixture,
    "check_wrong": _wrong,
    "check_rows": lambda c: edits.checks(c)[1].update(rows_checked=1, rows_exact=1, rows_bounded=1),
    "check_plans": _outputs,
}

ROOM = Room(
    module=__name__,
    soft=("inclusive",),
    hard=("compute",),
    soft_reason="throttled",
    candidate="band32",
    baseline="job_major",
    other="band128",
    floor_names={
        f"{name}/{end}": f"{name}/{other}"
        for name in ("job_major", "paired_incumbent")
        for end, other in (("A", "B"), ("B", "A"))
    },
    moved="slots",
    shown="band32",
    itself="paired_incumbent",
    judged={"verdict": "slower"},
    opposite="faster",
    whole=False,
    checks=lambda documents: documents["comparisons"],
    further=FURTHER,
)
