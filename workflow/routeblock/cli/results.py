# SPDX-License-Identifier: Apache-2.0
"""What is done with results: verify, repair, recover, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeblock.cli.shared import Verbose, print_findings

app = typer.Typer()
Roots = Annotated[list[Path], typer.Argument(help="Folders of sealed results.")]
Sources = Annotated[
    list[Path] | None,
    typer.Option("--source", help="A file or folder of given inputs; default: those of the checkout."),
]


@app.command("verify")
def verify(
    roots: Roots,
    source: Sources = None,
    ignore_code: Annotated[
        bool, typer.Option("--ignore-code", help="Accept results of other versions of the code.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Check sealed results on bytes and name the artifact nearest the source that does not fit."""
    from routeblock.evidence import chain
    from routeblock.rule_code import RESTORED, given

    found = chain.verify(*roots, check_code=not ignore_code, sources=source or given(), elsewhere=RESTORED)
    if not found:
        print(f"{' '.join(map(str, roots))}: every artifact fits its manifest")
        return
    print_findings(found, verbose)
    raise typer.Exit(1)


@app.command("repair")
def repair(roots: Roots, source: Sources = None, verbose: Verbose = False) -> None:
    """Take away results that do not fit their manifests, and all made from them, for the workflow to make again."""
    from routeblock.evidence import chain
    from routeblock.rule_code import RESTORED, given

    done = chain.repair(*roots, sources=source or given(), elsewhere=RESTORED)
    print(f"{' '.join(map(str, roots))}: {len(done.removed)} files removed")
    for path in done.removed if verbose else ():
        print(path)
    for path, aside in done.moved:
        print(f"{path}: moved to {aside}; no manifest lists it")
    for finding in done.given:
        print(f"{finding}; given, so left as it is: restore it (git checkout), or keep it and what is made from it")


@app.command("recover")
def recover(
    results: Annotated[Path, typer.Argument(help="The results folder.")] = Path("results"),
    limit: Annotated[float, typer.Option(help="Seconds to wait for jobs that still run.", min=0)] = 3600,
) -> None:
    """After a killed workflow: wait for the jobs that it left, then clear its lock and half-written files."""
    from routeblock.recovery import recover as clear

    for line in clear(Path(), results, limit):
        print(line)


@app.command("report")
def report(
    out: Annotated[Path, typer.Option(help="Folder for routeblock.html and its manifest.")] = Path("reports"),
    results: Annotated[Path, typer.Option(help="The study's results.")] = Path("results"),
    captions: Annotated[Path, typer.Option(help="Folder of captions.")] = Path("workflow/report"),
    config: Annotated[Path, typer.Option(help="The study's settings.")] = Path("config.yaml"),
    table: Annotated[list[str] | None, typer.Option(help="A table; repeat. Default: all that are there.")] = None,
    figure: Annotated[list[str] | None, typer.Option(help="A figure; repeat. Default: all that are there.")] = None,
) -> None:
    """Write the report: one HTML file that needs no network and no other file."""
    from routeblock.report.catalogue import FIGURES, TABLES
    from routeblock.report.page import Request, in_order, present, write

    tables, figures = present(results)
    wanted = in_order(table or tables, TABLES), in_order(figure or figures, FIGURES)
    request = Request(results, captions, config, *wanted)
    print(write(out, request))
