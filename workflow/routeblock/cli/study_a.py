# SPDX-License-Identifier: Apache-2.0
"""Commands of study A: fixture, frozen prediction, runs, mutations, score, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from routeblock.cli.shared import (
    LAST_SEED,
    After,
    FixtureFolder,
    FrozenPrediction,
    Gpu,
    History,
    LaneName,
    Limit,
    PointName,
    RunsFolder,
    Verbose,
    print_findings,
)

Cell = Literal["native", "replay", "cross", "swap_within", "swap_across", "full_k", "canonical"]
app = typer.Typer(help="Study A, route-block: fixture, frozen prediction, runs, mutations, score, tables.")
ExpectedIdentity = Annotated[
    Path, typer.Option(help="What was expected to compute: identity.json of the lane, or the one beside evidence.")
]
Replicates = Annotated[int, typer.Option(help="Replicates of each cell and history.", min=1)]
CapturedPlans = Annotated[Path | None, typer.Option(help="Captured plans of H0 and H1; default: the fixture's.")]
FiledLane = Annotated[
    str | None, typer.Option("--lane", help="Lane to file it under: the runs' own, or recorded-... for evidence.")
]


@app.command("fixture")
def fixture(
    name: Annotated[str, typer.Option(help="Which fixture: published_geometry.")],
    seed: Annotated[int, typer.Option(help="Seed of the drawn layer and inputs.", min=0, max=LAST_SEED)],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Make a fixture of study A: a layer in AutoAWQ form, routed inputs, the plans of H0 and H1, checked facts."""
    from routeblock.route_block.fixtures.make import make

    make(name, seed, out)


@app.command("freeze")
def freeze_prediction(
    fixture: FixtureFolder,
    lane: LaneName,
    out: Annotated[Path, typer.Option(help="File to write, prediction.json; its manifest goes beside it.")],
    point: Annotated[PointName, typer.Option(help="The operating point.")] = "published",
    plan_source: Annotated[Literal["stored", "captured"], typer.Option(help="Whose plans.")] = "stored",
    plans: CapturedPlans = None,
    superseded: Annotated[
        bool, typer.Option("--superseded", help="The study's first prediction, grid 240: a control that run refuses.")
    ] = False,
) -> None:
    """Freeze which bits can differ between which runs, from plans and launches alone."""
    from routeblock.cuda.gpu_lock import Turn
    from routeblock.route_block.operating_point import CUDA
    from routeblock.route_block.prediction.freeze import freeze

    if lane == CUDA:  # asks the GPU for its name
        Turn().take()
    freeze(fixture, lane, point, plan_source, out, plans_path=plans, superseded=superseded)


@app.command("freeze-identity")
def freeze_identity(
    lane: LaneName,
    out: Annotated[Path, typer.Option(help="File to write, identity.json; its manifest goes beside it.")],
    gpu: Gpu = 0,
    limit: Limit = 600,
) -> None:
    """Write down what is going to compute the runs of a lane (source, binary, environment), before the first one."""
    from routeblock.cuda.gpu_lock import Turn
    from routeblock.route_block.operating_point import CUDA
    from routeblock.route_block.runs.identity import freeze
    from routeblock.route_block.runs.lanes import open_lane

    opened = open_lane(lane)
    if lane == CUDA:
        Turn(gpu, None, limit).take()
    freeze(lane, opened, out)


@app.command("run")
def run(
    fixture: FixtureFolder,
    prediction: Annotated[Path, typer.Option(help="The frozen prediction of this lane and point.")],
    lane: LaneName,
    cell: Annotated[Cell, typer.Option(help="The cell of the study.")],
    history: Annotated[History, typer.Option(help="The history.")],
    out: Annotated[Path, typer.Option(help="Folder to write: record.json, tensors.safetensors, telemetry.json.")],
    replicate: Annotated[int, typer.Option(help="Number of the replicate, from 1.")] = 1,
    identity: Annotated[
        Path | None, typer.Option(help="The expected identity (freeze-identity), which the scorer asks for.")
    ] = None,
    plans: CapturedPlans = None,
    gpu: Gpu = 0,
    after: After = None,
    limit: Limit = 600,
) -> None:
    """Run one cell of study A in this process. The last three options are for the lane cuda."""
    from routeblock.cuda.gpu_lock import Turn
    from routeblock.route_block.operating_point import CUDA
    from routeblock.route_block.runs.lanes import open_lane
    from routeblock.route_block.runs.run import run as run_cell

    rule = "run_cuda" if lane == CUDA else "run"
    run_cell(
        lane_name=lane,
        lane=open_lane(lane),
        fixture_folder=fixture,
        prediction_path=prediction,
        cell=cell,
        history=history,
        replicate=replicate,
        out=out,
        rule=rule,
        plans_path=plans,
        turn=Turn(gpu, after, limit) if lane == CUDA else None,
        identity_path=identity,
    )


