# SPDX-License-Identifier: Apache-2.0
"""Commands of the alignment's cost: the record of a GPU, its statistics, their validation, the table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeblock.cli_shared import (
    CommittedRecord,
    Out,
    ProtocolFile,
    Recomputed,
    RecordFolder,
    StatisticsFile,
    TableName,
    add,
    report,
)

PROTOCOL = Path("fixtures/protocols/alignment_cost.json")


def record_alignment(
    out: Out,
    protocol: ProtocolFile = PROTOCOL,
    seconds: Annotated[float, typer.Option(help="Begin no point after this many seconds.", min=0)] = 600.0,
) -> None:
    """Check and time canonical alignment on this machine's GPU, without Snakemake; one folder, one archive.

    $ROUTEBLOCK_EXTENSION names vLLM's MoE extension. Exits 1 if a check found something.
    """
    from routeblock.alignment_cost import record

    wrong = record.write(out, protocol, seconds=seconds)
    report(wrong, str(out / record.FOLDER.archive))


def alignment_exactness(out: Out) -> None:
    """Compare canonical alignment on this GPU with the CPU reference, bit for bit; exit 1 if a bit differs."""
    from routeblock.alignment_cost import record

    differs = record.check_exactness(out)["differs"]
    report([differs] if differs else [], "every bit is the reference's")


def recorded_alignment(out: Out, source: CommittedRecord, protocol: ProtocolFile = PROTOCOL) -> None:
    """Prove a committed record again on this CPU: files, routings, plans, variants. Exits 1 if something differs."""
    from routeblock.alignment_cost import reprove

    wrong = reprove.write(out, source, protocol)
    report(wrong, "every plan is the recorded one")


def alignment_statistics(out: Out, record: RecordFolder, protocol: ProtocolFile = PROTOCOL) -> None:
    """Ratios with intervals and verdicts from raw batches. Exits 1 if the record lacks what the protocol asks for."""
    from routeblock.alignment_cost import statistics

    wrong = statistics.write(out, record, protocol)
    report(wrong, "the record is whole")


def validate_alignment(
    out: Out, record: RecordFolder, statistics: Recomputed, protocol: ProtocolFile = PROTOCOL
) -> None:
    """Recompute statistics and verdicts with code of its own. Exits 1 unless every value is exactly equal."""
    from routeblock.alignment_cost import validate

    number, wrong = validate.write(out, statistics, record, protocol)
    report(wrong, f"{number} comparisons recomputed, all exactly equal")


def mutate_alignment(
    out: Out,
    record: RecordFolder,
    statistics: StatisticsFile,
    protocol: ProtocolFile = PROTOCOL,
    declared: Annotated[Path, typer.Option(help="The declared edits.")] = Path("fixtures/alignment_mutations.json"),
) -> None:
    """Edit copies of a record, one each, and see them refused for the declared reasons; else exit 1."""
    from routeblock.alignment_cost import mutate

    entries = mutate.write(out, record, statistics, protocol, declared)
    wrong = [
        f"{e['name']}: {', '.join(e['found']) or 'nothing'} found, declared {', '.join(e['reasons']) or 'nothing'}"
        for e in entries
        if e["as_declared"] is False
    ]
    report(wrong, f"{len(entries)} copies judged as declared")


def alignment_table(
    name: TableName,
    out: Out,
    record: RecordFolder,
    statistics: StatisticsFile,
    mutations: Annotated[Path, typer.Option(help="Its mutations.json.")],
    validation: Annotated[Path, typer.Option(help="Its validation.json.")],
) -> None:
    """Write one table of the alignment's cost as .parquet, .csv and .md."""
    from routeblock.alignment_cost import tables

    tables.write(name, out, statistics, record, mutations, validation)


COMMANDS = (
    record_alignment,
    recorded_alignment,
    alignment_exactness,
    alignment_statistics,
    validate_alignment,
    mutate_alignment,
    alignment_table,
)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    add(app, COMMANDS)
