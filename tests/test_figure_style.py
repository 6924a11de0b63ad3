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
from routeblock.cli import main
from routeblock.declared import by_name, find
from routeblock.errors import InputError
from routeblock.evidence.chain import verify
from routeblock.figure_style import DARK, FAINT, GREY, INK, LIGHT, MID, PAPER, Row, TableFigure
from routeblock.report.catalogue import FIGURES
from routeblock.tables import Column

ROOT = Path(__file__).resolve().parents[1]


def _draw(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(2, 2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([r["n"] for r in rows], [r["n"] for r in rows], "o", gid=figure_style.identity("a b", 1))
    axes.set_title("native <H0>")
    return figure


_draw.__module__ = "routeblock.figure_style"  # whose code the seal names
DRAWN = TableFigure("small", "A title", "What it shows.", ("n",), _draw)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tables.write(tmp_path, "t", [Column("n", "count")], [{"n": 1}, {"n": 2}], title="t")[0]


def test_two_runs_give_equal_bytes_whatever_the_settings(table: Path, tmp_path: Path) -> None:
    DRAWN.write(figure_style.Given([table]), tmp_path / "a")
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "savefig.dpi": 30, "axes.facecolor": "red"}):
        DRAWN.write(figure_style.Given([table]), tmp_path / "b")
    for name in ("small.svg", "small.png"):
        data = (tmp_path / "a" / name).read_bytes()
        assert data == (tmp_path / "b" / name).read_bytes()
        assert mpl.__version__.encode() not in data.replace(b"http://www.w3.org", b"")


def test_text_is_text_and_a_mark_has_its_name(table: Path, tmp_path: Path, words: Callable[[Path], str]) -> None:
    svg, _ = DRAWN.write(figure_style.Given([table]), tmp_path)
    assert "native <H0>" in words(svg)
    assert 'id="a_b/1"' in svg.read_text() and "<dc:date>" not in svg.read_text()


def test_a_figure_is_sealed_with_its_table(table: Path, tmp_path: Path) -> None:
    DRAWN.write(figure_style.Given([table]), tmp_path / "figures")
    assert verify(tmp_path / "figures", sources=[table]) == []
    (tmp_path / "figures/small.svg").write_text("x")
    assert len(verify(tmp_path / "figures", sources=[table])) == 1


def test_a_missing_column_is_one_line_and_leaves_nothing(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for name in ("confirmation", "discovery", "alignment_cost", "trajectories"):
        assert main(["workflow", "figure", name, "--from", str(table), "--out", str(out)]) == 2
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
    with pytest.raises(InputError, match="no figure is called 'smal'; known ones are small"):
        find("smal", by_name(DRAWN), "figure")
    with pytest.raises(InputError, match="2 sources"):
        DRAWN.write(figure_style.Given([broken, broken]), tmp_path)


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


def test_every_caption_says_whether_numbers_were_modelled_computed_recorded_or_observed() -> None:
    origin = ("modelled", "computed", "recorded", "observed")
    for figure in FIGURES.values():
        assert any(f"**{word}**" in figure.caption.lower() for word in origin), figure.name
