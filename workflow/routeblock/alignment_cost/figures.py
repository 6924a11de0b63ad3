# SPDX-License-Identifier: Apache-2.0
"""The figure of the cost: canonical order and torch.sort over native alignment, and what a reviewer asks next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from routeblock.declared import by_name
from routeblock.figure_style import (
    DARK,
    FAINT,
    GREY,
    INK,
    LIGHT,
    MID,
    PAPER,
    SMALL,
    Row,
    TableFigure,
    identity,
    key,
    note,
    place,
    sheet,
)

COLUMNS = (
    *("campaign", "role", "experts", "top_k", "tokens", "mode", "verdict", "margin_percent"),
    *("ratio", "low", "high", "sort_ratio", "sort_low", "sort_high", "sort_verdict"),
    *("floor_low", "floor_high", "native_growth", "canonical_growth", "target", "reached"),
)
_LEFT, _RIGHT, _WIDE = 0.46, 3.22, 2.1  # inches
_TICKS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
# A verdict is the filling of a marker: full, empty (see _face), half.
_FILL: dict[str | None, Literal["full", "left"]] = {
    "non-inferior": "full",
    "inferior": "full",
    "undecided": "left",
    None: "full",
}
_ENDS = ("ratio", "low", "high")
_CLOCKS = {"graph": ("o", "-"), "stream": ("s", (0, (1, 1.2))), "host": ("x", "-")}
_NAMES = {"canonical": "canonical", "sort": "torch.sort"}
_ARMS = {"canonical": ("", DARK), "sort": ("sort_", MID)}
_SHAPES = (("o", DARK), ("s", MID), ("^", GREY), ("D", INK), ("v", MID), ("P", GREY))


def alignment_cost(rows: Sequence[Row]) -> Figure:
    """What does canonical alignment cost by number of tokens, and what does the host pay?

    Time of canonical alignment and of ``torch.sort`` as ratios to native alignment, by number of tokens, with
    bootstrap intervals, the non-inferiority margin and the verdicts, for the alignment alone and for the whole
    layer; the growth of times over the smallest M; and the host's time to enqueue a call, which has no verdict.
    **Recorded**: observed on an H200 under a protocol committed before the measurement. A ratio nearer to 1 than
    the A/A floor says nothing.
    """
    figure = sheet(7.9)
    key(figure, _keys(), 4)
    left, (upper, lower) = place(figure, _LEFT, 0.72, _WIDE, 1.92), _broken(figure)
    operator, layer = (_bound(rows, name) for name in ("operator", "layer"))
    _ratios(left, operator, ("graph", "stream"), "Alignment alone")
    left.set_yscale("log")
    _plain(left, (0.1, 0.2, 0.5, 1, 2, 5, 10))
    _ratios(upper, layer, ("graph", "stream"), "Whole layer", arms=("sort",))
    _ratios(lower, layer, ("graph", "stream"), "", arms=("canonical",))
    upper.tick_params(labelbottom=False)
    upper.set_xlabel("")
    for axes, beside in ((left, operator), (lower, layer)):
        _margin(axes, beside)
    _target(left, operator)
    growth = [place(figure, x, 3.68, _WIDE, 1.55) for x in (_LEFT, _RIGHT)]
    for axes, mine, title in zip(growth, (operator, layer), ("Growth, alignment", "Growth, layer"), strict=True):
        _growth(axes, [r for r in mine if r["mode"] == "graph"], title)
    host, shapes = (place(figure, x, 5.9, _WIDE, 1.4) for x in (_LEFT, _RIGHT))
    _ratios(host, operator, ("host",), "Enqueueing, host's clock")
    host.set_xlabel("tokens M\nno verdict")
    host.set_yscale("log")
    _plain(host, (0.5, 1, 2, 5, 10, 20))
    host.set_ylim(0.6, 24)
    _other_shapes(shapes, rows)
    return figure


def _bound(rows: Sequence[Row], campaign: str) -> list[Row]:
    return [r for r in rows if (r["campaign"], r["role"]) == (campaign, "bound")]


def _broken(figure: Figure) -> tuple[Axes, Axes]:
    """Two panels over one another: ratios of another size above those next to 1."""
    return place(figure, _RIGHT, 0.72, _WIDE, 0.6), place(figure, _RIGHT, 1.6, _WIDE, 1.04)


def _keys() -> list[Line2D]:
    def line(label: str, **style: Any) -> Line2D:
        look: dict[str, Any] = {"color": DARK, "lw": 1, "ms": 4.5} | style
        return Line2D([], [], label=label, **look)

    return [
        line("canonical", marker="o"),
        line("torch.sort", marker="o", color=MID, mfc=PAPER),
        line("graph replay", marker="o", color=INK),
        line("stream", marker="s", color=INK, ls=(0, (1, 1.2))),
        line("non-inferior", marker="o", color=INK, ls=""),
        line("inferior", marker="o", color=INK, ls="", mfc=PAPER),
        line("undecided", marker="o", color=INK, ls="", fillstyle="left", markerfacecoloralt=PAPER),
        line("A/A floor", color=LIGHT, lw=6),
    ]


def _ratios(
    axes: Axes, rows: Sequence[Row], clocks: Sequence[str], title: str, arms: Sequence[str] = tuple(_ARMS)
) -> None:
    """Ratios to native with their intervals, over M; the band is native against itself."""
    axes.set_title(title)
    _tokens(axes)
    if not rows:
        note(axes, "not measured")
    for clock in clocks:
        here = [r for r in rows if r["mode"] == clock and r["ratio"] is not None]
        if clock == clocks[0] and here and "canonical" in arms:
            x = [r["tokens"] for r in here]
            low, high = ([r[f"floor_{end}"] for r in here] for end in ("low", "high"))
            axes.fill_between(x, low, high, color=LIGHT, lw=0, alpha=0.75, gid=identity("floor", title, clock))
        for arm in arms:
            _series(axes, here, arm, clock)
    axes.axhline(1, color=GREY, lw=0.7, zorder=0)
    if "canonical" in arms:
        axes.set_ylabel("time / native time")


def _series(axes: Axes, rows: Sequence[Row], arm: str, clock: str) -> None:
    (prefix, color), (marker, dashes) = _ARMS[arm], _CLOCKS[clock]
    found = [r for r in rows if r[f"{prefix}ratio"] is not None]
    if not found:
        return
    x, ratio, low, high = ([r[name] for r in found] for name in ("tokens", *(prefix + n for n in _ENDS)))
    below = [r - end for r, end in zip(ratio, low, strict=True)]
    above = [end - r for r, end in zip(ratio, high, strict=True)]
    axes.errorbar(x, ratio, yerr=[below, above], color=color, lw=0.9, ls=dashes, capsize=1.6)
    if clock != "stream":
        middle = 2 * len(found) // 3
        is_low = arm == "sort" and found[0]["campaign"] == "layer"  # below it the panel ends
        beside: dict[str, Any] = {"xytext": (0, 20 if is_low else -19), "textcoords": "offset points", "ha": "center"}
        axes.annotate(_NAMES[arm], (x[middle], ratio[middle]), color=color, size=SMALL, **beside)
    for verdict in dict.fromkeys(r[f"{prefix}verdict"] for r in found):
        mine = [r for r in found if r[f"{prefix}verdict"] == verdict]
        (line,) = axes.plot([r["tokens"] for r in mine], [r[f"{prefix}ratio"] for r in mine], marker, color=color)
        line.set(ls="", ms=3.8, mew=0.9, fillstyle=_FILL[verdict], markerfacecoloralt=PAPER)
        line.set(gid=identity(mine[0]["campaign"], "bound", clock, arm, verdict), markerfacecolor=_face(verdict, color))


def _face(verdict: str | None, color: str) -> str:
    return PAPER if verdict == "inferior" else color


def _margin(axes: Axes, rows: Sequence[Row]) -> None:
    for margin in sorted({r["margin_percent"] for r in rows}):
        axes.axhline(1 + margin / 100, color=INK, lw=1, ls=(0, (4, 2)), gid=identity("margin", margin))
        axes.annotate(
            f"margin +{margin:g} %",
            (1, 1 + margin / 100),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2.5),
            textcoords="offset points",
            ha="right",
            fontsize=SMALL,
        )
    judged = [r["verdict"] for r in rows if r["verdict"]]
    told = [f"{v} {judged.count(v)} of {len(judged)}" for v in _FILL if v and v in judged]
    axes.set_xlabel("\n".join(["tokens M", *told]))


def _target(axes: Axes, rows: Sequence[Row]) -> None:
    """The largest ratio that the protocol allows, at the points that it binds, and how many keep to it."""
    bound = [r for r in rows if r["target"] is not None]
    if not bound:
        return
    x, y = [r["tokens"] for r in bound], [r["target"] for r in bound]
    axes.plot(x, y, color=GREY, lw=0.9, ls=(0, (2, 1.5)), drawstyle="steps-post", gid=identity("target"))
    axes.annotate("target", (x[0], y[0]), xytext=(-3, 2), textcoords="offset points", fontsize=SMALL, color=GREY)
    kept = sum(bool(r["reached"]) for r in bound)
    axes.set_xlabel(f"{axes.get_xlabel()}\ntarget kept at {kept} of {len(bound)}")


def _growth(axes: Axes, rows: Sequence[Row], title: str) -> None:
    axes.set_title(title)
    _tokens(axes)
    if not rows:
        note(axes, "not measured")
        return
    for arm, color, marker, size in (("native", GREY, "s", 4.6), ("canonical", DARK, "o", 2.6)):
        found = [r for r in rows if r[f"{arm}_growth"] is not None]
        (line,) = axes.plot([r["tokens"] for r in found], [r[f"{arm}_growth"] for r in found], color=color, lw=0.9)
        line.set(marker=marker, ms=size, label=arm, gid=identity("growth", title, arm))
        line.set(mfc=PAPER if arm == "native" else color)
    axes.set_yscale("log")
    top = max(r[f"{arm}_growth"] or 1 for r in rows for arm in ("native", "canonical"))
    _plain(axes, (1, 2, 5, 10) if top < 20 else (1, 3, 10, 30, 100, 300))
    axes.set_ylabel("time / time at smallest M")
    axes.legend(loc="upper left", handlelength=1.6, borderaxespad=0.1)


def _other_shapes(axes: Axes, rows: Sequence[Row]) -> None:
    """Canonical over native by graph at the shapes that the protocol reports and does not bind."""
    axes.set_title("Other shapes, alignment")
    _tokens(axes)
    mine = [r for r in rows if (r["campaign"], r["role"], r["mode"]) == ("operator", "reported", "graph")]
    shapes = list(dict.fromkeys((r["experts"], r["top_k"]) for r in mine))
    if not shapes:
        note(axes, "not measured")
        return
    for (experts, top_k), (marker, color) in zip(shapes, _SHAPES, strict=False):
        here = [r for r in mine if (r["experts"], r["top_k"]) == (experts, top_k) and r["ratio"] is not None]
        (line,) = axes.plot([r["tokens"] for r in here], [r["ratio"] for r in here], color=color, lw=0.8)
        line.set(marker=marker, ms=3.8, mew=0.8, label=f"E={experts} k={top_k}")
        line.set_gid(identity("operator", "reported", experts, top_k, "graph", "canonical"))
        others = [r for r in here if r["verdict"] != "non-inferior"]
        axes.plot([r["tokens"] for r in others], [r["ratio"] for r in others], ls="", marker=marker, ms=2, mfc=PAPER)
    axes.axhline(1, color=GREY, lw=0.7, zorder=0)
    axes.set_ylim(0, 1.4)
    axes.yaxis.set_major_locator(FixedLocator((0, 0.25, 0.5, 0.75, 1)))
    axes.set_ylabel("time / native time")
    axes.set_xlabel("tokens M\ngraph replay, canonical")
    axes.legend(loc="upper left", ncols=2, handlelength=1.4, columnspacing=1, labelspacing=0.2, borderaxespad=0.1)


def _tokens(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}" if x < 1024 else f"{x / 1024:.0f}k"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens M")
    axes.grid(axis="y", color=FAINT, lw=0.5)
    axes.set_axisbelow(True)


def _plain(axes: Axes, ticks: Sequence[float]) -> None:
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


FIGURES = by_name(
    TableFigure(
        "alignment_cost",
        "What canonical alignment costs",
        "Ratio of canonical to native alignment against the number of tokens, with intervals and floors. Table "
        "alignment_cost has the numbers.",
        COLUMNS,
        alignment_cost,
    )
)