@app.command("control")
def control(
    fixture: FixtureFolder,
    prediction: Annotated[Path, typer.Option(help="A superseded prediction (study-a freeze --superseded).")],
    lane: LaneName,
    out: Annotated[Path, typer.Option(help="File to write, control.json; its manifest goes beside it.")],
) -> None:
    """Show that the superseded prediction is refused before any arithmetic; exit 1 if a run would start."""
    from routeblock.route_block.runs.negative_control import control as check_control

    if not check_control(fixture, prediction, lane, out):
        print(f"{prediction}: a run would have started")
        raise typer.Exit(1)


@app.command("mutate")
def mutate(
    fixture: FixtureFolder,
    prediction: FrozenPrediction,
    identity: ExpectedIdentity,
    runs: RunsFolder,
    out: Annotated[Path, typer.Option(help="File to write, mutations.json; its manifest goes beside it.")],
    replicates: Replicates = 5,
    declared: Annotated[Path, typer.Option(help="The declared mutations.")] = Path("fixtures/mutations.json"),
    plans: CapturedPlans = None,
    lane: FiledLane = None,
    keep: Annotated[Path | None, typer.Option(help="New folder to keep the copies in.")] = None,
) -> None:
    """Change copies of sound runs and see the scorer refuse each for its declared reasons; else exit 1."""
    from routeblock.route_block.scorer.mutations import mutate as try_mutations

    results = try_mutations(
        fixture=fixture,
        prediction=prediction,
        identity=identity,
        runs=runs,
        replicates=replicates,
        declared=declared,
        out=out,
        plans=plans,
        keep=keep,
        lane=lane,
    )
    for entry in results:
        if entry["as_declared"] is False:
            found, declared_reasons = (", ".join(entry[name]) or "nothing" for name in ("found", "declared"))
            where = entry["runs"] if isinstance(entry["runs"], str) else ", ".join(entry["runs"])
            untried = f": not tried, {entry['note']}" if entry["note"] else ""
            print(f"{where}: mutation {entry['name']}: {found} found, declared {declared_reasons}{untried}")
            raise typer.Exit(1)


@app.command("score")
def score(
    fixture: FixtureFolder,
    prediction: FrozenPrediction,
    identity: ExpectedIdentity,
    runs: RunsFolder,
    out: Annotated[Path, typer.Option(help="File to write, score.json; its manifest goes beside it.")],
    replicates: Replicates = 5,
    plans: CapturedPlans = None,
    lane: FiledLane = None,
    golden: Annotated[Path | None, typer.Option(help="golden.json, on which the verdict rests too.")] = None,
    verbose: Verbose = False,
) -> None:
    """Judge runs from their raw tensors, then the prediction and the seven relations; exit 1 if anything is wrong."""
    from routeblock.route_block.scorer.score import PROTOCOL
    from routeblock.route_block.scorer.score import score as judge

    verdict = judge(
        fixture=fixture,
        prediction=prediction,
        identity=identity,
        runs=runs,
        replicates=replicates,
        out=out,
        plans=plans,
        lane=lane,
        golden=golden,
    )
    if (evidence := verdict.document["evidence"]) != PROTOCOL:
        print(f"{runs}: {evidence}; no headline counts it")
    if findings := verdict.findings:
        print_findings(findings, verbose)
        raise typer.Exit(1)


@app.command("random-plans")
def random_plans(
    fixture: FixtureFolder,
    lane: LaneName,
    out: Annotated[Path, typer.Option(help="File to write; its manifest goes beside it.")],
    plans: Annotated[int, typer.Option(help="Number of random legal plans.", min=1)] = 200,
    grid: Annotated[list[int] | None, typer.Option(help="A grid; repeat. Default: table prediction's.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the plans.", min=0, max=LAST_SEED)] = 1,
) -> None:
    """Check the prediction on random plans, route by route; exit 1 if it is wrong once."""
    from routeblock.progress import shown
    from routeblock.route_block.prediction.random_plans import GRIDS, check

    with shown("random plans") as progress:
        faults = check(fixture, lane, plans, grid or GRIDS, seed, out, progress=progress)
    if faults:
        print(f"{out}: {len(faults)} faults, first: {faults[0]}")
        raise typer.Exit(1)


@app.command("table")
def table(
    name: Annotated[
        str, typer.Argument(help="geometry, studies, trajectories, relations, differences, mutations or prediction.")
    ],
    source: Annotated[list[Path], typer.Option("--from", help="fixture.json, score.json or mutations.json; repeat.")],
    out: Annotated[Path, typer.Option(help="Folder for the table as .parquet, .csv and .md, and its manifest.")],
    published: Annotated[Path, typer.Option(help="The published numbers.")] = Path(
        "fixtures/published/route_block.json"
    ),
) -> None:
    """Write one table of study A from the documents of any number of lanes and points."""
    from routeblock.declared import find
    from routeblock.route_block import gpu_tables, tables
    from routeblock.route_block.document_tables import write

    write(find(name, tables.TABLES | gpu_tables.TABLES, "table"), source, published, out)
