# SPDX-License-Identifier: Apache-2.0
"""Figure `trajectories`: which cells and histories share bits, one track a distinct output of a surface."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from routeblock.figure_style import DARK, GREY, PAPER, SMALL, WIDTH, Row, head, identity, key, note, place, sheet, where
from routeblock.route_block.facts import HISTORIES, SURFACES

COLUMNS = (
    *("fixture", "lane", "arithmetic", "point", "plan_source", "cell", "history", "replicates", "w13_grid"),
    *SURFACES,
)
_STUDY = ("fixture", "lane", "point", "plan_source")
_NAMES = {"w13": "W13", "activation": "activation", "w2": "W2", "final": "final"}
_FILL = {"H0": DARK, "H1": PAPER}
_PITCH = 0.122  # inches a row
_KEY, _HEAD, _FOOT, _LEFT, _GAP = 0.24, 0.5, 0.12, 1.14, 0.06  # inches


def tracks(text: str, replicates: int) -> list[tuple[str, int]]:
    """What a cell of the table says: the letter of each distinct output and its number of replicates."""
    found = re.findall(r"(\w+) x(\d+)", text)
    return [(letter, int(n)) for letter, n in found] or [(text, replicates)]


def draw(rows: Sequence[Row]) -> Figure:
    """Which cells and histories share bits, on every surface?

    Which cells and histories share bits. Each surface has one track per distinct output, lettered as in the table
    ``trajectories``: dots on one track have equal bits in every element. Small dots stand for some of the
    replicates of an arm that did not repeat itself, each with their number. **Modelled** on ``twin-ampere``,
    **computed** on ``twin-hopper``, **recorded** from **observed** kernels on ``recorded-h200``. On a twin
    ``native`` replays the stored plan. Tracks of different panels have nothing to do with each other.
    """
    studies: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        studies.setdefault(tuple(row[name] for name in _STUDY), []).append(row)
    height = _KEY + sum(_HEAD + _PITCH * len(mine) + _FOOT for mine in studies.values())
    figure = sheet(max(height, 1))
    key(figure, _keys(), 4)
    if not studies:
        note(figure.add_subplot(), "no lane is configured")
    top = _KEY
    width = (WIDTH - _LEFT) / len(SURFACES)
    for mine in studies.values():
        head(figure, top + 0.14, where(mine[0], rows))
        top += _HEAD
        arms = _arms(mine)
        for i, surface in enumerate(SURFACES):
            axes = place(figure, _LEFT + i * width, top, width - _GAP, _PITCH * len(arms))
            _surface(axes, arms, surface)
            axes.set_yticks(range(len(arms)), [_label(arm, arms) for arm in arms] if i == 0 else [])
        top += _PITCH * len(arms) + _FOOT
    return figure


def _arms(rows: Sequence[Row]) -> list[Row]:
    """The histories of a cell under each other, cells in the order of the table."""
    cells = list(dict.fromkeys(r["cell"] for r in rows))
    return sorted(rows, key=lambda r: (cells.index(r["cell"]), HISTORIES.index(r["history"])))


def _label(arm: Row, arms: Sequence[Row]) -> str:
    other_grid = arm["w13_grid"] != arms[0]["w13_grid"]
    cell = f"{arm['cell']}, grid {arm['w13_grid']}" if other_grid else arm["cell"]
    return f"{cell}  {arm['history']}" if arm["history"] == HISTORIES[0] else str(arm["history"])


def _surface(axes: Axes, arms: Sequence[Row], surface: str) -> None:
    axes.set_title(_NAMES[surface], fontsize=8.5, weight="normal", pad=11, loc="center")
    members: dict[str, list[int]] = {}
    found = [tracks(arm[surface], arm["replicates"]) for arm in arms]
    for y, outputs in enumerate(found):
        for letter, _ in outputs:
            members.setdefault(letter, []).append(y)
    place = {letter: x for x, letter in enumerate(sorted(members, key=lambda letter: (len(letter), letter)))}
    for letter, ys in members.items():
        axes.plot([place[letter]] * 2, [min(ys), max(ys)], color=GREY, lw=0.9, zorder=1)
        axes.annotate(letter, (place[letter], -0.5), xytext=(0, 1.5), textcoords="offset points", ha="center", size=8)
    for y, (arm, outputs) in enumerate(zip(arms, found, strict=True)):
        for letter, n in outputs:
            whole = len(outputs) == 1
            (dot,) = axes.plot([place[letter]], [y], "o", ms=4.6 if whole else 2.6, color=DARK, mew=0.9, zorder=2)
            dot.set(markerfacecolor=_FILL[arm["history"]], gid=_gid(arm, surface, letter, n))
            if not whole:
                beside: dict[str, Any] = {"xytext": (2.5, 0), "textcoords": "offset points", "va": "center"}
                axes.annotate(str(n), (place[letter], y), size=SMALL, **beside)
    for band in range(0, len(arms), 2 * len(HISTORIES)):
        axes.axhspan(band - 0.5, min(band + len(HISTORIES), len(arms)) - 0.5, color="#f0f2f4", lw=0, zorder=0)
    axes.set(xlim=(-0.6, max(5, len(members) - 1) + 0.7), ylim=(len(arms) - 0.5, -0.5), xticks=[], yticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _gid(arm: Row, surface: str, letter: str, n: int) -> str:
    names = (arm[name] for name in ("lane", "point", "plan_source", "cell", "history"))
    return identity("bits", *names, surface, letter, n)


def _keys() -> list[Line2D]:
    def dot(label: str, **style: Any) -> Line2D:
        look: dict[str, Any] = {"ms": 4.6, "mew": 0.9} | style
        return Line2D([], [], ls="", marker="o", color=DARK, label=label, **look)

    return [
        dot("H0"),
        dot("H1", markerfacecolor=PAPER),
        dot("some replicates", ms=2.6),
        Line2D([], [], color=GREY, marker="o", ms=3, lw=0.9, label="joined: equal bits"),
    ]
