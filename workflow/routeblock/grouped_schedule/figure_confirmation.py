# SPDX-License-Identifier: Apache-2.0
"""Figure `confirmation`: a forest plot of the schedule fixed in advance, published values beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from routeblock.figure_style import (
    DARK,
    FAINT,
    GREY,
    INK,
    LIGHT,
    MID,
    PAPER,
    Row,
    head,
    identity,
    key,
    note,
    place,
    sheet,
)
from routeblock.grouped_schedule.figure_marks import CPU, ESTIMATE, GPUS, WHERE, entry, is_paid, marker
from routeblock.grouped_schedule.schedules import Scope

_ENDS = ("change", "low", "high")
COLUMNS = (*WHERE, *ESTIMATE, *(f"v100_gpu{gpu}_{end}" for gpu in GPUS for end in _ENDS))
_KEY, _HEAD, _FOOT, _LINE = 0.24, 0.3, 0.46, 0.165  # inches
_LEFT, _BODY = 1.4, 1.72  # inches: labels, and the panel between them and the numbers


@dataclass(frozen=True)
class Line:
    """A line of the forest, in percent: change, low, high; the floor's ends. Without a mark: a heading."""

    label: str
    values: tuple[float, ...] | None = None
    floor: tuple[float, ...] | None = None
    verdict: str = ""
    look: dict[str, Any] | None = None
    gid: str = ""


def draw(rows: Sequence[Row]) -> Figure:
    """Does the schedule fixed in advance pay on each device?

    The schedule fixed in advance, ``band32``, against the control ``job_major``: the median of paired ratios with
    its bootstrap interval, the interval of the control against itself (A/A floor), and the published values of two
    V100s. A verdict needs the whole interval beyond the minimum effect. **Observed**: on this CPU where the lane is
    ``cpu`` (that says nothing of a GPU), **recorded** on H200s where it is ``recorded-h200``. Intervals describe
    these fixtures on these devices.
    """
    wanted = (("GPUs and published values", False), ("This CPU", True))
    panels = [(title, lines) for title, on_cpu in wanted if (lines := _lines(rows, on_cpu))]
    inches = [_HEAD + _LINE * len(lines) + _FOOT for _, lines in panels] or [1.5]
    figure = sheet(_KEY + sum(inches))
    key(figure, _keys(), 4)
    if not panels:
        note(figure.add_subplot(), "no lane is configured")
    top = _KEY
    for (title, lines), size in zip(panels, inches, strict=False):
        head(figure, top + 0.2, title)
        _forest(place(figure, _LEFT, top + _HEAD, _BODY, size - _HEAD - _FOOT), lines)
        top += size
    return figure


def _lines(rows: Sequence[Row], on_cpu: bool) -> list[Line]:
    """The lines of a panel, shape by shape; published values stand after the GPUs' inclusive ones."""
    found: list[Line] = []
    for slots, pool in dict.fromkeys((r["slots"], r["pool"]) for r in rows):
        every = [r for r in rows if (r["slots"], r["pool"]) == (slots, pool)]
        mine = [r for r in every if (r["lane"] == CPU) == on_cpu]
        told = [r for r in every if r["v100_gpu0_change"] is not None and not on_cpu][:1]
        lines = [_estimate(r) for r in mine if r["scope"] == Scope.INCLUSIVE]
        lines += [_published(r, gpu) for r in told for gpu in GPUS]
        lines += [_estimate(r) for r in mine if r["scope"] == Scope.COMPUTE]
        if lines:
            first = every[0]
            found += [Line(f"{slots} slots, pool {pool}: {first['schedule']} against {first['baseline']}"), *lines]
    return found


def _all(values: Sequence[float | None]) -> tuple[float, ...] | None:
    found = tuple(v for v in values if v is not None)
    return found if len(found) == len(values) else None


def _estimate(row: Row) -> Line:
    paid = is_paid(row)
    recording = row["lane"].removeprefix("recorded-h200").replace("-", " ")  # one of several on one device
    return Line(
        f"{row['device']}{recording}, {'grouping paid for' if paid else 'compute only'}",
        _all([row[f"{end}_percent"] for end in _ENDS]),
        _all([row[f"floor_{end}_percent"] for end in _ENDS[1:]]),
        row["verdict"],
        {"color": DARK, "marker": marker(row["verdict"]), "mfc": DARK if paid else PAPER},
        identity("change", *(row[n] for n in WHERE)),
    )


def _published(row: Row, gpu: int) -> Line:
    return Line(
        f"V100 GPU {gpu}, published",
        _all([row[f"v100_gpu{gpu}_{end}"] for end in _ENDS]),
        look={"color": MID, "marker": "D", "mfc": PAPER},
        gid=identity("published", row["slots"], row["pool"], gpu),
    )


def _forest(axes: Axes, lines: Sequence[Line]) -> None:
    axes.axvline(0, color=GREY, lw=0.8, zorder=0)
    axes.grid(axis="x", color=FAINT, lw=0.5)
    axes.set_axisbelow(True)
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "annotation_clip": False, "size": 8}
    left, right = ({"xycoords": (x, "data")} | beside for x in ("figure fraction", "axes fraction"))
    for y, line in enumerate(lines):
        weight = "normal" if line.look else "bold"
        axes.annotate(line.label, (0, y), xytext=(10 if line.look else 4, 0), weight=weight, **left)
        axes.annotate(line.verdict, (1, y), xytext=(-3, 0), ha="right", **left)
        if line.floor:
            axes.plot(line.floor, [y, y], color=LIGHT, lw=7, solid_capstyle="butt", zorder=1)
        if line.values and line.look:
            change, low, high = line.values
            axes.plot([low, high], [y, y], color=line.look["color"], lw=1.4)
            axes.plot([change], [y], ms=5, mew=1, zorder=3, gid=line.gid, **line.look)
            axes.annotate(f"{change:+.2f} [{low:+.2f}, {high:+.2f}]", (1, y), xytext=(6, 0), **right)
    axes.set(ylim=(len(lines) - 0.4, -0.6), yticks=[])
    axes.margins(x=0.08)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("change of time, %")


def _keys() -> list[Line2D]:
    return [
        entry("faster", marker="<", color=INK),
        entry("slower", marker=">", color=INK),
        entry("undecided", marker="o", color=INK),
        entry("A/A floor", color=LIGHT, ls="-", lw=6),
    ]
