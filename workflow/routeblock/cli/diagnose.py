# SPDX-License-Identifier: Apache-2.0
"""Tables and drawings of the answers of predict, survey, explain, witness and identify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeblock.cli.shared import (
    CommittedRecord,
    Dtype,
    Experts,
    GpuName,
    GroupSize,
    Hidden,
    Intermediate,
    Model,
    MoeBackend,
    Seed,
    TopK,
    Vllm,
    ZeroPoints,
    finish,
)

app = typer.Typer(help="Tables and drawings of answers, for rules.")
PopulationName = Annotated[str, typer.Option(help="uniform, zipf:EXPONENT, topics:TOPICS:EXPONENT or file.")]
DiagnosisRecord = Annotated[
    Path | None, typer.Option(help="A recorded check, such as fixtures/recorded/diagnosis/h200.")
]
RoutingFile = Annotated[Path | None, typer.Option("--routing", help="The file of population `file`.")]


@app.command("predictions")
def predictions(
    answers: Annotated[list[Path], typer.Argument(help="Answers that predict wrote with --out.")],
    out: Annotated[Path, typer.Option(help="Folder for the table predictions and its manifest.")],
) -> None:
    """Tabulate answers of predict, a row each."""
    from routeblock.diagnose.predict_table import write

    write(answers, out)


@app.command("launches")
def launches(
    out: Annotated[Path, typer.Option(help="Folder for the tables launch_rule and launches, each with its manifest.")],
    vllm: Vllm = "0.24.0",
    model: Model = None,
    hidden: Hidden = 2048,
    intermediate: Intermediate = 768,
    experts: Experts = 128,
    top_k: TopK = 8,
    dtype: Dtype = "float16",
    group_size: GroupSize = 128,
    zero_points: ZeroPoints = True,
    record: DiagnosisRecord = None,
) -> None:
    """Tabulate the automatic launches on every GPU, and the rule beside every launch that was read off; exit 1 if it
    misses one. Without --model the sizes are the study's layer's. With --record its launches are rows too.
    """
    from routeblock.diagnose.launch_tables import Asked, write
    from routeblock.diagnose.layer import layer_from
    from routeblock.diagnose.recorded import read

    given = {
        "hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k, "dtype": dtype,
        "group_size": group_size, "zero_points": zero_points,
    }  # fmt: skip
    quantisation = {name: given[name] for name in ("group_size", "zero_points")}
    layer = layer_from(model, given if model is None else quantisation)
    if not write(Asked(layer, vllm, read(record) if record else None), out):
        print(f"{out}: the rule misses a launch; see launch_rule.md")
        raise typer.Exit(1)


@app.command("recorded")
def recorded(
    source: CommittedRecord,
    out: Annotated[Path, typer.Option(help="Folder for the table prediction_check and its manifest.")],
) -> None:
    """Check what was recorded on a GPU of launches, predictions and registers, and tabulate; exit 1 if one is wrong."""
    from routeblock.diagnose.recorded import write

    finish(write(source, out), "every launch is derived, no row changed that was not predicted, the registers agree")


@app.command("survey-point")
def survey_point(
    gpu: GpuName,
    vllm: Vllm,
    tokens: Annotated[int, typer.Option(help="Tokens of a batch.", min=1, max=1 << 19)],
    out: Annotated[Path, typer.Option(help="File for the point's JSON, sealed.")],
    population: PopulationName = "uniform",
    routing: RoutingFile = None,
    routings: Annotated[int, typer.Option(help="Routings, at most.", min=1)] = 2000,
    sample: Annotated[int, typer.Option(help="Routings that the twin computes, at most.", min=0)] = 16,
    macs: Annotated[float, typer.Option(help="Multiply-accumulates that the twin may spend.", min=0)] = 2e10,
    seed: Seed = 0,
    model: Model = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    dtype: Dtype = None,
    group_size: GroupSize = None,
    zero_points: ZeroPoints = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks.", min=1)] = 1,
    moe_backend: MoeBackend = "auto",
) -> None:
    """Survey one GPU, population and batch size: how many routings can change bits, how many of a sample do."""
    from routeblock.diagnose.engine import Engine
    from routeblock.diagnose.layer import layer_from
    from routeblock.diagnose.populations import population as named
    from routeblock.diagnose.survey import Plan, write
    from routeblock.diagnose.survey import survey_point as point
    from routeblock.moe.devices import device

    given = {
        "hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k, "dtype": dtype,
        "group_size": group_size, "zero_points": zero_points,
    }  # fmt: skip
    engine = Engine(layer_from(model, given, tp), device(gpu), vllm, backend=moe_backend)
    document = point(engine, named(population, routing), tokens, Plan(routings, sample, macs, seed))
    write(document, out, [p for p in (model, routing) if p])


@app.command("draw")
def draw_explanation(
    source: Annotated[Path, typer.Option("--from", help="An answer of explain, written with --out.")],
    out: Annotated[Path, typer.Option(help="Folder for explain.svg, explain.png and explain.dot, with manifests.")],
) -> None:
    """Draw the two summation trees of an explanation, and write them as Graphviz dot."""
    from routeblock.diagnose.explain_drawings import write_sealed

    write_sealed(source, out)


@app.command("table")
def diagnosis_table(
    name: Annotated[str, typer.Argument(help="explain, witness or identify.")],
    sources: Annotated[list[Path], typer.Option("--from", help="An answer of that command; repeat.")],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
) -> None:
    """Tabulate answers of one command."""
    from routeblock.declared import find
    from routeblock.diagnose.explain_tables import TABLES, write

    write(find(name, TABLES, "table"), sources, out)
