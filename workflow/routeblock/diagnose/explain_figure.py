# SPDX-License-Identifier: Apache-2.0
"""Figure `explain`: two summation trees of one element, and how their rounding errors drift to two sides of a boundary.

Above, each tree from its tensor-core steps down to its sum: a row of steps a warp, then the bars of what is added.
Below, the sum of all rounding errors so far; where it ends, beside the boundary, decides the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from routeblock.diagnose.summation_tree import Kind
from routeblock.figure_style import DARK, FAINT, GREY, INK, LIGHT, MID, WIDTH, key, note, place, say, sheet

Document = Mapping[str, Any]
_LEFT, _RIGHT = 0.62, 0.24  # inches, margins
_WIDE = WIDTH - _LEFT - _RIGHT
_TAIL = 1.05  # the drift goes on beyond K: over warps and slices
_ROW, _BAR, _GAP = 0.16, 0.2, 0.07  # inches: a warp's steps, a sum's bar, between
_KEY, _HEAD, _TITLE, _DRIFT, _FOOT = 0.26, 0.3, 0.34, 1.75, 0.5
_OWN = (DARK, MID)
_STYLE = ("-", (0, (4, 1.2)))


def draw(document: Document) -> Figure:
    """The origin of an explanation: both trees and their drift."""
    origin = document["chain"][-1]
    heights = [_tree_height(tree) for tree in origin["trees"]]
    figure = sheet(_KEY + _HEAD + sum(_TITLE + h for h in heights) + _FOOT + _TITLE + _DRIFT + _FOOT)
    handles: list[Any] = [
        Patch(facecolor=LIGHT, label="shared by both"),
        Patch(facecolor=DARK, label="in A alone"),
        Patch(facecolor=MID, label="in B alone"),
    ]
    key(figure, handles, 3)
    where = f"{origin['surface'].upper()} element [{origin['row']}, {origin['column']}], expert {origin['expert']}"
    say(figure, 0.05, _KEY + 0.2, f"{where}: two ways to add {_products(origin)} products", weight="bold", size=9.5)
    top = _KEY + _HEAD
    for side, (tree, height) in enumerate(zip(origin["trees"], heights, strict=True)):
        facts, output = origin["sides"][side], origin["outputs"][side]
        slices = len(facts["slices"])
        cut = "one slice" if slices == 1 else f"{slices} slices"
        said = f"{'AB'[side]}  block {facts['block']}, tile {facts['tile']}, {cut}"
        say(figure, 0.05, top + 0.24, said, size=8.5, weight="bold", color=_OWN[side])
        say(
            figure,
            WIDTH - 0.05,
            top + 0.24,
            f"= {output['bits']} = {float(output['number']):.6g}",
            size=8.5,
            ha="right",
        )
        axes = place(figure, _LEFT, top + _TITLE, _WIDE / _TAIL, height)
        _draw_tree(axes, tree, side, origin)
        top += _TITLE + height
    axes.set_xlabel("k")
    axes.set_xticks(_ticks(_products(origin)))
    axes.tick_params(labelbottom=True, bottom=True)
    top += _FOOT
    say(figure, 0.05, top + 0.2, "Rounding errors, added up in the order of K, then over warps and slices", size=8.5,
        weight="bold")  # fmt: skip
    _draw_drift(place(figure, _LEFT, top + _TITLE, _WIDE, _DRIFT), origin)
    return figure


def _ticks(last: int) -> list[int]:
    """Round places along K: 6 to 12 of them."""
    return [*range(0, last + 1, max(1, 2 ** int(np.log2(last / 6))))]


def _products(origin: Document) -> int:
    return int(origin["trees"][0]["nodes"][-1]["k"][1])


def _levels(tree: Document) -> list[list[Document]]:
    """The sums below the steps, in rows of bars: warps of each slice, then slices as they are added."""
    nodes = tree["nodes"]
    warps = [n for n in nodes if n["operation"] == Kind.WARPS]
    rows: list[list[Document]] = []
    by_slice: dict[int, list[Document]] = {}
    for node in warps:
        by_slice.setdefault(node["slice"], []).append(node)
    for level in range(max(map(len, by_slice.values()))):
        rows.append([sums[level] for sums in by_slice.values() if level < len(sums)])
    rows += [[n] for n in nodes if n["operation"] in (Kind.SLICES, Kind.BETWEEN)]
    return [*rows, [nodes[-1]]]


def _tree_height(tree: Document) -> float:
    warps = int(tree["thread_k"]) // 32
    levels = _levels(tree)
    shown = len(levels) if len(levels) <= 8 else 8
    return warps * _ROW + _GAP + shown * (_BAR + _GAP)


def _draw_tree(axes: Axes, tree: Document, side: int, origin: Document) -> None:
    nodes, warps = tree["nodes"], tree["thread_k"] // 32
    last = nodes[-1]["k"][1]
    axes.set_xlim(0, last)
    axes.set_ylim(_tree_height(tree), 0)
    steps = [n for n in nodes if n["operation"] == Kind.STEP]
    for shared, colour in ((True, LIGHT), (False, _OWN[side])):
        patches = [
            Rectangle((n["k"][0], n["warp"] * _ROW + 0.02), n["k"][1] - n["k"][0], _ROW - 0.05)
            for n in steps
            if n["shared"] == shared
        ]
        axes.add_collection(PatchCollection(patches, facecolor=colour, edgecolor="white", lw=0.25))
    for warp in range(warps):
        axes.text(-last * 0.012, warp * _ROW + _ROW / 2, f"warp {warp}", ha="right", va="center", size=7.5)
    top = warps * _ROW + _GAP
    levels = _levels(tree)
    if len(levels) > 8:  # many slices: the first and last sums stand for all
        levels = [*levels[:6], levels[-2], levels[-1]]
    for row in levels:
        for node in row:
            _bar(axes, node, top, side, _text(node, nodes, origin["rounding"][("first", "second")[side]]))
        top += _BAR + _GAP
    parting = origin.get("parting") or []
    if len(parting) == 2 and parting[side] is not None and "k_tile" in parting[side]:
        at = parting[side].get("group_before", parting[side])["k"][0]
        axes.plot(
            [at, at], [-0.04, warps * _ROW + 0.03], color=INK, lw=0.7, ls=(0, (1.5, 1.5)), clip_on=False, zorder=0
        )
    for start in sorted({n["k"][0] for n in nodes if n["operation"] == Kind.WARPS} - {0}):
        axes.plot([start, start], [0, warps * _ROW], color=INK, lw=1.1, clip_on=False)
        axes.plot([start], [-0.03], "v", color=INK, ms=4, clip_on=False)
    axes.set_yticks([])
    axes.tick_params(labelbottom=False, bottom=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _text(node: Document, nodes: Sequence[Document], rounding: Document) -> str:
    """What a bar says, from the shortest to the longest that may fit."""
    operation, result = Kind(node["operation"]), node["result"]
    if operation == Kind.WARPS:
        below = nodes[node["operands"][1]]
        rest = f"warp {below['warp']}" if below["operation"] == Kind.STEP else f"(warps from {below['warp']} on)"
        return f"warp {node['warp']} + {rest} = {result}"
    if operation == Kind.SLICES:
        return f"slice {node['slice']} + those above it = {result}"
    if operation == Kind.BETWEEN:
        return f"rounded between slices = {result}"
    return f"rounded to {rounding['output']['bits']}"


def _bar(axes: Axes, node: Document, top: float, side: int, text: str) -> None:
    first, stop = node["k"]
    output = node["operation"] == Kind.OUTPUT
    colour = LIGHT if node["shared"] else _OWN[side]
    last = axes.get_xlim()[1]
    inset = last * 0.003
    axes.add_patch(
        Rectangle((first + inset, top), stop - first - 2 * inset, _BAR, facecolor="none" if output else colour,
                  edgecolor=colour, lw=0.9)
    )  # fmt: skip
    ink = INK if output or node["shared"] else "white"
    room = (stop - first) / last * _WIDE * 72 / (0.62 * 7)  # characters of 7 points
    shown = next((t for t in (text, text.rpartition(" = ")[2], "") if len(t) < room), "")
    axes.text((first + stop) / 2, top + _BAR / 2, shown, ha="center", va="center", size=7, color=ink)


def _errors(tree: Document) -> tuple[list[float], list[float]]:
    """Where along K each addition ends, and the sum of all errors up to it; the sums of warps and slices come last."""
    nodes = tree["nodes"][:-1]
    steps = sorted((n for n in nodes if n["operation"] == Kind.STEP), key=lambda n: n["k"])
    rest = [n for n in nodes if n["operation"] != Kind.STEP]
    last = tree["nodes"][-1]["k"][1]
    x, y, total = [0.0], [0.0], 0.0
    for node in steps:
        total += _number(node["error"])
        x.append(node["k"][1])
        y.append(total)
    for count, node in enumerate(rest, 1):
        total += _number(node["error"])
        x.append(last * (1 + (_TAIL - 1) * count / len(rest)))
        y.append(total)
    return x, y


def _number(text: str) -> float:
    """A value as the document writes it: hexadecimal, or an integer times a power of two."""
    if "*" in text:
        integer, power = text.split(" * 2^")
        return float(np.ldexp(float(int(integer)), int(power)))
    return float.fromhex(text)


def _draw_drift(axes: Axes, origin: Document) -> None:
    if origin["cause"] != "shape":
        note(axes, "the products differ: their errors do not compare")
        return
    runs = [_errors(tree) for tree in origin["trees"]]
    last = _products(origin)
    rounding = origin["rounding"]
    exact = _number(origin["trees"][0]["exact_sum"])
    power = int(np.floor(np.log10(max(max(map(abs, y)) for _, y in runs) or 1)))
    unit = 10.0**power
    for side, (x, y) in enumerate(runs):
        axes.step(x, [v / unit for v in y], where="post", color=_OWN[side], lw=1.3, ls=_STYLE[side], zorder=3 + side)
        axes.plot([x[-1]], [y[-1] / unit], "o", color=_OWN[side], ms=5, zorder=6, clip_on=False)
        axes.annotate("AB"[side], (x[-1], y[-1] / unit), xytext=(5, 0), textcoords="offset points", va="center",
                      color=_OWN[side], weight="bold", size=8.5, annotation_clip=False)  # fmt: skip
    if "boundary" in rounding:
        at = (_number(rounding["boundary"]) - exact) / unit
        axes.axhline(at, color=INK, lw=0.9)
        outputs = sorted(
            (float(rounding[n]["output"]["number"]), rounding[n]["output"]["bits"]) for n in ("first", "second")
        )
        low, high = axes.get_ylim()
        low, high = min(low, at - 0.12 * (high - low)), max(high, at + 0.12 * (high - low))
        axes.set_ylim(low, high)
        axes.axhspan(at, high, color=FAINT, alpha=0.45, lw=0, zorder=0)
        for (_, bits), offset, va in zip(outputs, (-3, 3), ("top", "bottom"), strict=True):
            axes.annotate(f"rounds to {bits}", (last * 0.01, at), xytext=(0, offset), textcoords="offset points",
                          va=va, size=7.5, color=INK)  # fmt: skip
    axes.axhline(0, color=GREY, lw=0.5, ls=":")
    axes.set_xlim(0, last * _TAIL)
    axes.set_xticks(_ticks(last))
    axes.set_xlabel("k")
    axes.set_ylabel(f"error ($10^{{{power}}}$)")
