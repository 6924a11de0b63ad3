# SPDX-License-Identifier: Apache-2.0
"""The command of the figures of all studies."""

from __future__ import annotations

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
    from routeblock.declared import find
    from routeblock.figure_style import Given
    from routeblock.report.catalogue import FIGURES

    find(name, FIGURES, "figure").write(Given(source, fixture or (), table), out)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(figure)
