# SPDX-License-Identifier: Apache-2.0
"""The figure of a survey: for each population, the share of routings that can change against tokens, one line a GPU;
where the twin computed a sample, the share that do, with its interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from routeblock.figure_style import DARK, GREY, INK, MID, key, place, sheet

_LEFT, _RIGHT, _WIDE, _HIGH = 0.5, 3.2, 1.95, 1.35  # inches
_TICKS = (1, 16, 256, 4096)
_LOOKS = tuple((colour, dash) for dash in ("-", (0, (3, 1.5)), (0, (1, 1.2))) for colour in (DARK, MID, GREY, INK))


def survey(rows: Sequence[dict[str, Any]]) -> Figure:
    """rows: the table `survey`. A row of panels for each population: between runs, and in a batch against alone."""
    populations = sorted({r["population"] for r in rows})
    gpus = sorted({r["gpu"] for r in rows})
    looks = dict(zip(gpus, _LOOKS * (1 + len(gpus) // len(_LOOKS)), strict=False))
    lines = 1 + (len(gpus) + 1) // 4
    figure = sheet(0.45 + 0.2 * lines + len(populations) * (_HIGH + 0.75))
    handles = [Line2D([], [], color=c, linestyle=d, label=gpu) for gpu, (c, d) in looks.items()]
    sampled = Line2D([], [], color=INK, marker="o", markersize=3, linestyle="", label="do, by the twin's sample")
    key(figure, [*handles, sampled], 4)
    for place_, name in enumerate(populations):
        top = 0.45 + 0.2 * lines + place_ * (_HIGH + 0.75)
        mine = [r for r in rows if r["population"] == name]
        runs = place(figure, _LEFT, top, _WIDE, _HIGH)
        batches = place(figure, _RIGHT, top, _WIDE, _HIGH)
        for gpu, (colour, dash) in looks.items():
            points = sorted((r for r in mine if r["gpu"] == gpu), key=lambda r: int(r["tokens"]))
            _line(runs, points, "", colour, dash)
            _line(batches, points, "batch_", colour, dash)
            _sample(runs, points, colour)
        _axes(runs, f"{name}: between runs")
        _axes(batches, f"{name}: in a batch against alone")
    return figure


def _line(axes: Axes, points: Sequence[dict[str, Any]], prefix: str, colour: str, dash: Any) -> None:
    tokens = [p["tokens"] for p in points]
    shares = [p[f"{prefix}can_share"] for p in points]
    axes.plot(tokens, shares, color=colour, linestyle=dash, linewidth=1.1)
    axes.plot(tokens, shares, "|", color=colour, markersize=3)


def _sample(axes: Axes, points: Sequence[dict[str, Any]], colour: str) -> None:
    for point in points:
        if point["sample"]:
            axes.plot([point["tokens"]] * 2, [point["do_low"], point["do_high"]], color=colour, linewidth=0.6)
            axes.plot(point["tokens"], point["do_share"], "o", color=colour, markersize=2.6)


def _axes(axes: Axes, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.04, 1.04)
    axes.set_xlim(0.8, 5200)
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_title(title, loc="left", size=7.5)
    axes.set_xlabel("tokens M")
    axes.set_ylabel("share of routings")
