# SPDX-License-Identifier: Apache-2.0
"""Figure `differences`: every element that differs in a bit between H0 and H1, on its row and at its column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_array
from routeblock.evidence.record import TENSORS
from routeblock.evidence.tensors import open_tensors
from routeblock.figure_style import DARK, FAINT, GREY, WIDTH, Row, head, identity, note, place, say, sheet, where
from routeblock.route_block.facts import HISTORIES, SURFACES
from routeblock.route_block.scorer.inputs import bits

_STUDY = ("fixture", "lane", "point", "plan_source")
COLUMNS = (*_STUDY, "arithmetic", "quantity", "surface", "published_number", "measured_number")
ELEMENTS = "elements that differ"
_NAMES = {"w13": "W13", "activation": "activation", "w2": "W2", "final": "final"}
_PITCH, _GAP = 0.14, 0.6  # inches a row; rows between surfaces
_TOP, _HEAD, _FOOT, _SIDES = 0.02, 0.3, 0.55, (1.2, 1.6)  # inches: figure, panel title, last axis; left and right
_BESIDE: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False}


@dataclass(frozen=True)
class Surface:
    """The differing elements of one surface: (row, column) pairs, the rows that were allowed to differ, its columns.

    published: elements in the source study, None where it has none.
    """

    name: str
    elements: Sequence[tuple[int, int]]
    allowed: Sequence[int]
    columns: int
    published: int | None

    @property
    def rows(self) -> list[int]:
        """Every row with a line: allowed to differ, or found to."""
        return sorted({*self.allowed, *(row for row, _ in self.elements)})


@dataclass(frozen=True)
class Study:
    """A lane, point and plan source: which cell was compared under H0 and H1, and what was found on each surface."""

    name: str
    place: tuple[str, ...]
    surfaces: Sequence[Surface]


def tensors_of(score: Path, reference: str) -> list[Path]:
    """The raw surfaces that a score compared for H0 and H1: those of the first replicates."""
    return [score.parent / reference / history / "rep1" / TENSORS for history in HISTORIES]


def read(score: Row, source: Path, table: Sequence[Row]) -> Study:
    """Where the bits of H0 and H1 differ, held against the score's digests and counts and against the table.

    Raises InputError if the tensors are not those that were scored, or if a count is not the table's.
    """
    reference = score["relations"][0]["reference"]
    arms = {(a["cell"], a["history"]): a for a in score["arms"]}
    names = [[reference, h] for h in HISTORIES]
    pair = next(p for p in score["pairs"] if [p["first"], p["second"]] == names)
    place = (score["fixture"]["name"], *(score[name] for name in _STUDY[1:]))
    mine = [r for r in table if tuple(r[name] for name in _STUDY) == place]
    told = {r["surface"]: r for r in mine if r["quantity"] == ELEMENTS}
    files = [open_tensors(path) for path in tensors_of(source, reference)]
    surfaces = []
    with files[0] as first, files[1] as second:
        for surface in SURFACES:
            both = [f.read(surface) for f in (first, second)]
            for history, x in zip(HISTORIES, both, strict=True):
                if sha256_array(x) != arms[reference, history]["surfaces"][surface]:
                    raise _refused(source, f"{surface} of {reference}/{history} is not what was scored")
            found = [(int(r), int(c)) for r, c in np.argwhere(bits(both[0]) != bits(both[1]))]
            row = told.get(surface)
            if row is None or len(found) != row["measured_number"]:
                raise _refused(source, f"{len(found)} elements of {surface} differ, and the table has another number")
            published = None if row["published_number"] is None else int(row["published_number"])
            surfaces.append(Surface(surface, found, pair["predicted_rows"][surface], both[0].shape[1], published))
    return Study(f"{where(mine[0], table)}, {reference}", place, surfaces)


def _refused(source: Path, what: str) -> InputError:
    return InputError(
        what, where=str(source), limit="a figure shows what the table counts", way_out="make score and table again"
    )


def draw(studies: Sequence[Study]) -> Figure:
    """A panel a study; in it a line a row that may differ, with a mark at each element that does."""
    inches = [_PITCH * sum(_lines(s) for s in study.surfaces) for study in studies]
    figure = sheet(_TOP + sum(inches) + _HEAD * len(studies) + _FOOT)
    if not studies:
        note(figure.add_subplot(), "no lane is configured")
    top = _TOP
    for study, size in zip(studies, inches, strict=True):
        top += _HEAD
        head(figure, top - 0.06, study.name)
        left, right = _SIDES
        axes = place(figure, left, top, WIDTH - left - right, size)
        _study(axes, study)
        if study is studies[0]:
            say(figure, WIDTH - 0.05, top - 0.06, "elements that differ", ha="right", color=GREY, size=8)
        top += size
    if studies:
        wide = ", ".join(f"{_NAMES[s.name]} {s.columns:,}" for s in studies[-1].surfaces)
        axes.tick_params(labelbottom=True, axis="x", length=3)
        axes.set_xlabel(f"column of the element, as a share of all columns\n({wide})")
    return figure


def _lines(surface: Surface) -> float:
    return max(1, len(surface.rows)) + _GAP


def _study(axes: Axes, study: Study) -> None:
    labels: list[tuple[float, str]] = []
    y = 0.0
    for surface in study.surfaces:
        rows = surface.rows
        _total(axes, surface, y + (max(1, len(rows)) - 1) / 2)
        if not rows:
            labels.append((y, _NAMES[surface.name]))
            axes.text(0.5, y, "no row may differ, and none does", ha="center", va="center", color=GREY, style="italic")
        for i, row in enumerate(rows):
            what = "token" if surface.name == "final" else "route"
            labels.append((y + i, f"{_NAMES[surface.name]}  {what} {row}" if i == 0 else f"{what} {row}"))
            _row(axes, study, surface, row, y + i)
        y += _lines(surface)
    axes.set(xlim=(0, 1), ylim=(y - _GAP - 0.4, -0.6))
    axes.set_yticks([at for at, _ in labels], [label for _, label in labels])
    axes.tick_params(axis="both", length=0)
    axes.tick_params(labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _total(axes: Axes, surface: Surface, y: float) -> None:
    """How many elements of a surface differ, and how many did in the source study."""
    weight = "bold" if surface.elements else "normal"
    axes.annotate(
        f"{len(surface.elements):,}", (1, y), xytext=(56, 0), ha="right", va="center", weight=weight, **_BESIDE
    )
    if surface.published is not None:
        axes.annotate(
            f"published {surface.published}", (1, y), xytext=(62, 0), va="center", color=GREY, size=8, **_BESIDE
        )


def _row(axes: Axes, study: Study, surface: Surface, row: int, y: float) -> None:
    columns = [c for r, c in surface.elements if r == row]
    axes.plot([0, 1], [y, y], color=FAINT, lw=0.7, zorder=1)
    x = (np.array(columns, float) + 0.5) / surface.columns
    axes.plot(
        x, np.full(len(x), y), "|", color=DARK, ms=8, mew=0.8, gid=identity("elements", *study.place, surface.name, row)
    )
    axes.annotate(f"{len(columns)}", (1, y), xytext=(6, 0), va="center", color=GREY, size=8, **_BESIDE)
