# SPDX-License-Identifier: Apache-2.0
"""The command line. A command imports what it needs when it runs, so that `--help` answers at once.

Exit codes: 0 it holds, 1 a check found something, 2 bad input or a disk that does not take the result (one line on
stderr), 130 and 143 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import Abort, TyperException

from routeblock import cli_alignment, cli_grouped
from routeblock.errors import InputError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
cli_grouped.register(app)
cli_alignment.register(app)

FixtureFolder = Annotated[Path, typer.Option(help="Folder of a fixture.")]
LaneName = Annotated[str, typer.Option(help="twin-ampere, twin-hopper or cuda.")]
Roots = Annotated[list[Path], typer.Argument(help="Folders of sealed results.")]
Sources = Annotated[
    list[Path] | None,
    typer.Option("--source", help="A file or folder of given inputs; default: those of the checkout."),
]
FrozenPrediction = Annotated[Path, typer.Option(help="The frozen prediction of the runs.")]
RunsFolder = Annotated[Path, typer.Option(help="Folder of the runs, {cell}/{history}/rep{n} below it.")]
Replicates = Annotated[int, typer.Option(help="Replicates of each cell and history.", min=1)]
CapturedPlans = Annotated[Path | None, typer.Option(help="Captured plans of H0 and H1; default: the fixture's.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="List everything, not the first alone.")]


@app.callback()
def routeblock() -> None:
    """Bit-level evidence about Mixture-of-Experts kernels."""


@app.command()
def environment(
    out: Annotated[Path, typer.Option(help="Folder for environment.json and its manifest.")],
    pins: Annotated[Path, typer.Option(help="The file of pinned packages.")] = Path("envs/base.txt"),
) -> None:
    """Record interpreter, packages, CPU and system. Differs between machines: no digest may depend on it."""
    from routeblock.environment import write
    from routeblock.workflow import code

    write(out, pins, code=code("environment"))


@app.command()
def fixture(
    name: Annotated[str, typer.Option(help="Which fixture: published_geometry.")],
    seed: Annotated[int, typer.Option(help="Seed of the drawn layer and inputs.", min=0)],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Make a fixture of study A: a layer in AutoAWQ form, routed inputs, the plans of H0 and H1, checked facts."""
    from routeblock.route_block.make_fixture import make
    from routeblock.workflow import code

    make(name, seed, out, code=code("fixture"))


@app.command()
def predict(
    fixture: FixtureFolder,
    lane: LaneName,
    out: Annotated[Path, typer.Option(help="File to write, prediction.json; its manifest goes beside it.")],
    point: Annotated[str, typer.Option(help="published or auto.")] = "published",
    plan_source: Annotated[str, typer.Option(help="stored or captured.")] = "stored",
    superseded: Annotated[
        bool, typer.Option("--superseded", help="The study's first prediction, grid 240: a control that run refuses.")
    ] = False,
) -> None:
    """Freeze which bits can differ between which runs, from plans and launches alone."""
    from routeblock.route_block.freeze import freeze
    from routeblock.workflow import code

    freeze(fixture, lane, point, plan_source, out, superseded=superseded, code=code("prediction"))


@app.command()
def run(
    fixture: FixtureFolder,
    prediction: Annotated[Path, typer.Option(help="The frozen prediction of this lane and point.")],
    lane: LaneName,
    cell: Annotated[str, typer.Option(help="native, replay, cross, swap_within, swap_across, full_k, canonical.")],
    history: Annotated[str, typer.Option(help="H0 or H1.")],
    out: Annotated[Path, typer.Option(help="Folder to write: record.json, tensors.safetensors, telemetry.json.")],
    replicate: Annotated[int, typer.Option(help="Number of the replicate, from 1.")] = 1,
) -> None:
    """Run one cell of study A in this process."""
    from routeblock.route_block.lanes import open_lane
    from routeblock.route_block.operating_point import CUDA
    from routeblock.route_block.run import run as run_cell
    from routeblock.workflow import code

    run_cell(
        lane_name=lane,
        lane=open_lane(lane),
        fixture_folder=fixture,
        prediction_path=prediction,
        cell=cell,
        history=history,
        replicate=replicate,
        out=out,
        code=code("run_cuda" if lane == CUDA else "run"),
    )


