# SPDX-License-Identifier: Apache-2.0
"""Commands of the native alignment and of the operator's record: what a GPU records, and what is proved of it again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeblock.cli_shared import CommittedRecord, Out, ProtocolFile, add, report

PROTOCOL = Path("fixtures/protocols/native.json")
Lane = Annotated[str, typer.Option(help="The lane that it becomes.")]
Summary = Annotated[Path, typer.Option(help="File to write; its manifest goes beside it.")]
FixtureFolder = Annotated[Path, typer.Option("--fixture", help="Folder of the fixture.")]


def record_native(out: Out, fixture: FixtureFolder, protocol: ProtocolFile = PROTOCOL) -> None:
    """Record what vLLM's own alignment gives, process by process under H0 and H1 by turns, without Snakemake.

    $ROUTEBLOCK_EXTENSION names vLLM's MoE extension.
    """
    from routeblock.route_block.native import record

    record.write(out, fixture, protocol)


def native_process(
    what: Annotated[str, typer.Argument(help="H0, H1 or repetition.")],
    out: Out,
    fixture: FixtureFolder,
    protocol: ProtocolFile = PROTOCOL,
) -> None:
    """One process of record-native: prepares, prints ready, and works when a line comes on stdin."""
    from routeblock.route_block.native.process import serve
    from routeblock.route_block.runs.cuda import open_cuda_lane

    serve(open_cuda_lane(), fixture, protocol, what, out)


def record_operator(out: Out) -> None:
    """Record which launches the operator takes, one group over K, and expert id -1, on this machine's GPU.

    $ROUTEBLOCK_EXTENSION names vLLM's MoE extension.
    """
    from routeblock.route_block.gpu import operator_record

    operator_record.write(out)


def operator_part(
    part: Annotated[str, typer.Argument(help="Which part.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
) -> None:
    """One process of record-operator."""
    from routeblock.route_block.gpu.operator_record import record_part

    record_part(part, out)


def recorded_native(
    out: Summary,
    source: CommittedRecord,
    fixture: FixtureFolder,
    protocol: ProtocolFile = PROTOCOL,
    lane: Lane = "recorded-h200",
) -> None:
    """Prove a record of native alignment again and test it for a shift by history. Exits 1 if something differs."""
    from routeblock.route_block.native import evidence

    wrong = evidence.write(out, source, fixture, protocol, lane=lane)
    report(wrong, "every plan is legal, and its final output the twin's")


def recorded_operator(out: Summary, source: CommittedRecord, lane: Lane = "recorded-h200") -> None:
    """Prove a record of the operator again with the twin. Exits 1 if something differs."""
    from routeblock.route_block.gpu import operator_check

    report(operator_check.write(out, source, lane=lane), "every output is the twin's")


COMMANDS = (record_native, native_process, record_operator, operator_part, recorded_native, recorded_operator)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    add(app, COMMANDS)
