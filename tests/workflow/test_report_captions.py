# SPDX-License-Identifier: Apache-2.0
"""Snakemake's own report holds tables and figures under their captions; targets are named and listed."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

import pytest
from checkout import ROOT, Checkout

from routeblock.diagnose import explain_tables
from routeblock.report.catalogue import FIGURES, TABLES

NAMES = ("table_versions", "figure_trajectories")


def _plain(text: str) -> str:
    """Words alone: the report escapes quotes and marks what reStructuredText emphasises."""
    without = re.sub(r"<[^>]*>|\\n|\\", " ", html.unescape(text))
    return " ".join(re.findall(r"[A-Za-z0-9]+", without))


def test_the_report_shows_a_table_and_a_figure_under_their_captions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    made = Checkout.fresh(root)
    shutil.copytree(ROOT / "fixtures", root / "fixtures")
    made.run("table_versions")
    # A figure of a table that is there: the runs of the study are not this test's matter.
    from routeblock.route_block import tables
    from routeblock.tables import write

    spec = tables.TABLES["trajectories"]
    write(root / "results/tables", "trajectories", spec.columns, [], title=spec.title)
    done = made.command(
        "snakemake", "--cores", "1", "--allowed-rules", "figure_trajectories", "--", "figure_trajectories"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    done = made.command("snakemake", "--cores", "1", "--report", "report.html", "--", *NAMES)
    assert done.returncode == 0, done.stdout + done.stderr
    found = _plain((root / "report.html").read_text())
    for name in NAMES:
        assert _plain((ROOT / f"workflow/report/{name}.rst").read_text().replace("*", "")) in found, name


def test_every_table_and_figure_is_a_target_and_no_rule_is_nameless() -> None:
    done = Checkout(ROOT).command("snakemake", "--list-target-rules")
    listed = done.stdout.split()
    # The questions about a layer have targets of their own and no place in the report.
    asked = [*(f"table_{n}" for n in explain_tables.TABLES), "figure_explain"]
    wanted = [*(f"table_{n}" for n in TABLES), *(f"figure_{n}" for n in FIGURES), *asked]
    assert done.returncode == 0 and sorted(listed) == listed
    assert [n for n in listed if n.startswith(("table_", "figure_"))] == sorted(wanted)
    assert all(re.fullmatch("[a-z][a-z0-9_]*", name) for name in listed)
