# SPDX-License-Identifier: Apache-2.0
"""The command line. A command imports what it needs when it runs, so that `--help` answers at once.

Exit codes: 0 it holds, 1 a check found something, 2 bad input or a disk that does not take the result (one line on
stderr), 130 and 143 interrupted, 141 if the reader of the output went away.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import Abort, TyperException

from routeblock import cli_alignment, cli_diagnose, cli_dispatch, cli_explain, cli_figures, cli_grouped, cli_native
from routeblock.errors import InputError


class _ReaderGoneError(Exception):
    """Nobody reads the output any more."""


class _Commands(TyperGroup):
    """The commands. Typer takes the end of a file for the end of the user's answers, and a reader that has gone for a
    failure: it never sees either from here.
    """

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().make_context(*arguments, **options)
        except BrokenPipeError as e:  # the help's
            raise _ReaderGoneError from e

    # Typer names this context by its base class, which it does not export.
    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except BrokenPipeError as e:
            raise _ReaderGoneError from e
        except EOFError as e:
            raise InputError(
                f"a file ends too early: {e}",
                where="routeblock",
                limit="every input must be whole",
                way_out="restore the inputs or make them again",
            ) from e
        except UnicodeError as e:
            raise InputError(
                f"not UTF-8: {e}",
                where="routeblock",
                limit="text files and names are UTF-8",
                way_out="correct the file, or rename it",
            ) from e


app = typer.Typer(cls=_Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
cli_grouped.register(app)
cli_alignment.register(app)
cli_dispatch.register(app)
cli_figures.register(app)
cli_diagnose.register(app)
cli_explain.register(app)
cli_native.register(app)

LAST_SEED = 2**63 - 1  # as config.yaml has it: what a column of a table can hold

# What a path must be that the system refuses, and the way out.
_NEEDED = {
    errno.ENOENT: ("the command needs it", "name one that exists, or make it first"),
    errno.ELOOP: ("links must lead to a file or folder", "replace the links that lead to each other"),
    errno.ENOTDIR: ("every part of the path but the last must be a folder", "name another path"),
    errno.EISDIR: ("a file is needed, this is a folder", "name the file"),
    errno.EACCES: ("it must be readable", "change its permissions"),
    errno.EPERM: ("it must be readable", "change its permissions"),
    errno.ENAMETOOLONG: ("names have at most 255 bytes", "choose a shorter name"),
}

Gpu = Annotated[int, typer.Option(help="Which of the visible GPUs, from 0.", min=0)]
After = Annotated[Path | None, typer.Option(help="Touch the GPU only once this file (record.json) is there.")]
Limit = Annotated[float, typer.Option(help="Seconds to wait for the file, and for the GPU's lock.", min=0)]
FixtureFolder = Annotated[Path, typer.Option(help="Folder of a fixture.")]
LaneName = Annotated[str, typer.Option(help="twin-ampere, twin-hopper or cuda.")]
Roots = Annotated[list[Path], typer.Argument(help="Folders of sealed results.")]
Sources = Annotated[
    list[Path] | None,
    typer.Option("--source", help="A file or folder of given inputs; default: those of the checkout."),
]
FrozenPrediction = Annotated[Path, typer.Option(help="The frozen prediction of the runs.")]
ExpectedIdentity = Annotated[
    Path, typer.Option(help="What was expected to compute: identity.json of the lane, or the one beside evidence.")
]
RunsFolder = Annotated[Path, typer.Option(help="Folder of the runs, {cell}/{history}/rep{n} below it.")]
Replicates = Annotated[int, typer.Option(help="Replicates of each cell and history.", min=1)]
CapturedPlans = Annotated[Path | None, typer.Option(help="Captured plans of H0 and H1; default: the fixture's.")]
FiledLane = Annotated[
    str | None, typer.Option("--lane", help="Lane to file it under: the runs' own, or recorded-... for evidence.")
]
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

    write(out, pins)


@app.command()
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
    point: Annotated[str, typer.Option(help="published or auto.")] = "published",
    plan_source: Annotated[str, typer.Option(help="stored or captured.")] = "stored",
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


@app.command()
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


@app.command()
def run(
    fixture: FixtureFolder,
    prediction: Annotated[Path, typer.Option(help="The frozen prediction of this lane and point.")],
    lane: LaneName,
    cell: Annotated[str, typer.Option(help="native, replay, cross, swap_within, swap_across, full_k, canonical.")],
    history: Annotated[str, typer.Option(help="H0 or H1.")],
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


@app.command()
def capture(
    fixture: FixtureFolder,
    history: Annotated[str, typer.Option(help="H0 or H1.")],
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


@app.command()
def freeze_plans(
    fixture: FixtureFolder,
    captures: Annotated[list[Path], typer.Option("--from", help="Folder of a capture; one of H0, one of H1.")],
    out: Annotated[Path, typer.Option(help="File to write, plans.safetensors; plans.json and the seal beside it.")],
) -> None:
    """Put the captured plans of both histories into one file, before any run."""
    from routeblock.route_block.gpu.captures import freeze_plans as freeze

    freeze(fixture, captures, out)


@app.command()
def census(
    fixture: FixtureFolder,
    prediction: Annotated[Path, typer.Option(help="A frozen prediction of lane cuda: its launches are used.")],
    history: Annotated[str, typer.Option(help="H0 or H1.")],
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


@app.command()
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


@app.command()
def pack_evidence(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    results: Annotated[list[Path] | None, typer.Option(help="A results folder with runs of lane cuda; repeat.")] = None,
    add: Annotated[list[Path] | None, typer.Option(help="A folder that this command wrote, to add; repeat.")] = None,
) -> None:
    """Pack GPU runs, captures and censuses: every record as it is, distinct tensors once each."""
    from routeblock.route_block.runs.recorded import pack_evidence as pack

    pack(results or [], add or [], out)


@app.command()
def restore_evidence(
    fixture: FixtureFolder,
    evidence: Annotated[Path, typer.Option(help="A folder that pack-evidence wrote.")],
    group: Annotated[str, typer.Option(help="What to rebuild: published.stored, published.census, probe_control ...")],
    out: Annotated[Path, typer.Option(help="Folder to rebuild it in.")],
) -> None:
    """Rebuild recorded run folders bit for bit; any other byte is refused."""
    from routeblock.route_block.runs.recorded import restore

    restore(fixture, evidence, group, out)


@app.command()
def agree(
    fixture: FixtureFolder,
    prediction: FrozenPrediction,
    runs: RunsFolder,
    lane: Annotated[str, typer.Option(help="Lane to file it under: cuda, or recorded-... for evidence.")],
    out: Annotated[Path, typer.Option(help="File to write, agreement.json; its manifest goes beside it.")],
) -> None:
    """Recompute every surface that a GPU gave with the twin of its architecture; exit 1 if one bit differs."""
    from routeblock.route_block.gpu.agreement import agree as recompute

    if differing := recompute(fixture, prediction, runs, lane, out):
        print(f"{runs}: the twin differs from {len(differing)} recorded surfaces, {differing[0]} first")
        raise typer.Exit(1)


@app.command()
def summarize_census(
    folder: Annotated[Path, typer.Argument(help="Folder of a census: {history}/process{n}.json.")],
    lane: LaneName,
    out: Annotated[Path, typer.Option(help="File to write, census.json; its manifest goes beside it.")],
) -> None:
    """Count distinct plans and final outputs over the processes of a census."""
    from routeblock.route_block.gpu.census_summary import summarize

    summarize(lane, folder, out)


@app.command()
def compare_unassisted(
    folder: Annotated[Path, typer.Argument(help="Folder with what `unassisted` wrote with and without the probe.")],
    lane: LaneName,
    out: Annotated[Path, typer.Option(help="File to write, probe_control.json; its manifest goes beside it.")],
) -> None:
    """Compare grids that need no probe with and without it; exit 1 if a bit or a grid differs."""
    from routeblock.route_block.gpu.probe_comparison import compare

    if differing := compare(lane, folder, out):
        print(f"{folder}: {len(differing)} launches differ with and without the probe, {differing[0]} first")
        raise typer.Exit(1)


@app.command()
def compare_versions(
    results: Annotated[list[Path], typer.Option("--from", help="A result of tests/gpu/first_contact.py; repeat.")],
    out: Annotated[Path, typer.Option(help="File to write, versions.json; its manifest goes beside it.")],
    golden: Annotated[Path, typer.Option(help="Folder of recorded kernel outputs.")] = Path("fixtures/golden"),
    contents: Annotated[Path | None, typer.Option(help="List of the results' SHA-256, which they must have.")] = None,
) -> None:
    """Put what several versions of the extension gave on the recorded layer side by side."""
    from routeblock.route_block.gpu.versions import compare

    compare(results, golden, out, contents=contents)


@app.command()
def control(
    fixture: FixtureFolder,
    prediction: Annotated[Path, typer.Option(help="A superseded prediction (freeze --superseded).")],
    lane: LaneName,
    out: Annotated[Path, typer.Option(help="File to write, control.json; its manifest goes beside it.")],
) -> None:
    """Show that the superseded prediction is refused before any arithmetic; exit 1 if a run would start."""
    from routeblock.route_block.runs.negative_control import control as check_control

    if not check_control(fixture, prediction, lane, out):
        print(f"{prediction}: a run would have started")
        raise typer.Exit(1)


@app.command()
def check_twin(
    golden: Annotated[Path, typer.Option(help="Folder of recorded kernel outputs.")],
    out: Annotated[Path, typer.Option(help="File to write, golden.json; its manifest goes beside it.")],
) -> None:
    """Compare the twin with every recorded output, bit for bit; exit 1 if one differs."""
    from routeblock.twin.self_test import check

    if differing := check(golden, out):
        print(f"{golden}: {len(differing)} recorded outputs differ, {differing[0]} first")
        raise typer.Exit(1)


@app.command()
def build_probe(out: Annotated[Path, typer.Argument(help="File to write; its manifest goes beside it.")]) -> None:
    """Compile the grid probe of the lane `cuda` with the system's C compiler."""
    from routeblock.cuda.grid_probe import make

    make(out)


