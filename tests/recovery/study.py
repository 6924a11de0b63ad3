# SPDX-License-Identifier: Apache-2.0
"""A small real study to trace, break, repair, kill and recover: a generated checkpoint, one lane, one replicate."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkout import ROOT, Checkout
from done import set_knobs

from routeblock.checkpoint.generator import Spec, generate
from routeblock.evidence.manifest import SUFFIX, Manifest
from routeblock.recovery import Living, living

TRACER = Path(__file__).with_name("tracer")
# Starts a program where there is no network, not even loopback; some kernels and containers do not allow it.
OFFLINE = ["unshare", "--map-root-user", "--net"]
CHECKPOINT = Spec(layers=1, hidden=512, intermediate=384, experts=64, top_k=4, group_size=128, dtype="bfloat16")
KNOBS = {
    "fixture.name": "checkpoint",
    "checkpoint.path": "checkpoints/small",
    "checkpoint.revision": None,
    "checkpoint.layer": 0,
    "checkpoint.confirm": False,
    "lanes": ["twin-hopper"],
    "replicates": 1,
    "grouped_schedule.lanes": ["recorded-h200"],
}
STUDY = "results/route_block/checkpoint/twin-hopper/published/stored"
# What is asked of the study that is killed: study A from its fixture to two tables.
TABLES = ("results/tables/relations.md", "results/tables/mutations.md")
_OWN = "--fixture results/fixtures/published_geometry"
# What else is cheap to make, so that more rules are traced.
EVIDENCE = "results/route_block/published_geometry/recorded-h200"
MORE = (
    "all",
    "bundle",
    f"{EVIDENCE}/published/census.json",
    f"{EVIDENCE}/published/stored/score.json",
    f"{EVIDENCE}/probe_control.json",
    "results/probe/grid_probe.so",
    "results/build/sm_90/q6k_schedules.cubin",
)
# Differ between two runs of the same, and nothing is made from them.
TELEMETRY = ("telemetry.json", "environment.json")


def prepare(root: Path) -> Checkout:
    """A checkout of the small study, nothing made."""
    root.mkdir()
    checkout = Checkout.fresh(root)
    shutil.copytree(ROOT / "fixtures", root / "fixtures")
    generate(root / "checkpoints" / "small", CHECKPOINT)
    set_knobs(checkout, KNOBS)
    return checkout


@dataclass(frozen=True)
class Finished:
    """The small study, undisturbed: its folder, and where its processes were traced to."""

    root: Path
    traces: Path

    @property
    def checkout(self) -> Checkout:
        """Its checkout."""
        return Checkout(self.root)


@dataclass(frozen=True)
class Workflow:
    """Snakemake at work in a checkout, in a process group of its own."""

    checkout: Checkout
    process: subprocess.Popen[str]
    log: Path

    @classmethod
    def start(
        cls, checkout: Checkout, *targets: str, trace: Path | None = None, before: Sequence[str] = ()
    ) -> Workflow:
        """Start it as `make study` does, for `targets` or for all; `before`: what starts it, and becomes it."""
        environment = os.environ | {"PYTHONPATH": str(checkout.root / "workflow")}
        if trace:
            environment |= trace_environment(checkout.root, trace)
        log = checkout.root / "snakemake.log"
        command = [sys.executable, "-m", "snakemake", "--profile", "workflow/profiles/default", "--cores", "2"]
        with log.open("w") as out:
            process = subprocess.Popen(
                [*before, *command, "--", *targets],
                cwd=checkout.root,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        return cls(checkout, process, log)

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(3600)

    def until(self, found: Callable[[Path], Living | None], limit_s: float = 1800) -> Living:
        """Wait for a process."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if process := found(self.checkout.root):
                return process
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.005)
        raise AssertionError("it never came")

    def kill(self) -> None:
        """Kill the scheduler alone: its jobs live on."""
        self.process.kill()
        self.process.wait(30)

    def kill_all(self) -> None:
        """Kill the scheduler and every job, as a power cut would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def can_be_offline() -> bool:
    """Whether `OFFLINE` works here."""
    try:
        return subprocess.run([*OFFLINE, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


def python_of(command: str) -> Callable[[Path], Living | None]:
    """Finds the Python process of a job by its `routeblock` command."""

    def find(root: Path) -> Living | None:
        jobs = (
            p for p in living(root) if f"routeblock {command} " in p.command and not p.command.startswith("/bin/bash")
        )
        return next((p for p in jobs if "python" in p.command.split()[0]), None)

    return find


def digests(checkout: Checkout) -> dict[str, str]:
    """SHA-256 by path of everything that was made and sealed, without telemetry."""
    found = {}
    for path in sorted((checkout.root / "results").rglob(f"*{SUFFIX}")):
        manifest = Manifest.model_validate(json.loads(path.read_bytes()) | {}, strict=False)
        for entry in manifest.outputs:
            made = path.parent / entry.path
            if made.name not in TELEMETRY:
                found[made.relative_to(checkout.root).as_posix()] = entry.sha256
    return found


# Commands of rules that the study does not ask for, on less than those would take; `by_hand` is where they write.
BY_HAND = (
    f"study-a freeze --superseded {_OWN} --lane twin-hopper --out by_hand/superseded.json",
    f"study-a control {_OWN} --prediction by_hand/superseded.json --lane twin-hopper --out by_hand/control.json",
    "study-a random-plans --fixture results/fixtures/checkpoint --lane twin-hopper --plans 1 --out by_hand/random.json",
    "study-a table prediction --from by_hand/random.json --out by_hand",
    f"study-a table census --from {EVIDENCE}/published/census.json --out by_hand",
    f"study-a table probe_control --from {EVIDENCE}/probe_control.json --out by_hand",
)


def trace_by_hand(finished: Finished) -> None:
    """Trace what the study did not run."""
    traces = finished.traces / "by_hand"
    traces.mkdir()
    environment = os.environ | trace_environment(finished.checkout.root, traces)
    for command in BY_HAND:
        done = subprocess.run(
            [sys.executable, "-m", "routeblock", *command.split()],
            cwd=finished.checkout.root,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


def trace_environment(root: Path, traces: Path) -> dict[str, str]:
    """What makes a process write its trace."""
    return {"PYTHONPATH": os.pathsep.join([str(root / "workflow"), str(TRACER)]), "TRACE": str(traces)}
