# SPDX-License-Identifier: Apache-2.0
"""What the command lines of several studies share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Out = Annotated[Path, typer.Option(help="Folder to write to.")]
ProtocolFile = Annotated[Path, typer.Option("--protocol", help="The committed protocol.")]
CommittedRecord = Annotated[Path, typer.Option(help="A committed record, with its contents.json.")]
RecordFolder = Annotated[Path, typer.Option(help="The record's folder.")]
StatisticsFile = Annotated[Path, typer.Option(help="Its statistics.json.")]
Recomputed = Annotated[Path, typer.Option(help="The statistics.json to recompute.")]
DeclaredEdits = Annotated[Path, typer.Option("--declared", help="The declared edits.")]
EDITS = Path("fixtures/record_edits.json")
MutationsFile = Annotated[Path | None, typer.Option("--mutations", help="Its mutations.json, for the table of edits.")]
ValidationFile = Annotated[Path, typer.Option("--validation", help="Its validation.json.")]
TableName = Annotated[str, typer.Argument(help="Which table.")]


def report(wrong: Sequence[object], otherwise: str) -> None:
    """Print what is wrong, one line each, and end with exit code 1; print `otherwise` if nothing is."""
    for line in wrong:
        print(line)
    if wrong:
        raise typer.Exit(1)
    print(otherwise)


def add(app: typer.Typer, commands: Iterable[Callable[..., Any]]) -> None:
    """Make functions commands of `app`, by their names."""
    for command in commands:
        app.command()(command)
