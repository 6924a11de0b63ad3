# SPDX-License-Identifier: Apache-2.0
"""Commands of the fast paths: the record of a GPU, its proof, its statistics, the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeblock.cli_shared import (
    CommittedRecord,
    Out,
    ProtocolFile,
    RecordFolder,
    StatisticsFile,
    TableName,
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

    files = record.Given(cubin, schedules, plugin, llama)
    wrong = record.write(out, protocol, files)
    report(wrong, str(out / record.FOLDER.archive))


def recorded_dispatch(out: Out, source: CommittedRecord, protocol: ProtocolFile = PROTOCOL) -> None:
    """Prove a committed record again on this CPU: files, jobs, plans, bits of samples. Exits 1 if something differs."""
    from routeblock.q6k_dispatch import reprove

    wrong = reprove.write(out, source, protocol)
    report(wrong, "every sampled output is the recorded one")


def dispatch_statistics(out: Out, record: RecordFolder, protocol: ProtocolFile = PROTOCOL) -> None:
    """Ratios to every peer, with intervals, from raw batches. Exits 1 if the record lacks what is asked for."""
    from routeblock.q6k_dispatch import statistics

    wrong = statistics.write(out, record, protocol)
    report(wrong, "the record is whole")


def dispatch_table(
    name: TableName, out: Out, record: RecordFolder, statistics: StatisticsFile, protocol: ProtocolFile = PROTOCOL
) -> None:
    """Write one table of the fast paths as .parquet, .csv and .md."""
    from routeblock.q6k_dispatch import tables

    tables.write(name, out, statistics, record, protocol)


COMMANDS = (record_dispatch, recorded_dispatch, dispatch_statistics, dispatch_table)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    add(app, COMMANDS)
