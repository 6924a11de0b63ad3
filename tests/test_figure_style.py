# SPDX-License-Identifier: Apache-2.0
"""Figures: equal bytes on every run, text as text, and one line where a table does not serve."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from routeblock import figure_style, tables
from routeblock import rule_code as workflow
from routeblock.alignment_cost import targets as alignment
from routeblock.alignment_cost.figures import FIGURES as ALIGNMENT
from routeblock.cli import main
from routeblock.errors import InputError
from routeblock.evidence.chain import verify
from routeblock.figure_style import DARK, FAINT, GREY, INK, LIGHT, MID, PAPER, Row, TableFigure
from routeblock.grouped_schedule import targets as grouped
from routeblock.grouped_schedule.figures import FIGURES as GROUPED
from routeblock.q6k_dispatch import targets as fast_paths
from routeblock.route_block.figures.draw import FIGURES
from routeblock.tables import Column

ROOT = Path(__file__).resolve().parents[1]
CODE = "c" * 64


def _draw(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(2, 2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([r["n"] for r in rows], [r["n"] for r in rows], "o", gid=figure_style.identity("a b", 1))
    axes.set_title("native <H0>")
    return figure


DRAWN = {"small": TableFigure("A title", ("n",), _draw)}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tables.write(tmp_path, "t", [Column("n", "count")], [{"n": 1}, {"n": 2}], title="t")[0]


def test_two_runs_give_equal_bytes_whatever_the_settings(table: Path, tmp_path: Path) -> None:
    figure_style.write_from_table("small", DRAWN, [table], tmp_path / "a", code=CODE)
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "savefig.dpi": 30, "axes.facecolor": "red"}):
        figure_style.write_from_table("small", DRAWN, [table], tmp_path / "b", code=CODE)
    for name in ("small.svg", "small.png"):
        data = (tmp_path / "a" / name).read_bytes()
        assert data == (tmp_path / "b" / name).read_bytes()
        assert mpl.__version__.encode() not in data.replace(b"http://www.w3.org", b"")


def test_text_is_text_and_a_mark_has_its_name(table: Path, tmp_path: Path, words: Callable[[Path], str]) -> None:
    svg, _ = figure_style.write_from_table("small", DRAWN, [table], tmp_path, code=CODE)
    assert "native <H0>" in words(svg)
    assert 'id="a_b/1"' in svg.read_text() and "<dc:date>" not in svg.read_text()


def test_a_figure_is_sealed_with_its_table(table: Path, tmp_path: Path) -> None:
    figure_style.write_from_table("small", DRAWN, [table], tmp_path / "figures", code=CODE)
    assert verify(tmp_path / "figures", code=None, sources=[table]) == []
    (tmp_path / "figures/small.svg").write_text("x")
    assert len(verify(tmp_path / "figures", code=None, sources=[table])) == 1


def test_a_missing_column_is_one_line_and_leaves_nothing(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for name in (*GROUPED, *ALIGNMENT, "trajectories"):
        assert main(["figure", name, "--from", str(table), "--out", str(out)]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and "it has no column" in told and str(table) in told
    assert not out.exists()


def test_what_is_no_table_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "t.parquet"
    for data in (None, b"PAR1"):
        if data:
            broken.write_bytes(data)
        with pytest.raises(InputError, match="not a readable table"):
            figure_style.read_table(broken, ["n"])
    with pytest.raises(InputError, match="no figure is called 'smal'; known: small"):
        figure_style.write_from_table("smal", DRAWN, [broken], tmp_path, code=CODE)
    with pytest.raises(InputError, match="2 sources"):
        figure_style.write_from_table("small", DRAWN, [broken, broken], tmp_path, code=CODE)


def _lightness(color: str) -> float:
    """CIE L* of an sRGB colour, 0 to 100."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in mpl.colors.to_rgb(color)]
    y = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def test_what_differs_in_hue_differs_in_lightness() -> None:
    filled = sorted(map(_lightness, (DARK, MID, LIGHT, PAPER)))
    assert all(b - a > 20 for a, b in pairwise(filled))
    # Text on paper, also the small: 4.5 to 1.
    assert _lightness(INK) < 12 and _lightness(GREY) < 46 and _lightness(FAINT) > 80


def test_the_workflow_has_a_rule_and_a_caption_for_every_figure_and_table() -> None:
    figures = (*workflow.FIGURES, *grouped.FIGURES, *alignment.FIGURES)
    assert sorted(figures) == sorted([*FIGURES, *GROUPED, *ALIGNMENT])
    wanted = {f"figure_{name}" for name in figures}
    wanted |= {
        f"table_{n}"
        for n in (*workflow.TABLES, *workflow.GPU_TABLES, *grouped.TABLES, *alignment.TABLES, *fast_paths.TABLES)
    }
    assert {path.stem for path in (ROOT / "workflow/report").glob("*.rst")} == wanted
    assert wanted <= workflow.RULES.keys()
    origin = ("modelled", "computed", "recorded", "observed")
    for name in figures:
        text = (ROOT / f"workflow/report/figure_{name}.rst").read_text().lower()
        assert any(f"**{word}**" in text for word in origin), name
