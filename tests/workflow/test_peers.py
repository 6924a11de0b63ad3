# SPDX-License-Identifier: Apache-2.0
"""What the workflow runs for the fast paths and their peers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkout import ROOT, Checkout

from routeblock.q6k_dispatch import targets


def test_the_tables_come_from_the_proved_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    made = Checkout.fresh(root)
    for place in ("fixtures/protocols", targets.RECORDED):
        shutil.copytree(ROOT / place, root / place)
    shutil.copy(ROOT / "fixtures/record_edits.json", root / "fixtures")
    jobs = made.would_run(monkeypatch, *(f"table_{name}" for name in targets.TABLES))
    steps = ["dispatch_mutations", "dispatch_statistics", "recorded_dispatch", "validate_dispatch"]
    assert [rule for rule, _ in jobs] == sorted([*steps, *(f"table_{name}" for name in targets.TABLES)])
