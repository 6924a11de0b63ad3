# SPDX-License-Identifier: Apache-2.0
"""The figure of the engine's record: completions leave each other, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from routeblock.declared import by_name
from routeblock.figure_style import DARK, FAINT, GREY, LIGHT, MID, SMALL, Row, TableFigure, identity, place, sheet

COLUMNS = ("mode", "alignment", "batch", "token", "share")
_LEFT, _RIGHT, _WIDE = 0.62, 3.3, 1.95  # inches
_APART = 0.075  # of the axis: labels closer than this would touch
_SHADES = (GREY, LIGHT, MID, DARK)
_MARKS = ("s", "o", "D", "^")


def serving_diverged(rows: Sequence[Row]) -> Figure:
    """How many completions have diverged after so many tokens?

    Share of completions whose tokens have left those of the first repeat, by the position of the token: native and
    canonical alignment, eager and with CUDA graphs, by batch size. **Recorded** on an H200, a generated model with
    random weights: that completions diverge is the finding, the rates are this model's.
    """
    figure = sheet(2.75)
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    for mode, x in zip(modes, (_LEFT, _RIGHT), strict=False):
        axes = place(figure, x, 0.3, _WIDE, 1.75)
        axes.set_title({"eager": "Eager", "graphs": "CUDA graphs for decode"}.get(mode, mode))
        _panel(axes, [r for r in rows if r["mode"] == mode], mode)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], mode: str) -> None:
    axes.grid(axis="y", color=FAINT, lw=0.5)
    axes.set_axisbelow(True)
    sizes = list(dict.fromkeys(r["batch"] for r in rows))
    moving = [s for s in sizes if any(r["share"] > 0 for r in rows if (r["batch"], r["alignment"]) == (s, "native"))]
    for alignment in ("native", "canonical"):
        for size in sizes:
            mine = [r for r in rows if (r["alignment"], r["batch"]) == (alignment, size)]
            color = _SHADES[moving.index(size) % 4] if size in moving and alignment == "native" else GREY
            x, y = [r["token"] for r in mine], [r["share"] for r in mine]
            (line,) = axes.plot(x, y, color=color, lw=1.2, gid=identity("diverged", mode, alignment, size))
            if alignment == "canonical":
                line.set(ls=(0, (3, 2)), lw=0.9)
                continue
            line.set(marker=_MARKS[moving.index(size) % 4] if size in moving else "", ms=3.2, markevery=6)
    still = [str(s) for s in sizes if s not in moving]
    quiet = f"native, batch of {' and '.join(still)}: none\n" if still else ""
    moved = max((r["share"] for r in rows if r["alignment"] == "canonical"), default=0.0)
    axes.annotate(
        quiet + ("canonical, every batch: none" if moved == 0 else f"canonical: at most {100 * moved:.3g} %"),
        (0.03, 0.97), xycoords="axes fraction", va="top", size=SMALL,
    )  # fmt: skip
    axes.set_xlabel("token of the completion\nnumbers: batch size, native")
    axes.set_ylabel("completions diverged")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
    top = max((r["share"] for r in rows), default=0.0)
    axes.set_ylim(-0.015 * max(top, 0.1), 1.45 * max(top, 0.1))
    last = max(r["token"] for r in rows)
    axes.set_xlim(0, last * 1.14)
    ends = {size: next(r["share"] for r in rows if (r["alignment"], r["batch"], r["token"]) == ("native", size, last))
            for size in moving}  # fmt: skip
    lowest = 0.0
    for size, share in sorted(ends.items(), key=lambda item: item[1]):
        height = max(share, lowest)
        lowest = height + _APART * 1.45 * max(top, 0.1)
        axes.annotate(f"{size}", (last, height), xytext=(3, -2), textcoords="offset points", size=SMALL)


FIGURES = by_name(
    TableFigure(
        "serving_diverged",
        "Completions that have diverged, by token",
        "Share of completions that have diverged against the position of the token, native and canonical. Table "
        "serving_diverged has the numbers.",
        COLUMNS,
        serving_diverged,
    )
)
