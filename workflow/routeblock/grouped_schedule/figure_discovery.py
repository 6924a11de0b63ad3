# SPDX-License-Identifier: Apache-2.0
"""Figure `discovery`: every schedule at every shape, on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from routeblock.figure_style import DARK, FAINT, GREY, INK, LIGHT, MID, PAPER, SMALL, WIDTH, Row, identity, note
from routeblock.grouped_schedule.figure_marks import CPU, ESTIMATE, GPUS, WHERE, is_paid, key, marker

COLUMNS = (*WHERE, *ESTIMATE, *(f"v100_gpu{gpu}_change" for gpu in GPUS))
_ACROSS = 3  # devices in a row of panels
_PITCH = 0.118  # inches a schedule
_CROSSES = ("x", "+")

Line = tuple[Any, ...]


def draw(rows: Sequence[Row]) -> Figure:
    """rows: the table `discovery`. Shapes and schedules down, devices across; rows without an estimate have no mark.

    Each family has a scale of its own, and so has each lane: a CPU's would hide a GPU's.
    """
    devices = list(dict.fromkeys((r["lane"], r["device"]) for r in rows))
    families = list(dict.fromkeys(r["family"] for r in rows))
    places = {family: _places([r for r in rows if r["family"] == family]) for family in families}
    inches = [_PITCH * places[family][2] + 0.5 for family in families]
    groups = [devices[i : i + _ACROSS] for i in range(0, len(devices), _ACROSS)]
    figure = Figure(figsize=(WIDTH, max(1.5, len(groups) * (sum(inches) + 0.25) + 0.5)), layout="constrained")
    if not devices:
        note(figure.add_subplot(), "no lane is configured")
        return figure
    blocks = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for block, mine in zip(blocks, groups, strict=True):
        shape = {"nrows": len(families), "ncols": len(mine), "squeeze": False, "height_ratios": inches}
        grid = block.subplots(**shape, sharey="row")
        for family, panels in zip(families, grid, strict=True):
            here = [r for r in rows if r["family"] == family]
            for axes, device in zip(panels, mine, strict=True):
                _device(axes, [r for r in here if (r["lane"], r["device"]) == device], places[family])
            _share_scales(panels, mine)
            _label(panels[0], family, places[family])
        for axes, (lane, device) in zip(grid[0], mine, strict=True):
            axes.set_title(f"{device}\n{lane}", fontsize=8.5, weight="normal", loc="center", pad=1)
        block.supxlabel("change of time against the baseline, %", size=8.5)
    figure.legend(handles=_keys(), loc="outside upper center", ncols=4, columnspacing=1, handlelength=1.5)
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
    axes.set(ylim=(height - 0.3, -0.6))
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


def _label(axes: Axes, family: str, places: tuple[Mapping[Line, float], Sequence[tuple[float, str]], float]) -> None:
    lines, headings, _ = places
    axes.set_yticks(list(lines.values()), [line[2] for line in lines], size=SMALL)
    for at, text in headings:
        heading = axes.annotate(
            text, (0, at), xycoords=("figure fraction", "data"), xytext=(3, 0), textcoords="offset points", va="center"
        )
        heading.set(size=SMALL, weight="bold", in_layout=False)


def _keys() -> list[Line2D]:
    return [
        key("grouping paid for", marker="o"),
        key("compute only", marker="o", mfc=PAPER),
        key("faster", marker="<", color=INK),
        key("slower", marker=">", color=INK),
        key("A/A floor", color=LIGHT, ls="-", lw=4),
        key("interval", ls="-", lw=0.9),
        key("published, V100 GPU 0", marker="x", color=MID),
        key("GPU 1", marker="+", color=MID),
    ]
