# SPDX-License-Identifier: Apache-2.0
"""Commands of study A's GPU lane: captures, censuses, evidence, native alignment, the operator, versions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeblock.cli.shared import (
    After,
    CommittedRecord,
    FixtureFolder,
    FrozenPrediction,
    Gpu,
    History,
    Limit,
    Out,
    ProtocolFile,
    RunsFolder,
    finish,
)

app = typer.Typer()  # part of study-a
PROTOCOL = Path("fixtures/protocols/native.json")
FiledUnder = Annotated[str, typer.Option("--lane", help="Lane to file it under: cuda, or recorded-... for evidence.")]
Summary = Annotated[Path, typer.Option(help="File to write; its manifest goes beside it.")]


@app.command("capture")
def capture(
    fixture: FixtureFolder,
    history: Annotated[History, typer.Option(help="The history.")],
    out: Annotated[Path, typer.Option(help="Folder to write: plans.safetensors, capture.json, telemetry.json.")],
    gpu: Gpu = 0,
    after: After = None,
    limit: Limit = 600,
) -> None:
    """Keep the plan that vLLM's own alignment makes in this process, after the history's prelude."""
    from routeblock.cuda.gpu_lock import Turn
    from routeblock.route_block.gpu.captures import capture as keep
    from routeblock.route_block.runs.cuda import open_cuda_lane

    keep(open_cuda_lane(), fixture, history, out, turn=Turn(gpu, after, limit))


@app.command("freeze-plans")
def freeze_plans(
    fixture: FixtureFolder,
    captures: Annotated[list[Path], typer.Option("--from", help="Folder of a capture; one of H0, one of H1.")],
    out: Annotated[Path, typer.Option(help="File to write, plans.safetensors; plans.json and the seal beside it.")],
) -> None:
    """Put the captured plans of both histories into one file, before any run."""
    from routeblock.route_block.gpu.captures import freeze_plans as freeze

    freeze(fixture, captures, out)


@app.command("census")
def census(
    fixture: FixtureFolder,
    prediction: Annotated[Path, typer.Option(help="A frozen prediction of lane cuda: its launches are used.")],
    history: Annotated[History, typer.Option(help="The history.")],
    process: Annotated[int, typer.Option(help="Number of this process, from 1.", min=1)],
    calls: Annotated[int, typer.Option(help="Native alignments, and as many layers in canonical order.", min=1)],
    out: Annotated[Path, typer.Option(help="File to write; its manifest goes beside it.")],
    gpu: Gpu = 0,
    limit: Limit = 600,
) -> None:
    """Count the plans and final outputs that native alignment gives in one process, beside canonical order."""
    from routeblock.cuda.gpu_lock import Turn
    from routeblock.route_block.gpu.census import count
    from routeblock.route_block.runs.cuda import open_cuda_lane

    count(open_cuda_lane(), fixture, prediction, history, process, calls, out, turn=Turn(gpu, None, limit))


@app.command("summarize-census")
def summarize_census(
    folder: Annotated[Path, typer.Argument(help="Folder of a census: {history}/process{n}.json.")],
    lane: FiledUnder,
    out: Annotated[Path, typer.Option(help="File to write, census.json; its manifest goes beside it.")],
) -> None:
    """Count distinct plans and final outputs over the processes of a census."""
    from routeblock.route_block.gpu.census_summary import summarize

    summarize(lane, folder, out)


@app.command("unassisted")
def unassisted(
    fixture: FixtureFolder,
    out: Annotated[Path, typer.Option(help="File to write; its manifest goes beside it.")],
    gpu: Gpu = 0,
    limit: Limit = 600,
) -> None:
    """Digests at grids that are multiples of the SM count: run it with the grid probe and without, and compare."""
    from routeblock.cuda.gpu_lock import Turn
    from routeblock.route_block.gpu.unassisted import launch_multiples
    from routeblock.route_block.runs.cuda import open_cuda_lane

    launch_multiples(open_cuda_lane(), fixture, out, turn=Turn(gpu, None, limit))


@app.command("compare-unassisted")
def compare_unassisted(
    folder: Annotated[Path, typer.Argument(help="Folder with what `unassisted` wrote with and without the probe.")],
    lane: FiledUnder,
    out: Annotated[Path, typer.Option(help="File to write, probe_control.json; its manifest goes beside it.")],
) -> None:
    """Compare grids that need no probe with and without it; exit 1 if a bit or a grid differs."""
    from routeblock.route_block.gpu.probe_comparison import compare

    if differing := compare(lane, folder, out):
        print(f"{folder}: {len(differing)} launches differ with and without the probe, {differing[0]} first")
        raise typer.Exit(1)


@app.command("agree")
def agree(
    fixture: FixtureFolder,
    prediction: FrozenPrediction,
    runs: RunsFolder,
    lane: FiledUnder,
    out: Annotated[Path, typer.Option(help="File to write, agreement.json; its manifest goes beside it.")],
) -> None:
    """Recompute every surface that a GPU gave with the twin of its architecture; exit 1 if one bit differs."""
    from routeblock.route_block.gpu.agreement import agree as recompute

    if differing := recompute(fixture, prediction, runs, lane, out):
        print(f"{runs}: the twin differs from {len(differing)} recorded surfaces, {differing[0]} first")
        raise typer.Exit(1)


@app.command("pack-evidence")
def pack_evidence(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    results: Annotated[list[Path] | None, typer.Option(help="A results folder with runs of lane cuda; repeat.")] = None,
    add: Annotated[list[Path] | None, typer.Option(help="A folder that this command wrote, to add; repeat.")] = None,
) -> None:
    """Pack GPU runs, captures and censuses: every record as it is, distinct tensors once each."""
    from routeblock.route_block.runs.recorded import pack_evidence as pack

    pack(results or [], add or [], out)


@app.command("restore-evidence")
def restore_evidence(
    fixture: FixtureFolder,
    evidence: Annotated[Path, typer.Option(help="A folder that pack-evidence wrote.")],
    group: Annotated[str, typer.Option(help="What to rebuild: published.stored, published.census, probe_control ...")],
    out: Annotated[Path, typer.Option(help="Folder to rebuild it in.")],
) -> None:
    """Rebuild recorded run folders bit for bit; any other byte is refused."""
    from routeblock.route_block.runs.recorded import restore

    restore(fixture, evidence, group, out)


@app.command("compare-versions")
def compare_versions(
    results: Annotated[list[Path], typer.Option("--from", help="A result of tests/gpu/first_contact.py; repeat.")],
    out: Annotated[Path, typer.Option(help="File to write, versions.json; its manifest goes beside it.")],
    golden: Annotated[Path, typer.Option(help="Folder of recorded kernel outputs.")] = Path("fixtures/golden"),
    contents: Annotated[Path | None, typer.Option(help="List of the results' SHA-256, which they must have.")] = None,
) -> None:
    """Put what several versions of the extension gave on the recorded layer side by side."""
    from routeblock.route_block.gpu.versions import compare

    compare(results, golden, out, contents=contents)


@app.command("record-native")
def record_native(out: Out, fixture: FixtureFolder, protocol: ProtocolFile = PROTOCOL) -> None:
    """Record what vLLM's own alignment gives, process by process under H0 and H1 by turns, without Snakemake.

    $ROUTEBLOCK_EXTENSION names vLLM's MoE extension.
    """
    from routeblock.route_block.native import record

    record.write(out, fixture, protocol)


@app.command("native-process")
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


@app.command("recorded-native")
def recorded_native(
    out: Summary,
    source: CommittedRecord,
    fixture: FixtureFolder,
    protocol: ProtocolFile = PROTOCOL,
    lane: FiledUnder = "recorded-h200",
) -> None:
    """Prove a record of native alignment again and test it for a shift by history. Exits 1 if something differs."""
    from routeblock.route_block.native import evidence

    wrong = evidence.write(out, source, fixture, protocol, lane=lane)
    finish(wrong, "every plan is legal, and its final output the twin's")


@app.command("record-operator")
def record_operator(out: Out) -> None:
    """Record which launches the operator takes, one group over K, and expert id -1, on this machine's GPU.

    $ROUTEBLOCK_EXTENSION names vLLM's MoE extension.
    """
    from routeblock.route_block.gpu import operator_record

    operator_record.write(out)


@app.command("operator-part")
def operator_part(
    part: Annotated[str, typer.Argument(help="Which part.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
) -> None:
    """One process of record-operator."""
    from routeblock.route_block.gpu.operator_record import record_part

    record_part(part, out)


@app.command("recorded-operator")
def recorded_operator(out: Summary, source: CommittedRecord, lane: FiledUnder = "recorded-h200") -> None:
    """Prove a record of the operator again with the twin. Exits 1 if something differs."""
    from routeblock.route_block.gpu import operator_check

    finish(operator_check.write(out, source, lane=lane), "every output is the twin's")