@app.command()
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


@app.command()
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
        _print_findings(findings, verbose)
        raise typer.Exit(1)


@app.command()
def random_plans(
    fixture: FixtureFolder,
    lane: LaneName,
    out: Annotated[Path, typer.Option(help="File to write; its manifest goes beside it.")],
    plans: Annotated[int, typer.Option(help="Number of random legal plans.", min=1)] = 200,
    grids: Annotated[str, typer.Option(help="Grids, separated by commas.")] = "246,200,528",
    seed: Annotated[int, typer.Option(help="Seed of the plans.", min=0, max=LAST_SEED)] = 1,
) -> None:
    """Check the prediction on random plans, route by route; exit 1 if it is wrong once."""
    from routeblock.progress import shown
    from routeblock.route_block.prediction.random_plans import check

    try:
        sizes = [int(grid) for grid in grids.split(",")]
    except ValueError as e:
        raise InputError(
            f"grids {grids!r}", where="random-plans", limit="integers, commas between", way_out="246,200"
        ) from e
    with shown("random plans") as progress:
        faults = check(fixture, lane, plans, sizes, seed, out, progress=progress)
    if faults:
        print(f"{out}: {len(faults)} faults, first: {faults[0]}")
        raise typer.Exit(1)


@app.command()
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
    from routeblock.rule_code import RESTORED, given

    found = chain.verify(*roots, check_code=not ignore_code, sources=source or given(), elsewhere=RESTORED)
    if not found:
        print(f"{' '.join(map(str, roots))}: every artifact fits its manifest")
        return
    _print_findings(found, verbose)
    raise typer.Exit(1)


