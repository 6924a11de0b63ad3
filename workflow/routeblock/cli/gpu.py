# SPDX-License-Identifier: Apache-2.0
"""Commands of the machine: kernels, the grid probe, the guarded window, the twin's self-test."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeblock.cli.shared import Out

app = typer.Typer(help="Tools of the machine: kernels, the grid probe, the guarded window, the twin's self-test.")


@app.command("build-kernels")
def build_kernels(
    out: Out,
    arch: Annotated[str, typer.Option(help="A real architecture, such as sm_90.")],
    nvrtc: Annotated[
        list[Path] | None, typer.Option(help="An NVRTC library; repeat it. Default: those of this environment.")
    ] = None,
) -> None:
    """Compile the CUDA sources with NVRTC; needs no GPU. A cubin's SHA-256 is its binary identity."""
    from routeblock.cuda.build import build

    build(out, arch, libraries=nvrtc)


@app.command("build-probe")
def build_probe(out: Annotated[Path, typer.Argument(help="File to write; its manifest goes beside it.")]) -> None:
    """Compile the grid probe of the lane `cuda` with the system's C compiler."""
    from routeblock.cuda.grid_probe import make

    make(out)


@app.command("window")
def window(
    command: Annotated[list[str], typer.Argument(help="What to measure, after --.")],
    out: Annotated[Path, typer.Option(help="File to write: what happened; its manifest goes beside it.")],
    before: Annotated[list[str] | None, typer.Option(help="A shell command that drains and holds; repeat.")] = None,
    check: Annotated[list[str] | None, typer.Option(help="A shell command: 0 while it is so; repeat.")] = None,
    after: Annotated[list[str] | None, typer.Option(help="A shell command that opens again; repeat.")] = None,
    resident: Annotated[list[str] | None, typer.Option(help="A process that may stay on the GPU; repeat.")] = None,
    yields: Annotated[
        Path | None, typer.Option(help="What the command writes: taken away if the window fails.")
    ] = None,
) -> None:
    """Measure in a guarded window: drain, check, run, check, verify the cleanup, open. Exits 1 if a check failed."""
    import json

    from routeblock.cuda import window as guarded

    settings = guarded.Settings(*(tuple(given or ()) for given in (before, check, after, resident)))
    status = guarded.run(settings, command, yields, out)
    if status:
        print(guarded.failed(out, json.loads(out.read_bytes())["steps"]))
        raise typer.Exit(status)


@app.command("check-twin")
def check_twin(
    golden: Annotated[Path, typer.Option(help="Folder of recorded kernel outputs.")],
    out: Annotated[Path, typer.Option(help="File to write, golden.json; its manifest goes beside it.")],
) -> None:
    """Compare the twin with every recorded output, bit for bit; exit 1 if one differs."""
    from routeblock.twin.self_test import check

    if differing := check(golden, out):
        print(f"{golden}: {len(differing)} recorded outputs differ, {differing[0]} first")
        raise typer.Exit(1)
