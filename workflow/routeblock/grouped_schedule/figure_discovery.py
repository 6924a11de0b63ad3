# SPDX-License-Identifier: Apache-2.0
"""Figure `discovery`: every schedule at every shape, on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    SMALL,
    WIDTH,
    Row,
    identity,
    key,
    note,
    place,
    say,
    sheet,
)
from routeblock.grouped_schedule.figure_marks import CPU, ESTIMATE, GPUS, WHERE, entry, is_paid, marker

COLUMNS = (*WHERE, *ESTIMATE, *(f"v100_gpu{gpu}_change" for gpu in GPUS))
_ACROSS = 3  # devices in a row of panels
_PITCH = 0.118  # inches a schedule
_KEY, _HEAD, _FOOT, _LABEL = 0.42, 0.32, 0.3, 0.2  # inches, down
_LEFT, _GAP = 0.82, 0.14  # inches, across
_CROSSES = ("x", "+")

Line = tuple[Any, ...]


def draw(rows: Sequence[Row]) -> Figure:
    """Which schedule pays at which shape, on each device?

    Change of time against the baseline for every schedule at every shape: the median of paired ratios with its
    bootstrap interval, with grouping paid for and without, over the baseline against itself (A/A floor). The
    baseline is ``job_major``, in the paired family our reconstruction ``paired_incumbent``. Arrows are verdicts; a
    CPU has a scale of its own. Crosses on the GPUs' panels are the published changes of ``band32`` on two V100s.
    **Observed**: on this CPU where the lane is ``cpu`` (that says nothing of a GPU), **recorded** on H200s where it
    is ``recorded-h200``. The two scopes are an inference from published counts.
    """
    devices = list(dict.fromkeys((r["lane"], r["device"]) for r in rows))
    families = list(dict.fromkeys(r["family"] for r in rows))
    places = {family: _places([r for r in rows if r["family"] == family]) for family in families}
    inches = {family: _PITCH * places[family][2] for family in families}
    groups = [devices[i : i + _ACROSS] for i in range(0, len(devices), _ACROSS)]
    block = _HEAD + sum(inches.values()) + _FOOT * len(families) + _LABEL
    figure = sheet(max(1.5, _KEY + len(groups) * block))
    key(figure, _keys(), 4)
    if not devices:
        note(figure.add_subplot(), "no lane is configured")
    top = _KEY
    for mine in groups:
        width = (WIDTH - _LEFT) / len(mine)
        for i, (lane, device) in enumerate(mine):
            middle = _LEFT + (i + 0.5) * width - 0.5 * _GAP
            say(figure, middle, top + 0.14, f"{device}\n{lane}", size=8.5, ha="center", va="center")
        top += _HEAD
        for family in families:
            here = [r for r in rows if r["family"] == family]
            panels = [place(figure, _LEFT + i * width, top, width - _GAP, inches[family]) for i in range(len(mine))]
            for axes, device in zip(panels, mine, strict=True):
                _device(axes, [r for r in here if (r["lane"], r["device"]) == device], places[family])
            _share_scales(panels, mine)
            _label(panels[0], places[family])
            top += inches[family] + _FOOT
        say(figure, WIDTH / 2, top + 0.1, "change of time against the baseline, %", size=8.5, ha="center")
        top += _LABEL
    return figure


def _places(rows: Sequence[Row]) -> tuple[dict[Line, float], list[tuple[float, str]], float]:
    """The height of each schedule of each shape, the headings, and the height of all, in lines."""
    shapes: dict[Line, list[str]] = {}
    for r in rows:
        schedules = shapes.setdefault((r["slots"], r["pool"], r["baseline"]), [])
        schedules += [r["schedule"]] if r["schedule"] not in schedules else []
    found: dict[Line, float] = {}
    headings: list[tuple[float, str]] = []
    top = 0.0
    for (slots, pool, baseline), schedules in shapes.items():
        top += 1.1 if headings else 0.4
        headings.append((top, f"{rows[0]['family']}, {slots} slots, pool {pool}, against {baseline}"))
        for schedule in schedules:
            top += 1
            found[slots, pool, schedule] = top
        top += 1
    return found, headings, top


def _device(axes: Axes, rows: Sequence[Row], places: tuple[dict[Line, float], Any, float]) -> None:
    lines, _, height = places
    for row in rows:
        _candidate(axes, row, lines[row["slots"], row["pool"], row["schedule"]])
    axes.axvline(0, color=GREY, lw=0.8, zorder=0)
    axes.grid(axis="x", color=FAINT, lw=0.5)
    axes.set_axisbelow(True)
    axes.set(ylim=(height - 0.3, -0.6), yticks=[])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.patch.set_visible(False)  # it would cover headings that reach over from the left


def _candidate(axes: Axes, row: Row, y: float) -> None:
    """One schedule in one scope: its change and interval over the floor, and what was published of it."""
    if row["change_percent"] is None:
        return
    paid = is_paid(row)
    if paid and row["floor_low_percent"] is not None:
        floor = [row["floor_low_percent"], row["floor_high_percent"]]
        axes.plot(floor, [y, y], color=LIGHT, lw=4, solid_capstyle="butt", zorder=1)
    axes.plot([row["low_percent"], row["high_percent"]], [y, y], color=DARK, lw=0.8)
    look: dict[str, Any] = {"marker": marker(row["verdict"]), "color": DARK, "ms": 3.6, "mew": 0.8}
    look |= {"mfc": DARK, "zorder": 3} if paid else {"mfc": PAPER, "zorder": 2.5}
    axes.plot([row["change_percent"]], [y], gid=identity("change", *(row[n] for n in WHERE)), **look)
    for gpu, cross in zip(GPUS, _CROSSES, strict=True):
        if row["lane"] != CPU and (value := row[f"v100_gpu{gpu}_change"]) is not None:
            gid = identity("published", *(row[n] for n in WHERE), gpu)
            axes.plot([value], [y], cross, color=MID, ms=4, mew=1, zorder=4, gid=gid)


def _share_scales(panels: Sequence[Axes], devices: Sequence[tuple[str, str]]) -> None:
    """Devices of one lane share their scale."""
    for lane in dict.fromkeys(lane for lane, _ in devices):
        mine = [axes for axes, (on, _) in zip(panels, devices, strict=True) if on == lane]
        ends = [axes.get_xlim() for axes in mine]
        for axes in mine:
            axes.set_xlim(min(low for low, _ in ends), max(high for _, high in ends))


def _label(axes: Axes, places: tuple[Mapping[Line, float], Sequence[tuple[float, str]], float]) -> None:
    lines, headings, _ = places
    axes.set_yticks(list(lines.values()), [line[2] for line in lines], size=SMALL)
    for at, text in headings:
        heading = axes.annotate(
            text, (0, at), xycoords=("figure fraction", "data"), xytext=(3, 0), textcoords="offset points", va="center"
        )
        heading.set(size=SMALL, weight="bold", bbox={"fc": PAPER, "ec": "none", "pad": 0.6})


def _keys() -> list[Line2D]:
    return [
        entry("grouping paid for, undecided", marker="o"),
        entry("compute only, undecided", marker="o", mfc=PAPER),
        entry("faster", marker="<", color=INK),
        entry("slower", marker=">", color=INK),
        entry("A/A floor", color=LIGHT, ls="-", lw=4),
        entry("interval", ls="-", lw=0.9),
        entry("published, V100 GPU 0", marker="x", color=MID),
        entry("published, V100 GPU 1", marker="+", color=MID),
    ]
