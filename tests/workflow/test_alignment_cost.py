# SPDX-License-Identifier: Apache-2.0
"""What the workflow runs for the alignment's cost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkout import ROOT, Checkout

from routeblock.alignment_cost import targets

STEPS = ["alignment_mutations", "alignment_statistics", "recorded_alignment", "validate_alignment"]


def test_the_tables_come_from_the_proved_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    made = Checkout.fresh(root)
    for place in ("fixtures/protocols", targets.RECORDED, "fixtures/recorded/host_enqueue/h200"):
        shutil.copytree(ROOT / place, root / place)
    shutil.copy(ROOT / "fixtures/record_edits.json", root / "fixtures")
    jobs = made.would_run(monkeypatch, *(f"table_{name}" for name in targets.TABLES))
    assert [rule for rule, _ in jobs] == sorted([*STEPS, *(f"table_{name}" for name in targets.TABLES)])
