# SPDX-License-Identifier: Apache-2.0
"""What the rule `report` waits for."""

from __future__ import annotations

import pytest
from checkout import ROOT, Checkout

from routeblock.report.catalogue import FIGURES, TABLES


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    made = Checkout.fresh(tmp_path_factory.mktemp("checkout"))
    (made.root / "fixtures").symlink_to(ROOT / "fixtures")
    return made


def rules_for(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    return {rule for rule, _ in checkout.would_run(monkeypatch, "report")}


def test_the_report_waits_for_every_table_and_figure_and_for_the_prediction_once_it_was_asked_for(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {f"table_{n}" for n in TABLES} | {f"figure_{n}" for n in FIGURES}
    found = rules_for(checkout, monkeypatch)
    named = {rule for rule in found if rule.startswith(("table_", "figure_"))}
    assert named == wanted - {"table_prediction"}
    assert {"score", "agreement", "validate_timings", "validate_alignment", "environment"} <= found
    asked = checkout.root / "results" / "tables" / "prediction.manifest.json"
    asked.parent.mkdir(parents=True)
    asked.write_text("{}")
    assert "table_prediction" in rules_for(checkout, monkeypatch)


def test_what_make_study_makes_has_the_report_in_it() -> None:
    snakefile = (ROOT / "workflow" / "Snakefile").read_text(encoding="utf-8")
    assert "rules.report.output" in snakefile.partition("rule all:")[2]
