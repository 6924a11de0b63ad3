# SPDX-License-Identifier: Apache-2.0
"""The commands that answer questions about a model of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path | None, typer.Option(help="A model's config.json, or its folder.")]
Hidden = Annotated[int | None, typer.Option(help="Hidden size.", min=1)]
Intermediate = Annotated[int | None, typer.Option(help="Intermediate size of an expert, before --tp.", min=1)]
Experts = Annotated[int | None, typer.Option(help="Experts of the model.", min=1)]
TopK = Annotated[int | None, typer.Option(help="Experts of a token.", min=1)]
Dtype = Annotated[str | None, typer.Option(help="float16 or bfloat16; default: the model's.")]
GroupSize = Annotated[int | None, typer.Option(help="Quantisation group along K; -1: one scale a column.")]
ZeroPoints = Annotated[
    bool | None, typer.Option("--zero-points/--symmetric", help="Zero points (AWQ), or the fixed 8 (GPTQ-style).")
]
Gpu = Annotated[str, typer.Option(help="Which GPU: A100, RTX 3090, L40S, H100 SXM, H200, ...")]
Vllm = Annotated[str, typer.Option(help="vLLM's release, such as 0.24.0.")]
Tokens = Annotated[int | None, typer.Option(help="Tokens of the batch, if no --routing is given.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of what is drawn.", min=0)]
PopulationName = Annotated[str, typer.Option(help="uniform, zipf:EXPONENT, topics:TOPICS:EXPONENT or file.")]
RoutingFile = Annotated[Path | None, typer.Option("--routing", help="The file of population `file`.")]
JsonTo = Annotated[str | None, typer.Option("--json", help="Where the JSON goes; - prints it instead of the text.")]
OutFile = Annotated[Path | None, typer.Option(help="File for the JSON, sealed by a manifest beside it.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse an answer that stands on an assumed fact.")]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="Exit 0 whatever the verdict, for rules.")]


def predict(
    gpu: Gpu,
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
    moe_backend: Annotated[str, typer.Option(help="vLLM's --moe-backend: auto, marlin or humming.")] = "auto",
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
    between: Annotated[str, typer.Option(help="What the verdict is about: runs or batches.")] = "runs",
    batches: Annotated[str | None, typer.Option(help="Batch sizes, as 1-4096 or 1,16,64.")] = None,
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
        routing, tokens, routings, seed, tuple(graph_size or ()), chunk, canonical, full_k, between, batches, token
    )
    found = answer(question(engine, asked))
    inputs = [p for p in (model / "config.json" if model is not None and model.is_dir() else model, routing) if p]
    raise typer.Exit(
        deliver(
            found, json_to=json_to, out=out, strict=strict, exit_zero=exit_zero, inputs=inputs,
            parameters={**engine.document(), **asked.document()},
            modules=("routeblock.diagnose.predict", "routeblock.diagnose.question"),
        )
    )  # fmt: skip


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
) -> None:
    """Tabulate the automatic launches on every GPU, and the rule beside every launch that was read off; exit 1 if it
    misses one. Without --model the sizes are the study's layer's.
    """
    from routeblock.diagnose.launch_tables import Asked, write
    from routeblock.diagnose.layer import layer_from

    given = {
        "hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k, "dtype": dtype,
        "group_size": group_size, "zero_points": zero_points,
    }  # fmt: skip
    quantisation = {name: given[name] for name in ("group_size", "zero_points")}
    layer = layer_from(model, given if model is None else quantisation)
    if not write(Asked(layer, vllm), out):
        print(f"{out}: the rule misses a launch; see launch_rule.md")
        raise typer.Exit(1)


def predictions(
    answers: Annotated[list[Path], typer.Argument(help="Answers that predict wrote with --out.")],
    out: Annotated[Path, typer.Option(help="Folder for the table predictions and its manifest.")],
) -> None:
    """Tabulate answers of predict, a row each."""
    from routeblock.diagnose.predict_table import write

    write(answers, out)


def survey_point(
    gpu: Gpu,
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
    moe_backend: Annotated[str, typer.Option(help="vLLM's --moe-backend.")] = "auto",
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


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(predict)
    app.command()(predictions)
    app.command()(launches)
    app.command()(survey_point)
    app.command()(survey)
