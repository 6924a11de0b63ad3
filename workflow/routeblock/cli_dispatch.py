# SPDX-License-Identifier: Apache-2.0
"""Commands of the fast paths: the record of a GPU, its proof, its statistics, the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeblock.cli_shared import (
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
    add,
    report,
)

Given = Annotated[Path | None, typer.Option(help="Made before; default: compiled here.")]

PROTOCOL = Path("fixtures/protocols/q6k_dispatch.json")


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
    report(wrong, str(out / STUDY.archive))


def recorded_dispatch(out: Out, source: CommittedRecord, protocol: ProtocolFile = PROTOCOL) -> None:
    """Verify a committed record on this CPU: files, batches, jobs, plans, samples. Exits 1 if something differs."""
    from routeblock.q6k_dispatch import verification

    wrong = verification.write(out, source, protocol)
    report(wrong, "every batch and sampled output is as it should be")


def dispatch_statistics(out: Out, record: RecordFolder, protocol: ProtocolFile = PROTOCOL) -> None:
    """Ratios to every peer, with intervals, from raw batches. Exits 1 if the record lacks what is asked for."""
    from routeblock.q6k_dispatch.study import STUDY
    from routeblock.timing import statistics

    wrong = statistics.write(out, STUDY, [record], protocol, rule="dispatch_statistics")
    report(wrong, "the record is whole")


def validate_dispatch(
    out: Out, record: RecordFolder, statistics: Recomputed, protocol: ProtocolFile = PROTOCOL
) -> None:
    """Recount statistics and verdicts with code of its own. Exits 1 unless every value is exactly equal."""
    from routeblock.q6k_dispatch.study import STUDY
    from routeblock.timing import validation

    number, wrong = validation.write(out, STUDY, statistics, [record], protocol, rule="validate_dispatch")
    report(wrong, f"{number} comparisons recounted, all exactly equal")


def mutate_dispatch(
    out: Out, record: RecordFolder, protocol: ProtocolFile = PROTOCOL, declared: DeclaredEdits = EDITS
) -> None:
    """Edit copies of a record, one each, and see them refused for the declared reasons; else exit 1."""
    from routeblock.q6k_dispatch.edits import ROOM
    from routeblock.q6k_dispatch.study import STUDY
    from routeblock.q6k_dispatch.verification import recompute
    from routeblock.timing import mutations

    entries = mutations.write(out, STUDY, ROOM, [record], protocol, declared, recompute, rule="dispatch_mutations")
    report(mutations.misjudged(entries), f"{len(entries)} copies judged as declared")


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


COMMANDS = (
    record_dispatch,
    recorded_dispatch,
    dispatch_statistics,
    validate_dispatch,
    mutate_dispatch,
    dispatch_table,
)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    add(app, COMMANDS)
