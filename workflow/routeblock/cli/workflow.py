# SPDX-License-Identifier: Apache-2.0
"""Commands of the workflow and of those who maintain it: settings, environment, figures, what is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="What the workflow and those who maintain it run.")


@app.command("check-config")
def check_config(
    file: Annotated[Path, typer.Argument(help="The study's settings.")] = Path("config.yaml"),
) -> None:
    """Read a study's settings and refuse what does not fit, before the workflow starts. Prints nothing if all fits."""
    from routeblock.config import load

    load(file)


@app.command("environment")
def environment(
    out: Annotated[Path, typer.Option(help="Folder for environment.json and its manifest.")],
    pins: Annotated[Path, typer.Option(help="The file of pinned packages.")] = Path("envs/base.txt"),
) -> None:
    """Record interpreter, packages, CPU and system. Differs between machines: no digest may depend on it."""
    from routeblock.environment import write

    write(out, pins)


@app.command("figure")
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


@app.command("readme")
def readme(
    file: Annotated[Path, typer.Argument(help="The README.")] = Path("README.md"),
    tables: Annotated[Path, typer.Option(help="Folder of the study's tables.")] = Path("results/tables"),
    check: Annotated[
        bool, typer.Option("--check", help="Only compare; exit 1 if its figures are not the tables'.")
    ] = False,
) -> None:
    """Write the figures of the README from the tables of a study."""
    from routeblock.report.readme import update

    if not update(file, tables, check=check) and check:
        print(f"{file}: its figures are not those of {tables}; write them with routeblock workflow readme")
        raise typer.Exit(1)


@app.command("generate")
def generate(root: Annotated[Path, typer.Argument(help="The checkout.")] = Path()) -> None:
    """Write what is generated from the code: JSON schemas, captions, the README's lists of tables and figures."""
    from routeblock.generated import write

    write(root)
