# SPDX-License-Identifier: Apache-2.0
"""The questions that a user asks about their own model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from routeblock.cli.shared import (
    Dtype,
    Experts,
    FixtureFolder,
    GpuName,
    GroupSize,
    Hidden,
    Intermediate,
    Model,
    MoeBackend,
    PointName,
    Seed,
    Surface,
    Tokens,
    TopK,
    Vllm,
    ZeroPoints,
)

app = typer.Typer()
TwinLane = Annotated[
    Literal["twin-ampere", "twin-hopper"], typer.Option("--lane", help="Whose tensor cores and launches.")
]
JsonTo = Annotated[str | None, typer.Option("--json", help="Where the JSON goes; - prints it instead of the text.")]
OutFile = Annotated[Path | None, typer.Option(help="File for the JSON, sealed by a manifest beside it.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse an answer that stands on an assumed fact.")]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="Exit 0 whatever the verdict, for rules.")]
Point = Annotated[PointName, typer.Option(help="The launches that a run does not name.")]
Element = Annotated[str | None, typer.Option(help="surface:row:column, such as w13:51:207; rows as in the fixture.")]
_RUN = (
    "key=value, joined with commas: plan (H0, H1, canonical, reversed), plans (a file of captured plans),"
    " tokens (0-4+9), block, launch or w13 and w2 (64x128x246), grid, architecture, reduction (float32, dtype), full_k."
)


class Architecture(StrEnum):
    """A generation of tensor cores that the twin computes: a list of choices needs an enum."""

    AMPERE = "ampere"
    ADA = "ada"
    HOPPER = "hopper"


@app.command("predict")
def predict(
    gpu: GpuName,
    vllm: Vllm,
    model: Model = None,
    routing: Annotated[
        Path | None, typer.Option(help="Router's ids: .npy, .safetensors (topk_ids) or .parquet (a column a slot).")
    ] = None,
    tokens: Tokens = None,
    routings: Annotated[int, typer.Option(help="So many routings are drawn.", min=1)] = 1,
    seed: Seed = 0,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    experts: Experts = None,
    top_k: TopK = None,
    dtype: Dtype = None,
    group_size: GroupSize = None,
    zero_points: ZeroPoints = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks: they share the intermediate size.", min=1)] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallel ranks: they share the experts.", min=1)] = 1,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="VLLM_BATCH_INVARIANT=1 is set.")] = False,
    moe_backend: MoeBackend = "auto",
    graph_size: Annotated[
        list[int] | None, typer.Option(help="A size that CUDA graphs pad batches to; repeat it.", min=1)
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens of a chunk of prefill: the routing is cut.", min=1)] = None,
    launch: Annotated[
        list[str] | None,
        typer.Option(help="thread_k,thread_n,grid of both GEMMs, or w13:... and w2:..., in place of the automatic."),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Block size in place of the automatic.")] = None,
    canonical: Annotated[bool, typer.Option("--canonical", help="Canonical alignment is on.")] = False,
    full_k: Annotated[bool, typer.Option("--full-k", help="Every tile keeps full K.")] = False,
    between: Annotated[Literal["runs", "batches"], typer.Option(help="What the verdict is about.")] = "runs",
    batches: Annotated[
        list[str] | None, typer.Option(help="A batch size, or a range of them such as 1-4096; repeat.")
    ] = None,
    token: Annotated[int, typer.Option(help="The token that is followed through batches.", min=0)] = 0,
    json_to: JsonTo = None,
    out: OutFile = None,
    strict: Strict = False,
    exit_zero: ExitZero = False,
) -> None:
    """Say which bits of an MoE layer can change, between which runs, why, and what stops it.

    Exit 0: they cannot differ; 1: they can; 4: it cannot be said.
    """
    from routeblock.diagnose.answer import deliver
    from routeblock.diagnose.engine import Engine
    from routeblock.diagnose.layer import layer_from
    from routeblock.diagnose.predict import predict as answer
    from routeblock.diagnose.question import Asked, launches_given, question
    from routeblock.moe.devices import device

    given = {
        "hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k, "dtype": dtype,
        "group_size": group_size, "zero_points": zero_points,
    }  # fmt: skip
    engine = Engine(
        layer_from(model, given, tp), device(gpu), vllm, batch_invariant, moe_backend, ep, launches_given(launch or ()),
        block_size,
    )  # fmt: skip
    asked = Asked(
        routing, tokens, routings, seed, tuple(graph_size or ()), chunk, canonical, full_k, between,
        ",".join(batches) if batches else None, token,
    )  # fmt: skip
    found = answer(question(engine, asked))
    inputs = [p for p in (model / "config.json" if model is not None and model.is_dir() else model, routing) if p]
    raise typer.Exit(
        deliver(
            found, json_to=json_to, out=out, strict=strict, exit_zero=exit_zero, inputs=inputs,
            parameters={**engine.document(), **asked.document()},
            modules=("routeblock.diagnose.predict", "routeblock.diagnose.question"),
        )
    )  # fmt: skip


@app.command("survey")
def survey(
    points: Annotated[list[Path], typer.Argument(help="Points that survey-point wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the table and the figure, each with its manifest.")],
    json_to: JsonTo = None,
    strict: Strict = False,
    exit_zero: ExitZero = False,
) -> None:
    """Gather a survey: table, figure, and how often bits can change. Exit 0: never here; 1: they can."""
    from routeblock.diagnose.answer import deliver
    from routeblock.diagnose.survey_answer import answer
    from routeblock.diagnose.survey_table import write

    found = answer(write(points, out))
    raise typer.Exit(
        deliver(
            found, json_to=json_to, out=out / "survey_answer.json", strict=strict, exit_zero=exit_zero, inputs=points,
            parameters={}, modules=("routeblock.diagnose.survey_table", "routeblock.diagnose.survey_answer"),
        )
    )  # fmt: skip


@app.command("explain")
def explain(
    fixture: FixtureFolder,
    first: Annotated[str, typer.Option(help=f"The first run: {_RUN}")] = "plan=H0",
    second: Annotated[str, typer.Option(help="The second run, described as the first.")] = "plan=H1",
    element: Element = None,
    surface: Annotated[str | None, typer.Option(help="Without --element: where to look for the first.")] = None,
    lane: TwinLane = "twin-hopper",
    point: Point = "published",
    json_to: JsonTo = None,
    out: OutFile = None,
    dot: Annotated[Path | None, typer.Option(help="File for the two trees as Graphviz dot.")] = None,
    svg: Annotated[Path | None, typer.Option(help="File for the figure.")] = None,
    strict: Strict = False,
    exit_zero: ExitZero = False,
) -> None:
    """Say why an element has other bits in two runs: the first addition that rounds differently, and its path.

    Exit 0: it has the same bits; 1: it differs.
    """
    from routeblock.diagnose.answer import deliver
    from routeblock.diagnose.answers import explain as answer
    from routeblock.diagnose.explain_drawings import write_dot, write_svg
    from routeblock.diagnose.fixture_runs import inputs_of, open_layer

    found = answer(open_layer(fixture, lane, point), first, second, element, surface)
    if dot is not None:
        write_dot(found.detail, dot)
    if svg is not None:
        write_svg(found.detail, svg)
    parameters = {
        "first": first,
        "second": second,
        "element": element,
        "surface": surface,
        "lane": lane,
        "point": point,
    }
    raise typer.Exit(
        deliver(
            found, json_to=json_to, out=out, strict=strict, exit_zero=exit_zero, inputs=inputs_of(fixture),
            parameters=parameters, modules=("routeblock.diagnose.answers", "routeblock.diagnose.explain_drawings"),
        )
    )  # fmt: skip


@app.command("witness")
def witness(
    fixture: FixtureFolder,
    surface: Annotated[Surface, typer.Option(help="The surface to look at.")] = "final",
    element: Element = None,
    run: Annotated[str, typer.Option(help=f"The run whose plan is changed: {_RUN}")] = "plan=canonical",
    lane: TwinLane = "twin-hopper",
    point: Point = "published",
    json_to: JsonTo = None,
    out: OutFile = None,
    strict: Strict = False,
    exit_zero: ExitZero = False,
) -> None:
    """Find the smallest change of a plan that changes a surface or an element, or prove that no legal plan does.

    Exit 0: none does; 1: one was found; 4: it cannot be said.
    """
    from routeblock.diagnose.answer import deliver
    from routeblock.diagnose.answers import witness as answer
    from routeblock.diagnose.fixture_runs import inputs_of, open_layer

    found = answer(open_layer(fixture, lane, point), run, surface, element)
    parameters = {"surface": surface, "element": element, "run": run, "lane": lane, "point": point}
    raise typer.Exit(
        deliver(
            found, json_to=json_to, out=out, strict=strict, exit_zero=exit_zero, inputs=inputs_of(fixture),
            parameters=parameters, modules=("routeblock.diagnose.answers",),
        )
    )  # fmt: skip


@app.command("identify")
def identify(
    fixture: FixtureFolder,
    outputs: Annotated[Path, typer.Option(help="A .safetensors file with the surface, such as a run's tensors.")],
    surface: Annotated[Surface, typer.Option(help="The surface to look at.")] = "w13",
    plan: Annotated[
        list[str] | None, typer.Option(help="H0, H1, canonical, or captured H0 and H1; repeat. Default: all.")
    ] = None,
    plans: Annotated[Path | None, typer.Option(help="A file of captured plans, among which to look.")] = None,
    grid: Annotated[list[int] | None, typer.Option(help="A grid to try beside those of known GPUs; repeat.")] = None,
    architecture: Annotated[
        list[Architecture] | None, typer.Option(help="Whose additions; repeat. Default: all.")
    ] = None,
    json_to: JsonTo = None,
    out: OutFile = None,
    strict: Strict = False,
    exit_zero: ExitZero = False,
) -> None:
    """Say which launches and plans reproduce an output bit for bit, and what contradicts each of the others.

    W2 is computed from the activation in the file, if it has one; else one launch is taken for both GEMMs. Exit 0: some
    do; 4: none does.
    """
    from routeblock.diagnose.answer import deliver
    from routeblock.diagnose.answers import identify as answer
    from routeblock.diagnose.fixture_runs import inputs_of, open_layer

    layer = open_layer(fixture, "twin-hopper", "published")
    architectures = [str(name) for name in architecture or Architecture]
    found = answer(layer, outputs, surface, plan or [], plans, grid or [], architectures)
    parameters = {"surface": surface, "plan": plan, "grid": grid, "architecture": architecture}
    raise typer.Exit(
        deliver(
            found, json_to=json_to, out=out, strict=strict, exit_zero=exit_zero,
            inputs=[*inputs_of(fixture), outputs, *([plans] if plans else [])], parameters=parameters,
            modules=("routeblock.diagnose.answers",),
        )
    )  # fmt: skip
