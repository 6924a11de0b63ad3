# SPDX-License-Identifier: Apache-2.0
"""The committed record of the operator: the rule of refusals against every launch, a share of outputs by the twin."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from routeblock.errors import InputError
from routeblock.route_block.gpu import operator_cases as cases
from routeblock.route_block.gpu import operator_check as check

RECORD = Path(__file__).parents[2] / "fixtures" / "recorded" / "operator" / "h200"


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    parts = json.loads((RECORD / check.RUN).read_bytes())["parts"]
    return {entry["name"]: entry for part in parts.values() if isinstance(part, list) for entry in part}


def test_the_rule_says_of_each_recorded_launch_whether_it_was_refused(told: dict[str, Any]) -> None:
    refused = {case.name for case in cases.launches() if not check.fits(case)}
    assert refused == {case.name for case in cases.launches() if "refused" in told[case.name]}
    assert len(refused) == 30 and all("max_shared_mem" in told[name]["refused"] for name in refused)


def test_one_group_over_k_is_recorded_as_the_twin_computes_it(told: dict[str, Any]) -> None:
    assert check._outputs(list(islice(cases.one_group(), 0, None, 4)), told) == (24, 0)


def test_launches_taken_are_recorded_as_the_twin_computes_them(told: dict[str, Any]) -> None:
    compared, differing = check._outputs(list(islice(cases.launches(), 0, None, 12)), told)
    assert compared > 40 and differing == 0


def test_a_missing_expert_read_what_lay_before() -> None:
    rows = list(check._missing(json.loads((RECORD / check.RUN).read_bytes())["parts"]))
    assert [row["differing"] for row in rows] == [0, 0]
    assert "8 of 8 rows written" in rows[1]["says"]


def test_another_output_is_found(told: dict[str, Any]) -> None:
    first = next(cases.one_group())
    assert check._outputs([first], {first.name: told[first.name] | {"stable": "0" * 64}}) == (2, 1)


def test_a_record_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "contents.json").write_text("{}")
    (tmp_path / check.RUN).write_text("[]")
    with pytest.raises(InputError, match="not a record of the operator") as caught:
        check.check(tmp_path)
    assert "\n" not in str(caught.value)
