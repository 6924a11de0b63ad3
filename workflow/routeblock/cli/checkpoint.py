# SPDX-License-Identifier: Apache-2.0
"""Commands of checkpoints: check, manifest, a layer as a fixture, a generated one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from routeblock.cli.shared import LAST_SEED, DtypeName

app = typer.Typer(help="Other people's files: check a checkpoint, hash it, take a layer, write a small one.")
Checkpoint = Annotated[Path, typer.Argument(help="Folder of a checkpoint, plain or in the hub's cache.")]
Revision = Annotated[str | None, typer.Option(help="Commit that the folder must hold.")]


@app.command("check")
def checkpoint(
    path: Checkpoint,
    revision: Revision = None,
    layer: Annotated[int | None, typer.Option(help="A layer that the study is to run on.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks that share each expert.")] = 1,
    manifest: Annotated[Path | None, typer.Option(help="files.json that the folder must equal; hashes it.")] = None,
) -> None:
    """Say what a checkpoint is and list everything that is wrong with it, from its headers, before any long work."""
    from routeblock.checkpoint.manifest import check_manifest
    from routeblock.checkpoint.preflight import preflight

    report = preflight(path, revision, layer, tensor_parallel)
    print("\n".join(report.lines))
    problems = report.problems + (check_manifest(path, revision, manifest) if manifest else [])
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise typer.Exit(2)


@app.command("manifest")
def manifest(
    path: Checkpoint,
    out: Annotated[Path, typer.Option(help="Folder for files.json, identity.json and their seal.")],
    revision: Revision = None,
    layer: Annotated[int | None, typer.Option(help="Layer that the model identity names.")] = None,
) -> None:
    """Hash every file of a checkpoint, and derive its identity."""
    from routeblock.checkpoint.manifest import seal_manifest

    seal_manifest(path, out, revision, layer)


@app.command("fixture")
def checkpoint_fixture(
    path: Checkpoint,
    manifest: Annotated[Path, typer.Option(help="The checkpoint's files.json (routeblock checkpoint manifest).")],
    out: Annotated[Path, typer.Option(help="Folder of the fixture.")],
    layer: Annotated[int, typer.Option(help="Decoder layer.")],
    revision: Revision = None,
    captured: Annotated[Path | None, typer.Option(help="Captured hidden states (safetensors).")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text of a stand-in.")] = None,
    token_id: Annotated[list[int] | None, typer.Option(help="A token id of a stand-in; repeat, in order.")] = None,
    point: Annotated[
        list[str] | None, typer.Option(help="POINT:LANE that the pair search looks at, first first.")
    ] = None,
    all_experts: Annotated[bool, typer.Option("--all-experts", help="Keep experts that no route uses.")] = False,
    confirm: Annotated[bool, typer.Option("--confirm", help="Let the twin look for pairs that change bits.")] = False,
) -> None:
    """Make a fixture of one layer of a checkpoint: packed experts, routed inputs, pairs and plans by search."""
    from routeblock.route_block.fixtures.from_checkpoint import Request, parse_points, seal_fixture

    request = Request(
        path,
        manifest,
        layer,
        revision,
        captured,
        prompt,
        token_id or None,
        parse_points(point),
        all_experts,
        confirm,
    )
    seal_fixture(out, request)


@app.command("generate")
def generate_checkpoint(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    layout: Annotated[str, typer.Option(help="How the experts are stored.")] = "awq",
    model_type: Annotated[str, typer.Option(help="Model family.")] = "qwen3_moe",
    layers: Annotated[int, typer.Option(min=1)] = 2,
    hidden: Annotated[int, typer.Option(min=64)] = 512,
    intermediate: Annotated[int, typer.Option(min=64)] = 384,
    experts: Annotated[int, typer.Option(min=1)] = 64,
    top_k: Annotated[int, typer.Option(min=1)] = 4,
    group_size: Annotated[int, typer.Option(min=16)] = 128,
    dtype: Annotated[DtypeName, typer.Option(help="Of the scales.")] = "float16",
    shards: Annotated[int, typer.Option(min=1)] = 5,
    plain_layer: Annotated[list[int] | None, typer.Option(help="A layer with unquantised experts.")] = None,
    revision: Annotated[str | None, typer.Option(help="Write the hub's cache layout with this snapshot.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.", min=0, max=LAST_SEED)] = 1,
) -> None:
    """Write a small checkpoint in a real format with random weights, to try the other commands on."""
    from routeblock.checkpoint.generator import Spec, generate

    spec = Spec(
        layout=layout,
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        group_size=group_size,
        dtype=dtype,
        shards=shards,
        plain_layers=tuple(plain_layer or ()),
        revision=revision,
        seed=seed,
    )
    print(generate(out, spec))
