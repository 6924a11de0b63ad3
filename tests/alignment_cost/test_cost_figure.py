# SPDX-License-Identifier: Apache-2.0
"""The figure of the cost draws the ratios of its table, says the verdicts, and is the same twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from routeblock import tables as writer
from routeblock.alignment_cost.figures import COLUMNS, FIGURES, alignment_cost
from routeblock.alignment_cost.tables import TABLES
from routeblock.figure_style import Given, Row, identity, look

TOKENS = (1, 16, 256, 4096)


def _rows() -> list[Row]:
    rows: list[Row] = []
    for campaign, role, experts, modes in (
        ("operator", "bound", 128, ("graph", "stream", "host")),
        ("operator", "reported", 64, ("graph", "stream", "host")),
        ("layer", "bound", 128, ("graph", "stream")),
    ):
        for i, tokens in enumerate(TOKENS):
            for mode in modes:
                ratio = 0.5 + i / 8 + modes.index(mode) / 64
                row: Row = dict.fromkeys(c.name for c in TABLES["alignment_cost"].columns)
                row |= {"campaign": campaign, "role": role, "experts": experts, "top_k": 8, "tokens": tokens}
                row |= {"mode": mode, "ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.02}
                row |= {"sort_ratio": 8.0 - i, "sort_low": 7.5 - i, "sort_high": 8.5 - i, "margin_percent": 2.0}
                row |= {
                    "floor_low": 0.97,
                    "floor_high": 1.01,
                    "native_growth": 1.0 + i,
                    "canonical_growth": 1.0 + i / 2,
                }
                if mode != "host":
                    row |= {"verdict": "undecided" if i == 3 else "non-inferior", "sort_verdict": "inferior"}
                if (campaign, role, mode) == ("operator", "bound", "graph"):
                    row |= {"target": 0.7 if i < 2 else 1.0, "reached": True}
                rows.append(row)
    return rows


def test_the_columns_are_the_tables() -> None:
    assert set(COLUMNS) <= {column.name for column in TABLES["alignment_cost"].columns}


def test_the_figure_is_equal_when_made_twice_and_tells_the_verdicts(
    tmp_path: Path, words: Callable[[Path], str]
) -> None:
    (table, *_) = writer.write(tmp_path, "t", TABLES["alignment_cost"].columns, _rows(), title="t")
    made = [FIGURES["alignment_cost"].write(Given([table]), tmp_path / out) for out in ("a", "b")]
    for first, second in zip(*made, strict=True):
        assert first.read_bytes() == second.read_bytes()
    told = words(made[0][0])
    for text in ("non-inferior 6 of 8", "undecided 2 of 8", "margin +2 %", "target kept at 4 of 4", "E=64 k=8"):
        assert text in told


@pytest.mark.parametrize("arm", ["canonical", "sort"])
def test_every_ratio_stands_at_its_point_by_verdict(arm: str) -> None:
    rows, prefix = _rows(), "sort_" if arm == "sort" else ""
    with look():
        figure = alignment_cost(rows)
    lines = {str(a.get_gid()): a for a in figure.findobj() if a.get_gid()}
    for campaign in ("operator", "layer"):
        for mode in ("graph", "stream", *(("host",) if campaign == "operator" else ())):
            here = [r for r in rows if (r["campaign"], r["role"], r["mode"]) == (campaign, "bound", mode)]
            for verdict in {r[f"{prefix}verdict"] for r in here}:
                mine = [(r["tokens"], r[f"{prefix}ratio"]) for r in here if r[f"{prefix}verdict"] == verdict]
                line = lines[identity(campaign, "bound", mode, arm, verdict)]
                assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == mine
                assert line.get_fillstyle() == ("left" if verdict == "undecided" else "full")


def test_points_without_an_accepted_repetition_have_no_mark() -> None:
    rows = [
        r | dict.fromkeys(("ratio", "low", "high", "sort_ratio", "native_growth", "canonical_growth")) for r in _rows()
    ]
    with look():
        figure = alignment_cost(rows)
        assert not [a for a in figure.findobj() if str(a.get_gid()).startswith("operator/bound")]
        figure = alignment_cost([])
    told = [t.get_text() for t in figure.findobj() if hasattr(t, "get_text")]
    assert told.count("not measured") >= 4