def _print_findings(found: Sequence[object], verbose: bool) -> None:
    first, *others = found
    more = f" (and {len(others)} more; routeblock verify -v lists them)" if others and not verbose else ""
    print(f"{first}{more}")
    for finding in others if verbose else ():
        print(finding)


@app.command()
def repair(roots: Roots, source: Sources = None, verbose: Verbose = False) -> None:
    """Take away results that do not fit their manifests, and all made from them, for the workflow to make again."""
    from routeblock.evidence import chain
    from routeblock.rule_code import RESTORED, given

    done = chain.repair(*roots, sources=source or given(), elsewhere=RESTORED)
    print(f"{' '.join(map(str, roots))}: {len(done.removed)} files removed")
    for path in done.removed if verbose else ():
        print(path)
    for path, aside in done.moved:
        print(f"{path}: moved to {aside}; no manifest lists it")
    for finding in done.given:
        print(f"{finding}; given, so left as it is: restore it (git checkout), or keep it and what is made from it")


@app.command()
def recover(
    results: Annotated[Path, typer.Argument(help="The results folder.")] = Path("results"),
    limit: Annotated[float, typer.Option(help="Seconds to wait for jobs that still run.", min=0)] = 3600,
) -> None:
    """After a killed workflow: wait for the jobs that it left, then clear its lock and half-written files."""
    from routeblock.recovery import recover as clear

    for line in clear(Path(), results, limit):
        print(line)


