# SPDX-License-Identifier: Apache-2.0
"""Figures as .svg and .png: one look, read from tables, with the same bytes on every run.

Every figure is one phone screen wide, so that 380 px still show its text. What a mark means is said by its place, its
shape or its lightness, and never by hue alone; text in the svg is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from routeblock.declared import Declared
from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.parquet import read_parquet, rows_of

Row = dict[str, Any]

WIDTH = 5.4  # inches: 9 pt are then 9 px at a width of 380 px
# Dark to light, apart in grey as well: lightness (CIE L*) about 15, 49, 73.
INK, DARK, MID, LIGHT = "#1a1a1a", "#0b2a4a", "#c04f15", "#8fbcdb"
GREY, FAINT, PAPER = "#6a6a6a", "#d4d4d4", "#ffffff"
SMALL = 7.5  # points, of what is beside the point

# DejaVu Sans comes with matplotlib, so its metrics do on every machine; the others have its widths, or less.
_RC: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "savefig.dpi": 192,
    "svg.fonttype": "none",
    "svg.hashsalt": "routeblock",
    "path.simplify": False,
}


@dataclass(frozen=True)
class Given:
    """What a figure is made from: documents in the order of its panels, fixture folders, and the table beside."""

    documents: Sequence[Path]
    fixtures: Sequence[Path] = ()
    table: Path | None = None


@dataclass(frozen=True)
class Drawn(Declared):
    """A figure, declared once: its title (for the files' metadata), and words for a reader who does not see it."""

    title: str
    alt: str

    def read(self, given: Given) -> tuple[Callable[[], Figure], list[Path]]:
        """What draws the figure, and every file it is made from. Raises InputError for what it cannot be made from."""
        raise NotImplementedError

    def write(self, given: Given, out: Path) -> list[Path]:
        """Draw it as {name}.svg and {name}.png in `out`, sealed by {name}.manifest.json; returns both files."""
        draw, used = self.read(given)
        with look():
            files = save(draw(), out, self.name, title=self.title)
        manifest = out / f"{self.name}{SUFFIX}"
        seal(manifest, rule=f"figure_{self.name}", outputs=files, inputs=used, parameters={}, modules=[self.module])
        return files


@dataclass(frozen=True)
class TableFigure(Drawn):
    """A figure of the table of its name: the columns that it draws, and how."""

    columns: Sequence[str]
    draw: Callable[[Sequence[Row]], Figure]

    @property
    def made_by(self) -> Callable[[Sequence[Row]], Figure]:
        """The function that draws it."""
        return self.draw

    def read(self, given: Given) -> tuple[Callable[[], Figure], list[Path]]:
        """From its table's .parquet, the only document."""
        if len(given.documents) != 1:
            raise InputError(
                f"{len(given.documents)} sources",
                where=f"figure {self.name}",
                limit="one table",
                way_out="name its .parquet with --from",
            )
        rows = read_table(given.documents[0], self.columns)
        return lambda: self.draw(rows), list(given.documents)


@contextmanager
def look() -> Iterator[None]:
    """Draw and save in the house's look, whatever a matplotlibrc says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(cast(Any, _RC))
        yield


def paths(folder: Path, name: str) -> list[Path]:
    """The two files of a figure."""
    return [folder / f"{name}.{suffix}" for suffix in ("svg", "png")]


def save(figure: Figure, folder: Path, name: str, *, title: str) -> list[Path]:
    """Write a figure to `folder` and return its files. No time, host or version goes into the bytes."""
    metadata: dict[str, dict[str, Any]] = {
        "svg": {"Date": None, "Creator": None, "Title": title},
        "png": {"Software": None, "Title": title},
    }
    files = paths(folder, name)
    for path in files:
        kind = path.suffix[1:]
        with atomic_file(path) as tmp:
            figure.savefig(tmp, format=kind, metadata=metadata[kind])
    return files


def read_table(path: Path, columns: Sequence[str]) -> list[Row]:
    """The rows of a table that the workflow made. InputError if it cannot be read or lacks one of `columns`."""
    try:
        table = read_parquet(path)
        rows = rows_of(table)
    except UNREADABLE as e:
        raise InputError(
            f"not a readable table: {e}", where=str(path), limit="a .parquet of results/tables", way_out="make it again"
        ) from e
    if missing := [name for name in columns if name not in table.column_names]:
        raise InputError(
            f"it has no column {', '.join(missing)}",
            where=str(path),
            limit="a figure needs every column that it draws",
            way_out="make the table again",
        )
    return rows


def read_document(path: Path, form: str, keys: Sequence[str]) -> Row:
    """A JSON document of the format `form`. InputError if it is another, cannot be read, or lacks one of `keys`."""
    try:
        document = json.loads(path.read_bytes())
    except UNREADABLE as e:
        raise InputError(f"not readable: {e}", where=str(path), limit="JSON", way_out="make it again") from e
    found = document.get("format") if isinstance(document, dict) else None
    missing = [] if found != form else [key for key in keys if key not in document]
    if found != form or missing:
        raise InputError(
            f"it lacks {', '.join(missing)}" if missing else "another document",
            where=str(path),
            limit=f"format {form}",
            way_out="make it again",
        )
    return dict(document)


def identity(*parts: object) -> str:
    """The id of a mark in the svg, by which a test and a reader find what it stands for."""
    return "/".join(str(part).replace(" ", "_") for part in parts)


def sheet(height: float) -> Figure:
    """An empty figure of the house's width, `height` inches high.

    Everything on it has a fixed place: matplotlib's layout engines are not exact to the last bit from run to run.
    """
    return Figure(figsize=(WIDTH, height))


def place(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place in inches, measured from the upper left corner."""
    whole = figure.get_figheight()
    return figure.add_axes((left / WIDTH, (whole - top - height) / whole, width / WIDTH, height / whole))


def say(figure: Figure, left: float, base: float, text: str, **look: Any) -> None:
    """Text whose baseline begins at a place in inches, measured from the upper left corner."""
    whole = figure.get_figheight()
    figure.text(left / WIDTH, (whole - base) / whole, text, **look)


def head(figure: Figure, base: float, text: str) -> None:
    """The heading of a panel, at the left edge."""
    say(figure, 0.05, base, text, weight="bold", size=9.5)


def key(figure: Figure, handles: Sequence[Artist], ncols: int) -> None:
    """The key, above everything."""
    spaces = {"columnspacing": 1.1, "handlelength": 1.5, "borderaxespad": 0.25}
    figure.legend(handles=handles, loc="upper center", ncols=ncols, **spaces)


def note(axes: Axes, text: str) -> None:
    """Say in place of marks why there are none."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY, style="italic")


def where(row: Mapping[str, Any], among: Sequence[Mapping[str, Any]]) -> str:
    """The heading of a lane's study: where, and what its numbers are; with its fixture if `among` has several."""
    fixture = f", {row['fixture']}" if len({r["fixture"] for r in among}) > 1 else ""
    status = str(row["arithmetic"]).split(",")[0]  # the rest of the sentence is the caption's
    return f"{row['lane']}, {row['point']}, {row['plan_source']} plans{fixture}: {status}"
