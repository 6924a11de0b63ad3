# SPDX-License-Identifier: Apache-2.0
"""Commands of the fast paths: the record of a GPU, its statistics, their recount, the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeblock.cli.shared import (
    EDITS,
    CommittedRecord,
    DeclaredEdits,
    Given,
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

app = typer.Typer(help="The Q6_K fast paths and their peers: record, statistics, recount, tables.")
PROTOCOL = Path("fixtures/protocols/q6k_dispatch.json")


@app.command("record")
def record_dispatch(
    out: Out,
    protocol: ProtocolFile = PROTOCOL,
    plugin: Annotated[Path | None, typer.Option(help="_C_gguf.abi3.so of vllm-gguf-plugin; without: left out.")] = None,
    llama: Annotated[Path | None, typer.Option(help="Folder of ggml's libraries; without: left out.")] = None,
    cubin: Given = None,
    schedules: Given = None,
) -> None:
    """Check, time and count the fast paths and their peers on this machine's GPU; one folder, one archive.

    Exits 1 if a check found something.
    """
    from routeblock.q6k_dispatch import record
    from routeblock.q6k_dispatch.study import STUDY

    files = record.Given(cubin, schedules, plugin, llama)
    wrong = record.write(out, protocol, files)
    finish(wrong, str(out / STUDY.archive))


@app.command("recorded")
def recorded_dispatch(out: Out, source: CommittedRecord, protocol: ProtocolFile = PROTOCOL) -> None:
    """Verify a committed record on this CPU: files, batches, jobs, plans, samples. Exits 1 if something differs."""
    from routeblock.q6k_dispatch import verification

    wrong = verification.write(out, source, protocol)
    finish(wrong, "every batch and sampled output is as it should be")


@app.command("statistics")
def dispatch_statistics(out: Out, record: RecordFolder, protocol: ProtocolFile = PROTOCOL) -> None:
    """Ratios to every peer, with intervals, from raw batches. Exits 1 if the record lacks what is asked for."""
    from routeblock.q6k_dispatch.study import STUDY
    from routeblock.timing import statistics

    wrong = statistics.write(out, STUDY, [record], protocol, rule="dispatch_statistics")
    finish(wrong, "the record is whole")


@app.command("validate")
def validate_dispatch(
    out: Out, record: RecordFolder, statistics: Recomputed, protocol: ProtocolFile = PROTOCOL
) -> None:
    """Recount statistics and verdicts with code of its own. Exits 1 unless every value is exactly equal."""
    from routeblock.q6k_dispatch.study import STUDY
    from routeblock.timing import validation

    number, wrong = validation.write(out, STUDY, statistics, [record], protocol, rule="validate_dispatch")
    finish(wrong, f"{number} comparisons recounted, all exactly equal")


@app.command("mutate")
def mutate_dispatch(
    out: Out, record: RecordFolder, protocol: ProtocolFile = PROTOCOL, declared: DeclaredEdits = EDITS
) -> None:
    """Edit copies of a record, one each, and see them refused for the declared reasons; else exit 1."""
    from routeblock.q6k_dispatch.edits import ROOM
    from routeblock.q6k_dispatch.study import STUDY
    from routeblock.q6k_dispatch.verification import recompute
    from routeblock.timing import mutations

    entries = mutations.write(out, STUDY, ROOM, [record], protocol, declared, recompute, rule="dispatch_mutations")
    finish(mutations.misjudged(entries), f"{len(entries)} copies judged as declared")


@app.command("table")
def dispatch_table(
    name: TableName,
    out: Out,
    record: RecordFolder,
    statistics: StatisticsFile,
    validation: ValidationFile,
    mutations: MutationsFile = None,
    protocol: ProtocolFile = PROTOCOL,
) -> None:
    """Write one table of the fast paths as .parquet, .csv and .md."""
    from routeblock.q6k_dispatch import tables

    tables.write(name, out, statistics, record, validation, protocol, mutations_file=mutations)
