# SPDX-License-Identifier: Apache-2.0
"""The lines around what is said stand in the docs as in the report."""

from __future__ import annotations

from pathlib import Path

from routeblock.report.not_claimed import NOT_CLAIMED

DOCS = Path(__file__).parents[2] / "docs" / "not-claimed.md"


def test_the_docs_have_every_line_and_no_other() -> None:
    text = " ".join(DOCS.read_text(encoding="utf-8").split())
    lines = [line for lines in NOT_CLAIMED.values() for line in lines]
    assert all(" ".join(line.text.split()) in text and line.beyond in text for line in lines)
    assert text.count(" - ") == len(lines)
    assert all(f"## {subject}" in text for subject in NOT_CLAIMED)
