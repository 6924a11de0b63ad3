# SPDX-License-Identifier: Apache-2.0
"""Each knob and each kind of edit makes exactly the jobs run again that the table lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import reruns

GOLDEN = json.loads(reruns.GOLDEN.read_bytes())


def test_every_knob_of_the_config_is_in_the_table() -> None:
    tried = {knob for study in reruns.STUDIES.values() for case in study.cases for knob in case.knobs}
    assert tried == set(reruns.leaves())


def test_the_page_says_what_the_table_says() -> None:
    assert reruns.PAGE.read_text() == reruns.page(GOLDEN), "run tests/workflow/reruns.py"


@pytest.mark.parametrize("name", reruns.STUDIES)
def test_a_change_runs_what_it_touches_and_no_more(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reruns.jobs_of(reruns.STUDIES[name], tmp_path, monkeypatch)
    assert found.keys() == GOLDEN[name].keys()
    differing = {title: sorted(set(jobs) ^ set(GOLDEN[name][title])) for title, jobs in found.items()}
    assert {title: jobs for title, jobs in differing.items() if jobs} == {}, "look, then run tests/workflow/reruns.py"
