# SPDX-License-Identifier: Apache-2.0
"""Commands of the alignment's cost: the record of a GPU, its statistics, their recount, the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeblock.cli.shared import (
    EDITS,
    CommittedRecord,
    DeclaredEdits,
    MutationsFile,
    Out,
    ProtocolFile,
    Recomputed,
    RecordFolder,
    StatisticsFile,
    TableName,
    ValidationFile,
    finish,
)

app = typer.Typer(help="What canonical alignment costs: record, statistics, recount, tables.")
PROTOCOL = Path("fixtures/protocols/alignment_cost.json")


@app.command("record")
def record_alignment(
    out: Out,
    protocol: ProtocolFile = PROTOCOL,
    seconds: Annotated[float, typer.Option(help="Begin no point after this many seconds.", min=0)] = 600.0,
) -> None:
    """Check and time canonical alignment on this machine's GPU, without Snakemake; one folder, one archive.

    $ROUTEBLOCK_EXTENSION names vLLM's MoE extension. Exits 1 if a check found something.
    """
    from routeblock.alignment_cost import record
    from routeblock.alignment_cost.study import STUDY

    wrong = record.write(out, protocol, seconds=seconds)
    finish(wrong, str(out / STUDY.archive))


@app.command("recorded")
def recorded_alignment(out: Out, source: CommittedRecord, protocol: ProtocolFile = PROTOCOL) -> None:
    """Verify a committed record on this CPU: files, batches, plans, variants. Exits 1 if something differs."""
    from routeblock.alignment_cost import verification

    wrong = verification.write(out, source, protocol)
    finish(wrong, "every batch and plan is as it should be")


@app.command("exactness")
def alignment_exactness(out: Out) -> None:
    """Compare canonical alignment on this GPU with the CPU reference, bit for bit; exit 1 if a bit differs."""
    from routeblock.alignment_cost import record

    differs = record.check_exactness(out)["differs"]
    finish([differs] if differs else [], "every bit is the reference's")


@app.command("statistics")
def alignment_statistics(out: Out, record: RecordFolder, protocol: ProtocolFile = PROTOCOL) -> None:
    """Ratios with intervals and verdicts from raw batches. Exits 1 if the record lacks what the protocol asks for."""
    from routeblock.alignment_cost.study import STUDY
    from routeblock.timing import statistics

    wrong = statistics.write(out, STUDY, [record], protocol, rule="alignment_statistics")
    finish(wrong, "the record is whole")


@app.command("validate")
def validate_alignment(
    out: Out, record: RecordFolder, statistics: Recomputed, protocol: ProtocolFile = PROTOCOL
) -> None:
    """Recount statistics and verdicts with code of its own. Exits 1 unless every value is exactly equal."""
    from routeblock.alignment_cost.study import STUDY
    from routeblock.timing import validation

    number, wrong = validation.write(out, STUDY, statistics, [record], protocol, rule="validate_alignment")
    finish(wrong, f"{number} comparisons recounted, all exactly equal")


@app.command("mutate")
def mutate_alignment(
    out: Out, record: RecordFolder, protocol: ProtocolFile = PROTOCOL, declared: DeclaredEdits = EDITS
) -> None:
    """Edit copies of a record, one each, and see them refused for the declared reasons; else exit 1."""
    from routeblock.alignment_cost.edits import ROOM
    from routeblock.alignment_cost.study import STUDY
    from routeblock.alignment_cost.verification import recompute
    from routeblock.timing import mutations

    entries = mutations.write(out, STUDY, ROOM, [record], protocol, declared, recompute, rule="alignment_mutations")
    finish(mutations.misjudged(entries), f"{len(entries)} copies judged as declared")


@app.command("table")
def alignment_table(
    name: TableName,
    out: Out,
    record: RecordFolder,
    statistics: StatisticsFile,
    validation: ValidationFile,
    mutations: MutationsFile = None,
    host: Annotated[Path | None, typer.Option(help="What bench/host_enqueue.py wrote, for its table.")] = None,
) -> None:
    """Write one table of the alignment's cost as .parquet, .csv and .md."""
    from routeblock.alignment_cost import tables

    tables.write(name, out, statistics, record, validation, mutations_file=mutations, host_file=host)