@app.command()
def control(
    fixture: FixtureFolder,
    prediction: Annotated[Path, typer.Option(help="A superseded prediction (predict --superseded).")],
    lane: LaneName,
    out: Annotated[Path, typer.Option(help="File to write, control.json; its manifest goes beside it.")],
) -> None:
    """Show that the superseded prediction is refused before any arithmetic; exit 1 if a run would start."""
    from routeblock.route_block.control import control as check_control
    from routeblock.workflow import code

    if not check_control(fixture, prediction, lane, out, code=code("control")):
        print(f"{prediction}: a run would have started")
        raise typer.Exit(1)


@app.command()
def check_twin(
    golden: Annotated[Path, typer.Option(help="Folder of recorded kernel outputs.")],
    out: Annotated[Path, typer.Option(help="File to write, golden.json; its manifest goes beside it.")],
) -> None:
    """Compare the twin with every recorded output, bit for bit; exit 1 if one differs."""
    from routeblock.route_block.golden import check
    from routeblock.workflow import code

    if differing := check(golden, out, code=code("golden")):
        print(f"{golden}: {len(differing)} recorded outputs differ, {differing[0]} first")
        raise typer.Exit(1)


@app.command()
def build_probe(out: Annotated[Path, typer.Argument(help="File to write; its manifest goes beside it.")]) -> None:
    """Compile the grid probe of the lane `cuda` with the system's C compiler."""
    from routeblock.cuda.grid_probe import make
    from routeblock.workflow import code

    make(out, code=code("probe"))


@app.command()
def mutate(
    fixture: FixtureFolder,
    prediction: FrozenPrediction,
    runs: RunsFolder,
    out: Annotated[Path, typer.Option(help="File to write, mutations.json; its manifest goes beside it.")],
    replicates: Replicates = 5,
    declared: Annotated[Path, typer.Option(help="The declared mutations.")] = Path("fixtures/mutations.json"),
    plans: CapturedPlans = None,
    keep: Annotated[Path | None, typer.Option(help="New folder to keep the copies in.")] = None,
) -> None:
    """Change copies of sound runs, one each, and see the scorer refuse them for the declared reasons; else exit 1."""
    from routeblock.route_block.mutate import mutate as try_mutations
    from routeblock.workflow import code

    results = try_mutations(
        fixture=fixture,
        prediction=prediction,
        runs=runs,
        replicates=replicates,
        declared=declared,
        out=out,
        code=code("mutations"),
        plans=plans,
        keep=keep,
    )
    for entry in results:
        if entry["as_declared"] is False:
            found = ", ".join(entry["found"]) or "nothing"
            print(f"{entry['run']}: mutation {entry['name']}: {found} found, declared {entry['declared'] or 'nothing'}")
            raise typer.Exit(1)


@app.command()
def score(
    fixture: FixtureFolder,
    prediction: FrozenPrediction,
    runs: RunsFolder,
    out: Annotated[Path, typer.Option(help="File to write, score.json; its manifest goes beside it.")],
    replicates: Replicates = 5,
    plans: CapturedPlans = None,
    verbose: Verbose = False,
) -> None:
    """Judge runs from their raw tensors, then the prediction and the seven relations; exit 1 if anything is wrong."""
    from routeblock.route_block.score import score as judge
    from routeblock.workflow import code

    findings = judge(
        fixture=fixture,
        prediction=prediction,
        runs=runs,
        replicates=replicates,
        out=out,
        code=code("score"),
        plans=plans,
    ).findings
    if findings:
        _print_findings(findings, verbose)
        raise typer.Exit(1)


