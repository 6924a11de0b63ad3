# SPDX-License-Identifier: Apache-2.0
"""Commands of the engine's study: the record of a GPU, its statistics, their recount, the tables."""

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
from routeblock.serving.kinds import Mode

app = typer.Typer(help="vLLM itself: do completions repeat, and what does a step cost? Record, statistics, tables.")
PROTOCOL = Path("fixtures/protocols/serving.json")


@app.command("record")
def record_serving(
    out: Out,
    protocol: ProtocolFile = PROTOCOL,
    seconds: Annotated[float, typer.Option(help="Begin no process after this many seconds.", min=0)] = 1800.0,
) -> None:
    """Serve the protocol's batches with this machine's vLLM and GPU, without Snakemake; one folder, one archive.

    The same command goes on where it was stopped. Exits 1 if something is not as the protocol has it.
    """
    from routeblock.serving import record
    from routeblock.serving.study import STUDY

    wrong = record.write(out, protocol, seconds=seconds)
    finish(wrong, str(out / STUDY.archive))


@app.command("check")
def check_model(
    model: Annotated[Path, typer.Argument(help="The model's folder, with config.json.")],
    out: Out,
    batch: Annotated[int, typer.Option(help="Prompts in the batch.", min=1, max=1024)] = 64,
    repeats: Annotated[int, typer.Option(help="How often each process serves it.", min=2)] = 10,
    tokens: Annotated[int, typer.Option(help="Tokens of a completion.", min=1, max=4096)] = 32,
    mode: Annotated[Mode, typer.Option(help="How decode steps run.")] = Mode.GRAPHS,
    protocol: ProtocolFile = PROTOCOL,
) -> None:
    """Do your completions differ: by alignment, by the batch, or by something else? Needs vLLM and a GPU.

    Random prompts, greedy; as it is, with canonical alignment, and one by one. Prints verdict, reason and cure. Exits 0
    if nothing was seen, 1 if something was.
    """
    from routeblock.serving import check

    answer, _ = check.run(model, out, protocol, batch=batch, repeats=repeats, tokens=tokens, mode=mode)
    print(answer.verdict)
    print(answer.reason)
    print(answer.cure)
    if answer.verdict is not check.Verdict.NOTHING:
        raise typer.Exit(1)


@app.command("recorded")
def recorded_serving(out: Out, source: CommittedRecord, protocol: ProtocolFile = PROTOCOL) -> None:
    """Verify a committed record on this CPU: files, batches, completions, plans. Exits 1 if something differs."""
    from routeblock.serving import verification

    wrong = verification.write(out, source, protocol)
    finish(wrong, "every batch and completion is as it should be")


@app.command("layer")
def serving_layer(out: Out, record: RecordFolder, protocol: ProtocolFile = PROTOCOL) -> None:
    """Compute the engine's captured MoE layer again with the twin, bit for bit. Exits 1 if a bit or a plan differs."""
    from routeblock.serving import layer_check

    wrong = layer_check.write_document(out, record, protocol)
    finish(wrong, "every bit of every captured call is the twin's")


@app.command("statistics")
def serving_statistics(out: Out, record: RecordFolder, protocol: ProtocolFile = PROTOCOL) -> None:
    """Ratios of step times with intervals and verdicts. Exits 1 if the record lacks what the protocol asks for."""
    from routeblock.serving.study import STUDY
    from routeblock.timing import statistics

    wrong = statistics.write(out, STUDY, [record], protocol, rule="serving_statistics")
    finish(wrong, "the record is whole")


@app.command("validate")
def validate_serving(out: Out, record: RecordFolder, statistics: Recomputed, protocol: ProtocolFile = PROTOCOL) -> None:
    """Recount statistics and verdicts with code of its own. Exits 1 unless every value is exactly equal."""
    from routeblock.serving.study import STUDY
    from routeblock.timing import validation

    number, wrong = validation.write(out, STUDY, statistics, [record], protocol, rule="validate_serving")
    finish(wrong, f"{number} comparisons recounted, all exactly equal")


@app.command("mutate")
def mutate_serving(
    out: Out, record: RecordFolder, protocol: ProtocolFile = PROTOCOL, declared: DeclaredEdits = EDITS
) -> None:
    """Edit copies of a record, one each, and see them refused for the declared reasons; else exit 1."""
    from routeblock.serving.edits import ROOM
    from routeblock.serving.study import STUDY
    from routeblock.serving.verification import recompute
    from routeblock.timing import mutations

    entries = mutations.write(out, STUDY, ROOM, [record], protocol, declared, recompute, rule="serving_mutations")
    finish(mutations.misjudged(entries), f"{len(entries)} copies judged as declared")


@app.command("table")
def serving_table(
    name: TableName,
    out: Out,
    record: RecordFolder,
    statistics: StatisticsFile,
    validation: ValidationFile,
    layer: Annotated[Path, typer.Option(help="Its layer.json.")],
    protocol: ProtocolFile = PROTOCOL,
    mutations: MutationsFile = None,
) -> None:
    """Write one table of the engine's record as .parquet, .csv and .md."""
    from routeblock.serving import tables

    tables.write(name, out, statistics, record, validation, layer, protocol, mutations_file=mutations)
