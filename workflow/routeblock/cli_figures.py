# SPDX-License-Identifier: Apache-2.0
"""The command of the figures of all studies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer


def figure(
    name: Annotated[str, typer.Argument(help="Which figure: partition, differences, trajectories, discovery, ...")],
    source: Annotated[
        list[Path],
        typer.Option(
            "--from",
            help="Its table's .parquet; for partition prediction.json, for differences score.json files; repeat.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the figure as .svg and .png, and its manifest.")],
    fixture: Annotated[list[Path] | None, typer.Option(help="A fixture's folder, for partition; repeat it.")] = None,
    table: Annotated[Path | None, typer.Option(help="The table's .parquet beside the scores, for differences.")] = None,
) -> None:
    """Draw one figure from what the workflow made, with the same bytes on every run."""
    from routeblock import figure_style
    from routeblock.alignment_cost import targets as alignment
    from routeblock.grouped_schedule import targets as grouped
    from routeblock.rule_code import FIGURES

    kinds: dict[str, Callable[[], None]] = {
        **dict.fromkeys(FIGURES, lambda: _route_block(name, source, fixture or (), table, out)),
        **dict.fromkeys(grouped.FIGURES, lambda: _grouped(name, source, out)),
        **dict.fromkeys(alignment.FIGURES, lambda: _alignment(name, source, out)),
    }
    figure_style.find(name, kinds)()


def _route_block(name: str, source: Sequence[Path], fixtures: Sequence[Path], table: Path | None, out: Path) -> None:
    from routeblock.route_block.figures import draw as figures
    from routeblock.rule_code import code

    figures.write(name, figures.Given(source, fixtures, table), out, code=code(f"figure_{name}"))


def _grouped(name: str, source: Sequence[Path], out: Path) -> None:
    from routeblock import figure_style
    from routeblock.grouped_schedule import figures
    from routeblock.rule_code import code

    figure_style.write_from_table(name, figures.FIGURES, source, out, code=code(f"figure_{name}"))


def _alignment(name: str, source: Sequence[Path], out: Path) -> None:
    from routeblock import figure_style
    from routeblock.alignment_cost import figures
    from routeblock.rule_code import code

    figure_style.write_from_table(name, figures.FIGURES, source, out, code=code(f"figure_{name}"))


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(figure)