@app.command()
def random_plans(
    fixture: FixtureFolder,
    lane: LaneName,
    out: Annotated[Path, typer.Option(help="File to write; its manifest goes beside it.")],
    plans: Annotated[int, typer.Option(help="Number of random legal plans.", min=1)] = 200,
    grids: Annotated[str, typer.Option(help="Grids, separated by commas.")] = "246,200,528",
    seed: Annotated[int, typer.Option(help="Seed of the plans.", min=0)] = 1,
) -> None:
    """Check the prediction on random plans, route by route; exit 1 if it is wrong once."""
    from routeblock.progress import shown
    from routeblock.route_block.random_plans import check
    from routeblock.workflow import code

    sizes = [int(grid) for grid in grids.split(",")]
    with shown("random plans") as progress:
        faults = check(fixture, lane, plans, sizes, seed, out, code=code("random_plans"), progress=progress)
    if faults:
        print(f"{out}: {len(faults)} faults, first: {faults[0]}")
        raise typer.Exit(1)


@app.command()
def table(
    name: Annotated[
        str, typer.Argument(help="geometry, trajectories, relations, differences, mutations or prediction.")
    ],
    source: Annotated[list[Path], typer.Option("--from", help="fixture.json, score.json or mutations.json; repeat.")],
    out: Annotated[Path, typer.Option(help="Folder for the table as .parquet, .csv and .md, and its manifest.")],
    published: Annotated[Path, typer.Option(help="The published numbers.")] = Path(
        "fixtures/published/route_block.json"
    ),
) -> None:
    """Write one table of study A from the documents of any number of lanes and points."""
    from routeblock.route_block.tables import find, write
    from routeblock.workflow import code

    find(name)  # a name without a table has no code either
    write(name, source, published, out, code=code(f"table_{name}"))


@app.command()
def verify(
    roots: Roots,
    source: Sources = None,
    ignore_code: Annotated[
        bool, typer.Option("--ignore-code", help="Accept results of other versions of the code.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Check sealed results on bytes and name the artifact nearest the source that does not fit."""
    from routeblock.evidence import chain
    from routeblock.workflow import codes, given

    found = chain.verify(*roots, code=None if ignore_code else codes(), sources=source or given())
    if not found:
        print(f"{' '.join(map(str, roots))}: every artifact fits its manifest")
        return
    _print_findings(found, verbose)
    raise typer.Exit(1)


def _print_findings(found: Sequence[object], verbose: bool) -> None:
    first, *others = found
    more = f" (and {len(others)} more; -v lists them)" if others and not verbose else ""
    print(f"{first}{more}")
    for finding in others if verbose else ():
        print(finding)


@app.command()
def repair(roots: Roots, source: Sources = None, verbose: Verbose = False) -> None:
    """Remove results that do not fit their manifests, and all that was made from them, for the workflow to remake."""
    from routeblock.evidence import chain
    from routeblock.workflow import codes, given

    removed = chain.repair(*roots, code=codes(), sources=source or given())
    print(f"{' '.join(map(str, roots))}: {len(removed)} files removed")
    for path in removed if verbose else ():
        print(path)


@app.command()
def schema(out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("workflow/schemas")) -> None:
    """Write the JSON schemas of the config and of every record."""
    from routeblock.schemas import write

    write(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return its exit code."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        code = app(args=arguments, prog_name="routeblock", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except InputError as e:
        return _refuse(str(e))
    except TyperException as e:
        context = getattr(e, "ctx", None)
        command = context.command_path if context else "routeblock"
        return _refuse(f"{command}: {' '.join(e.format_message().split()).rstrip('.')}; see {command} --help")
    except BrokenPipeError:  # the reader of our output has gone: nothing to tell it, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:
        return _refuse(f"{e.filename or 'routeblock'}: {e.strerror or e}")
    except Abort:
        return 128 + signal.SIGINT


def _refuse(line: str) -> int:
    print(line, file=sys.stderr)
    return 2


def _stop(number: int, _frame: object) -> None:
    # As an exception, so that half-written files go away.
    sys.exit(128 + number)
