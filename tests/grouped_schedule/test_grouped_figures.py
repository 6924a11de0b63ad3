# SPDX-License-Identifier: Apache-2.0
"""Study B's figures draw the numbers of their tables, and published ones beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from routeblock import tables as writer
from routeblock.figure_style import Given, Row, identity, look
from routeblock.grouped_schedule import figure_confirmation, figure_discovery
from routeblock.grouped_schedule.figure_marks import WHERE
from routeblock.grouped_schedule.figures import FIGURES
from routeblock.grouped_schedule.tables import TABLES

DEVICES = (("cpu", "cpu0"), ("recorded-h200", "gpu0"), ("recorded-h200", "gpu1"), ("cuda", "gpu0"))


def _row(lane: str, device: str, family: str, slots: int, scope: str, schedule: str, n: int) -> Row:
    where: Row = dict(zip(WHERE[:5], (lane, device, family, slots, 32), strict=True))
    where |= {"scope": scope, "schedule": schedule, "baseline": "job_major"}
    change = (n * 7 % 23) - 11 + n / 64
    row = where | {"n": 12, "change_percent": change, "low_percent": change - 0.5, "high_percent": change + 0.25}
    row |= {"floor_low_percent": -0.125, "floor_high_percent": 0.0625}
    row["verdict"] = "slower" if change > 1.5 else "faster" if change < -1.25 else "undecided"
    if (schedule, scope) == ("band32", "inclusive"):
        for gpu in (0, 1):
            row |= {f"v100_gpu{gpu}_change": -4.21 + gpu, f"v100_gpu{gpu}_low": -4.24, f"v100_gpu{gpu}_high": -3.17}
    return row


def _rows(name: str, devices: tuple[tuple[str, str], ...] = DEVICES) -> list[Row]:
    schedules = ("band32",) if name == "confirmation" else ("expert_sorted", "band4", "band32")
    shapes = (("independent", 64), ("independent", 256)) + ((("paired", 16),) if name == "discovery" else ())
    arms = [(f, s, x, a) for f, s in shapes for x in ("inclusive", "compute") for a in schedules]
    return [_row(*d, *arm, n=i) for i, (d, arm) in enumerate((d, arm) for d in devices for arm in arms)]


def _table(name: str, folder: Path, rows: list[Row]) -> Path:
    return writer.write(folder, name, TABLES[name].columns, rows, title=name)[0]


def _full(name: str, rows: list[Row]) -> list[Row]:
    return [{column.name: row.get(column.name) for column in TABLES[name].columns} for row in rows]


def _drawn(name: str, rows: list[Row]) -> tuple[Figure, dict[str, Any]]:
    with look():
        figure = FIGURES[name].draw(_full(name, rows))
    return figure, {str(a.get_gid()): a for a in figure.findobj() if a.get_gid()}


def test_the_columns_are_the_tables() -> None:
    for name, drawing in (("confirmation", figure_confirmation), ("discovery", figure_discovery)):
        assert set(drawing.COLUMNS) <= {column.name for column in TABLES[name].columns}


@pytest.mark.parametrize("name", list(FIGURES))
def test_figures_are_equal_when_made_twice(name: str, tmp_path: Path, words: Callable[[Path], str]) -> None:
    table = _table(name, tmp_path, _rows(name))
    made = [FIGURES[name].write(Given([table]), tmp_path / out) for out in ("a", "b")]
    for first, second in zip(*made, strict=True):
        assert first.read_bytes() == second.read_bytes()
    told = words(made[0][0])
    assert "64 slots, pool 32" in told and "job_major" in told and "gpu1" in told
    if name == "confirmation":
        assert "-4.21 [-4.24, -3.17]" in told and "V100 GPU 1, published" in told


@pytest.mark.parametrize("name", list(FIGURES))
def test_every_estimate_stands_at_its_number(name: str) -> None:
    rows = _rows(name)
    _, marks = _drawn(name, rows)
    for row in rows:
        mark = marks[identity("change", *(row[n] for n in WHERE))]
        assert list(mark.get_xdata()) == [row["change_percent"]]
        assert mark.get_marker() == {"slower": ">", "faster": "<", "undecided": "o"}[row["verdict"]]
    published = {k: m for k, m in marks.items() if k.startswith("published/")}
    assert {float(m.get_xdata()[0]) for m in published.values()} == {-4.21, -3.21}
    assert not any("/cpu/" in k for k in published)


@pytest.mark.parametrize("name", list(FIGURES))
def test_no_estimate_is_no_mark_and_fewer_lanes_are_drawn(name: str) -> None:
    rows = _rows(name, DEVICES[:1])
    empty = {f"{end}_percent": None for end in ("change", "low", "high", "floor_low", "floor_high")}
    rows[0] |= empty | {"verdict": "too few accepted"}
    figure, marks = _drawn(name, rows)
    assert identity("change", *(rows[0][n] for n in WHERE)) not in marks
    assert len([k for k in marks if k.startswith("change/")]) == len(rows) - 1
    if name == "confirmation":
        told = [t.get_text() for t in figure.findobj() if hasattr(t, "get_text")]
        assert "too few accepted" in told and "This CPU" in told
    figure, marks = _drawn(name, [])
    assert not marks and any(getattr(t, "get_text", str)() == "no lane is configured" for t in figure.findobj())
