# SPDX-License-Identifier: Apache-2.0
"""What Snakemake adds: a dry run and a run with nothing to do on a finished study, and the time beside each process.

    python bench/workflow.py [--rounds N] [--processes N] [OUT.json]

The third number: seconds of a workflow that makes N runs of study A, less the seconds of the same N command lines
started by hand, two at a time as well, divided by N. Rounds alternate the two. Wall seconds depend on who else uses the
machine; the processor time (user and system, of every process started) stands beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from routeblock.route_block.facts import schedule

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
SNAKEMAKE = [str(BIN / "snakemake"), "--profile", str(ROOT / "workflow/profiles/default"), "--cores", "2"]
FIXTURE = "results/fixtures/published_geometry"
STUDY = "results/route_block/published_geometry/twin-hopper/published/stored"
GOALS = {"dry run": 2.5, "nothing to do": 4.0, "beside each process": 0.15}  # wall seconds, 2 cores of their own


@dataclass(frozen=True)
class Cost:
    """Seconds of the clock and of the processors."""

    wall: float
    cpu: float

    def beside(self, other: Cost, count: int) -> Cost:
        """What this costs more than `other`, for each of `count`."""
        return Cost((self.wall - other.wall) / count, (self.cpu - other.cpu) / count)


def timed(commands: Sequence[Sequence[str]], folder: Path, at_once: int = 1) -> Cost:
    """What the commands cost, so many at once. Ends this process with what a command said that failed."""

    def start(command: Sequence[str]) -> None:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}")

    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(start, commands))
        except RuntimeError as e:
            sys.exit(str(e))
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def nothing_to_do() -> str:
    """Why the checkout's study is not finished; empty if it is."""
    done = subprocess.run(
        [*SNAKEMAKE, "--dry-run"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return "" if "Nothing to be done" in done.stdout else "there is no finished study here; run make study first"


def start_again(folder: Path) -> None:
    """A checkout in `folder` in which everything before the runs of one lane is there."""
    for name in ("results", ".snakemake"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("Snakefile", "config.yaml", "envs", "fixtures", "workflow"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / FIXTURE, folder / FIXTURE)
    (folder / STUDY).mkdir(parents=True)
    for name in ("prediction.json", "prediction.manifest.json"):
        shutil.copy2(ROOT / STUDY / name, folder / STUDY / name)


def by_hand(cell: str, history: str, replicate: int) -> list[str]:
    """The command line of one run, as the rule `run` has it."""
    options = {
        "fixture": FIXTURE,
        "prediction": f"{STUDY}/prediction.json",
        "lane": "twin-hopper",
        "cell": cell,
        "history": history,
        "replicate": str(replicate),
        "out": f"{STUDY}/{cell}/{history}/rep{replicate}",
    }
    return [str(BIN / "routeblock"), "run", *(part for k, v in options.items() for part in (f"--{k}", v))]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=70)
    parser.add_argument("out", type=Path, nargs="?")
    given = parser.parse_args()
    if problem := nothing_to_do():
        print(problem, file=sys.stderr)
        return 2
    runs = list(schedule(5))[: given.processes]
    costs: dict[str, list[Cost]] = {name: [] for name in GOALS}
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(given.rounds):
            costs["dry run"].append(timed([[*SNAKEMAKE, "--dry-run"]], ROOT))
            costs["nothing to do"].append(timed([SNAKEMAKE], ROOT))
            start_again(folder)
            records = [f"{STUDY}/{cell}/{history}/rep{n}/record.json" for cell, history, n in runs]
            workflow = timed([[*SNAKEMAKE, "--rerun-triggers", "mtime", "--", *records]], folder)
            start_again(folder)
            processes = timed([by_hand(*run) for run in runs], folder, at_once=2)
            costs["beside each process"].append(workflow.beside(processes, len(runs)))
    table = Table(title=f"Snakemake, medians of {given.rounds}; {len(runs)} runs; load before: {load[0]:.1f}")
    for column in ("", "wall s", "goal", "processor s"):
        table.add_column(column, justify="right" if column else "left")
    for name, found in costs.items():
        wall, cpu = (statistics.median(getattr(cost, kind) for cost in found) for kind in ("wall", "cpu"))
        table.add_row(name, f"{wall:.2f}", f"{GOALS[name]:.2f}", f"{cpu:.2f}")
    Console(width=110).print(table)
    if given.out:
        document = {name: [asdict(cost) for cost in found] for name, found in costs.items()}
        given.out.write_text(json.dumps({"seconds": document, "processes": len(runs), "load": load}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