@app.command()
def check_config(
    file: Annotated[Path, typer.Argument(help="The study's settings.")] = Path("config.yaml"),
) -> None:
    """Read a study's settings and refuse what does not fit, before the workflow starts. Prints nothing if all fits."""
    from routeblock.config import load

    load(file)


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="Folder for routeblock.html and its manifest.")] = Path("reports"),
    results: Annotated[Path, typer.Option(help="The study's results.")] = Path("results"),
    captions: Annotated[Path, typer.Option(help="Folder of captions.")] = Path("workflow/report"),
    config: Annotated[Path, typer.Option(help="The study's settings.")] = Path("config.yaml"),
    table: Annotated[list[str] | None, typer.Option(help="A table; repeat. Default: all that are there.")] = None,
    figure: Annotated[list[str] | None, typer.Option(help="A figure; repeat. Default: all that are there.")] = None,
) -> None:
    """Write the report: one HTML file that needs no network and no other file."""
    from routeblock.report.catalogue import FIGURES, TABLES
    from routeblock.report.page import Request, in_order, present, write

    tables, figures = present(results)
    wanted = in_order(table or tables, TABLES), in_order(figure or figures, FIGURES)
    request = Request(results, captions, config, *wanted)
    print(write(out, request))


@app.command()
def readme(
    file: Annotated[Path, typer.Argument(help="The README.")] = Path("README.md"),
    tables: Annotated[Path, typer.Option(help="Folder of the study's tables.")] = Path("results/tables"),
    check: Annotated[
        bool, typer.Option("--check", help="Only compare; exit 1 if its figures are not the tables'.")
    ] = False,
) -> None:
    """Write the figures of the README from the tables of a study."""
    from routeblock.report.readme import update

    if not update(file, tables, check=check) and check:
        print(f"{file}: its figures are not those of {tables}; write them with routeblock readme")
        raise typer.Exit(1)


@app.command()
def generate(root: Annotated[Path, typer.Argument(help="The checkout.")] = Path()) -> None:
    """Write what is generated from the code: JSON schemas, captions, the README's lists of tables and figures."""
    from routeblock.generated import write

    write(root)


Checkpoint = Annotated[Path, typer.Argument(help="Folder of a checkpoint, plain or in the hub's cache.")]
Revision = Annotated[str | None, typer.Option(help="Commit that the folder must hold.")]


