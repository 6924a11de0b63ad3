# SPDX-License-Identifier: Apache-2.0
"""The committed counters: whole, of the work that was timed, and what their protocol expected of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from routeblock.errors import InputError
from routeblock.grouped_schedule import counters, tables
from routeblock.grouped_schedule.study import STUDY
from routeblock.grouped_schedule.targets import COUNTERS, RECORDED

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    return counters.read(ROOT / COUNTERS)


def evidence(counted: dict[str, Any] | None) -> tables.Evidence:
    records = [STUDY.read(ROOT / RECORDED / "cuda" / "gpu0" / kind) for kind in ("sweep", "beyond")]
    return tables.Evidence((), records, {}, counters=counted)


def test_what_the_protocol_expected_of_dram_came_out(counted: dict[str, Any]) -> None:
    assert counted["outcome"] == "counted" and len(counted["rows"]) == 36
    rows = {
        (r["kind"], r["slots"]): r for r in tables.schedule_counters(evidence(counted)) if r["schedule"] == "band32"
    }
    assert len(rows) == 6
    for (kind, _), row in rows.items():
        less = row["dram_read_change_percent"] < -1
        assert less == (kind == "l2_ratio")


def test_counters_of_other_work_are_refused(counted: dict[str, Any]) -> None:
    rows = [dict(row) for row in counted["rows"]]
    rows[7]["sha256"] = "0" * 64
    with pytest.raises(InputError, match="wrote bits that no record of study B holds"):
        tables.schedule_counters(evidence(counted | {"rows": rows}))


def test_without_counters_the_table_is_empty() -> None:
    assert tables.schedule_counters(evidence(None)) == []


def test_edited_counters_are_refused(tmp_path: Path, counted: dict[str, Any]) -> None:
    shutil.copytree(ROOT / COUNTERS, tmp_path / "h200")
    path = tmp_path / "h200" / counters.RUN
    path.write_bytes(path.read_bytes().replace(b'"counted"', b'"refused"'))
    with pytest.raises(InputError, match="not the bytes that were recorded"):
        counters.read(tmp_path / "h200")


def test_a_profile_without_every_graph_is_refused() -> None:
    plan = counters.load(counters.COUNTERS_PROTOCOL)
    study = counters.load_study(counters.STUDY_PROTOCOL)
    wanted = list(counters.cases(study, plan, 60 << 20))[:1]
    head = ",".join(f'"{name}"' for name in ("ID", *plan.metrics.values()))
    line = ",".join(['"0"', *('"1,000"' for _ in plan.metrics)])
    text = f"==PROF== x\n{head}\n{''.join(chr(44) for _ in plan.metrics)}\n{line}\n"
    assert counters.parse(text, plan, wanted)[0]["dram_read_bytes"] == 1000
    with pytest.raises(ValueError, match="1 graphs were counted, 2 ran"):
        counters.parse(text, plan, wanted * 2)
    assert json.loads(json.dumps(wanted[0].told()))["kind"] == "study"
