# SPDX-License-Identifier: Apache-2.0
"""A few mutants of each kind on records of each study; `make mutants` tries more."""

from __future__ import annotations

import random
from pathlib import Path

import leaves
import mutants
import pytest

FEW, SEED = 3, 20251202


def test_no_mutant_of_runs_is_accepted_and_no_variation_refused(tmp_path: Path) -> None:
    tallies, varied = mutants.runs_mutants(1, 4, SEED, tmp_path)
    assert len(tallies) == 22 and all(t.tried == 1 for t in tallies)
    assert [t.row() for t in tallies if t.accepted] == []
    assert [v["refused"] for v in varied] == [[], []]


def test_no_mutant_of_a_timed_record_is_accepted_and_no_variation_refused(tmp_path: Path) -> None:
    records = [*mutants.timed_records(("study B, confirmation", "fast paths"))]
    tallies, varied = mutants.timed_mutants(records, FEW, 5, SEED, tmp_path)
    assert len(tallies) == 18 and all(t.tried == FEW for t in tallies)
    assert [t.row() for t in tallies if t.accepted] == []
    assert [v["refused"] for v in varied] == [[], []]


def test_a_judge_that_accepts_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = next(mutants.timed_records(("study B, confirmation",)))
    monkeypatch.setattr(mutants, "check", lambda *_: [])
    monkeypatch.setattr(mutants, "unlisted", lambda *_: [])
    tallies, _ = mutants.timed_mutants([timed], FEW, 0, SEED, tmp_path)
    assert all(len(t.accepted) == FEW for t in tallies if t.kind.startswith("batch "))


@pytest.mark.parametrize("value", [True, 3, 0, -1, 0.5, "a", "", "0" * 64, None, [], {}])
def test_another_value_is_another(value: object) -> None:
    for seed in range(40):
        new = leaves.other(value, random.Random(seed), [value, 7, "b", 1.5])
        assert repr(new) != repr(value)