@app.command()
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


@app.command()
def manifest(
    path: Checkpoint,
    out: Annotated[Path, typer.Option(help="Folder for files.json, identity.json and their seal.")],
    revision: Revision = None,
    layer: Annotated[int | None, typer.Option(help="Layer that the model identity names.")] = None,
) -> None:
    """Hash every file of a checkpoint, and derive its identity."""
    from routeblock.checkpoint.manifest import seal_manifest

    seal_manifest(path, out, revision, layer)


@app.command()
def checkpoint_fixture(
    path: Checkpoint,
    manifest: Annotated[Path, typer.Option(help="The checkpoint's files.json (routeblock manifest).")],
    out: Annotated[Path, typer.Option(help="Folder of the fixture.")],
    layer: Annotated[int, typer.Option(help="Decoder layer.")],
    revision: Revision = None,
    captured: Annotated[Path | None, typer.Option(help="Captured hidden states (safetensors).")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text of a stand-in.")] = None,
    token_ids: Annotated[str | None, typer.Option(help="Token ids of a stand-in, separated by commas.")] = None,
    point: Annotated[
        list[str] | None, typer.Option(help="POINT:LANE that the pair search looks at, first first.")
    ] = None,
    all_experts: Annotated[bool, typer.Option("--all-experts", help="Keep experts that no route uses.")] = False,
    confirm: Annotated[bool, typer.Option("--confirm", help="Let the twin look for pairs that change bits.")] = False,
) -> None:
    """Make a fixture of one layer of a checkpoint: packed experts, routed inputs, pairs and plans by search."""
    from routeblock.route_block.fixtures.from_checkpoint import Request, parse_points, parse_tokens, seal_fixture

    request = Request(
        path,
        manifest,
        layer,
        revision,
        captured,
        prompt,
        parse_tokens(token_ids),
        parse_points(point),
        all_experts,
        confirm,
    )
    seal_fixture(out, request)


@app.command()
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
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return its exit code."""
    signal.signal(signal.SIGTERM, _stop)
    _open_streams()
    try:
        _check_text(sys.argv[1:] if arguments is None else arguments)
        code = app(args=arguments, prog_name="routeblock", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except InputError as e:
        return _refuse(str(e))
    except TyperException as e:
        context = getattr(e, "ctx", None)
        command = context.command_path if context else "routeblock"
        return _refuse(f"{command}: {' '.join(e.format_message().split()).rstrip('.')}; see {command} --help")
    except (BrokenPipeError, _ReaderGoneError):
        _silence(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as e:
        return _refuse(str(_unusable(e)))
    except Abort:
        return 128 + signal.SIGINT


def _open_streams() -> None:
    """Open what this process was started without: a file that is opened later would take the place of stdout."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        elif isinstance(stream, io.TextIOWrapper):  # a path may hold what the terminal's encoding does not
            stream.reconfigure(errors="backslashreplace")


def _silence(stream: IO[str]) -> None:
    """Send what is still to be written to nobody: its reader has gone, also for what is flushed at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _check_text(arguments: Sequence[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as e:
            raise InputError(
                "not UTF-8",
                where=f"argument {argument!a}",
                limit="seals name files in UTF-8",
                way_out="rename the file or folder",
            ) from e


def _unusable(error: OSError) -> InputError:
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        limit, way_out = "a disk with space that takes the output is needed", "free space or choose another place"
    else:
        limit, way_out = _NEEDED.get(error.errno or 0, ("it cannot be used", "name another, or restore it"))
    name = error.filename
    where = "routeblock" if name is None else os.fsdecode(name) if isinstance(name, bytes) else str(name)
    return InputError(what, where=where, limit=limit, way_out=way_out)


def _refuse(line: str) -> int:
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _silence(sys.stderr)
    return 2


def _stop(number: int, _frame: object) -> None:
    # As an exception, so that half-written files go away.
    sys.exit(128 + number)
