# SPDX-License-Identifier: Apache-2.0
"""The commands that say why bits differ, what changes them, and which launch made them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FixtureFolder = Annotated[Path, typer.Option("--fixture", help="Folder of a fixture.")]
LaneName = Annotated[str, typer.Option("--lane", help="twin-ampere or twin-hopper: whose tensor cores and launches.")]
Point = Annotated[str, typer.Option(help="published or auto: the launches that a run does not name.")]
Element = Annotated[str | None, typer.Option(help="surface:row:column, such as w13:51:207; rows as in the fixture.")]
JsonTo = Annotated[str | None, typer.Option("--json", help="Where the JSON goes; - prints it instead of the text.")]
OutFile = Annotated[Path | None, typer.Option(help="File for the JSON, sealed by a manifest beside it.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse an answer that stands on an assumed fact.")]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="Exit 0 whatever the verdict, for rules.")]
_RUN = (
    "key=value, joined with commas: plan (H0, H1, canonical, reversed), plans (a file of captured plans),"
    " tokens (0-4+9), block, launch or w13 and w2 (64x128x246), grid, architecture, reduction (float32, dtype), full_k."
)


def explain(
    fixture: FixtureFolder,
    first: Annotated[str, typer.Option(help=f"The first run: {_RUN}")] = "plan=H0",
    second: Annotated[str, typer.Option(help="The second run, described as the first.")] = "plan=H1",
    element: Element = None,
    surface: Annotated[str | None, typer.Option(help="Without --element: where to look for the first.")] = None,
    lane: LaneName = "twin-hopper",
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


def witness(
    fixture: FixtureFolder,
    surface: Annotated[str, typer.Option(help="w13, activation, w2 or final.")] = "final",
    element: Element = None,
    run: Annotated[str, typer.Option(help=f"The run whose plan is changed: {_RUN}")] = "plan=canonical",
    lane: LaneName = "twin-hopper",
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


def identify(
    fixture: FixtureFolder,
    outputs: Annotated[Path, typer.Option(help="A .safetensors file with the surface, such as a run's tensors.")],
    surface: Annotated[str, typer.Option(help="w13, activation, w2 or final.")] = "w13",
    plan: Annotated[
        list[str] | None, typer.Option(help="H0, H1, canonical, or captured H0 and H1; repeat. Default: all.")
    ] = None,
    plans: Annotated[Path | None, typer.Option(help="A file of captured plans, among which to look.")] = None,
    grid: Annotated[list[int] | None, typer.Option(help="A grid to try beside those of known GPUs; repeat.")] = None,
    architecture: Annotated[list[str] | None, typer.Option(help="ampere, ada, hopper; repeat. Default: all.")] = None,
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
    from routeblock.twin.tensor_core import ARCHITECTURES

    layer = open_layer(fixture, "twin-hopper", "published")
    found = answer(layer, outputs, surface, plan or [], plans, grid or [], architecture or list(ARCHITECTURES))
    parameters = {"surface": surface, "plan": plan, "grid": grid, "architecture": architecture}
    raise typer.Exit(
        deliver(
            found, json_to=json_to, out=out, strict=strict, exit_zero=exit_zero,
            inputs=[*inputs_of(fixture), outputs, *([plans] if plans else [])], parameters=parameters,
            modules=("routeblock.diagnose.answers",),
        )
    )  # fmt: skip


def draw_explanation(
    source: Annotated[Path, typer.Option("--from", help="An answer of explain, written with --out.")],
    out: Annotated[Path, typer.Option(help="Folder for explain.svg, explain.png and explain.dot, with manifests.")],
) -> None:
    """Draw the two summation trees of an explanation, and write them as Graphviz dot."""
    from routeblock.diagnose.explain_drawings import write_sealed

    write_sealed(source, out)


def diagnosis_table(
    name: Annotated[str, typer.Argument(help="explain, witness or identify.")],
    sources: Annotated[list[Path], typer.Option("--from", help="An answer of that command; repeat.")],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
) -> None:
    """Tabulate answers of one command."""
    from routeblock.declared import find
    from routeblock.diagnose.explain_tables import TABLES, write

    write(find(name, TABLES, "table"), sources, out)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (explain, witness, identify, draw_explanation, diagnosis_table):
        app.command()(command)
