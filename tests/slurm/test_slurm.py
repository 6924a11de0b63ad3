# SPDX-License-Identifier: Apache-2.0
"""A lane of study A through a real Slurm with two pretend GPUs: `make test-slurm`.

The lane is twin-hopper, whose processes are made to ask for a GPU each. Its digests are compared with those of the
finished study of this checkout, or else of the same lane made here with the local executor.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
import reaper
from single_node import Node, single_node

from routeblock.route_block.facts import CELLS, HISTORIES

ROOT = Path(__file__).resolve().parents[2]
SNAKEMAKE = Path(sys.executable).with_name("snakemake")
STUDY = "results/route_block/published_geometry/twin-hopper/published/stored"
SCORE = f"{STUDY}/score.json"
REPLICATES = 5
RUNS = [f"{STUDY}/{c}/{h}/rep{n}" for c in CELLS for h in HISTORIES for n in range(1, REPLICATES + 1)]
FILES = [f"{run}/{name}" for run in RUNS for name in ("record.json", "tensors.safetensors")]
FILES += [SCORE, f"{STUDY}/prediction.json", "results/fixtures/published_geometry/fixture.json"]
LIMIT_S = 600
# What a cluster's own profile would say: how small this one is, and that the twin's processes hold a GPU here.
HERE = ("--cores", "2", "--latency-wait", "10", "--slurm-init-seconds-before-status-checks", "1")
AS_GPU = ("--set-resources", "run:gpu=1")


@dataclass(frozen=True)
class Lane:
    """A checkout with one lane of study A, by links to this one, and results of its own."""

    root: Path

    @classmethod
    def fresh(cls, root: Path) -> Lane:
        """Nothing made yet."""
        for name in ("Snakefile", "envs", "fixtures", "workflow"):
            (root / name).symlink_to(ROOT / name)
        config = (ROOT / "config.yaml").read_text()
        changed = config.replace("lanes: [twin-ampere, twin-hopper, recorded-h200]", "lanes: [twin-hopper]")
        assert changed != config
        (root / "config.yaml").write_text(changed)
        return cls(root)

    def snakemake(self, *arguments: str, node: Node | None = None) -> subprocess.CompletedProcess[str]:
        """Run Snakemake, through Slurm or here, within the time."""
        profile = ["--profile", f"workflow/profiles/{'slurm' if node else 'default'}"]
        command = ["timeout", "--kill-after=10", str(LIMIT_S), str(SNAKEMAKE), *profile, *arguments]
        environment = node.environment if node else None
        return subprocess.run(
            command, cwd=self.root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def digests(self) -> dict[str, str]:
        """SHA-256 of every file that two makings of the lane must have in common."""
        return {name: hashlib.sha256((self.root / name).read_bytes()).hexdigest() for name in FILES}

    def spans(self) -> dict[str, tuple[float, float]]:
        """When each run's process started, as it says, and when its folder got its last file, by folder.

        Other times would not do: Snakemake writes those of a group, and touches its files, when all of it has ended.
        """
        found = {}
        for run in RUNS:
            start = datetime.fromisoformat(json.loads((self.root / run / "telemetry.json").read_text())["start"])
            found[run] = (start.timestamp(), (self.root / run).stat().st_mtime)
        return found


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with single_node(gpus=2, cpus=8, limit_s=3 * LIMIT_S) as node:
        yield node


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Lane:
    """The lane without Slurm: of this checkout's finished study, where there is one."""
    lane = Lane(ROOT)
    if "Nothing to be done" in lane.snakemake("--dry-run", "--", SCORE).stdout:
        return lane
    lane = Lane.fresh(tmp_path_factory.mktemp("local"))
    done = lane.snakemake("--cores", "2", "--", SCORE)
    assert done.returncode == 0, done.stdout
    return lane


@pytest.fixture(scope="module")
def made(node: Node, local: Lane, tmp_path_factory: pytest.TempPathFactory) -> Lane:
    """The lane through Slurm, within the time."""
    lane = Lane.fresh(tmp_path_factory.mktemp("slurm"))
    started = time.monotonic()
    done = lane.snakemake(*HERE, *AS_GPU, "--", SCORE, node=node)
    print(f"the lane took {time.monotonic() - started:.0f} s")
    assert done.returncode == 0, done.stdout + node.diagnosis()
    return lane


def most_at_once(spans: list[tuple[float, float]]) -> int:
    """The largest number of spans that have a moment in common."""
    return max(sum(start <= moment < end for start, end in spans) for moment, _ in spans)


def test_a_lane_through_slurm_has_the_digests_of_the_local_run(made: Lane, local: Lane) -> None:
    assert len(RUNS) == 70
    assert made.digests() == local.digests()


def test_two_gpus_run_two_processes_at_a_time_and_each_job_one(made: Lane, node: Node) -> None:
    spans = made.spans()
    assert most_at_once(list(spans.values())) == 2
    for n in range(1, REPLICATES + 1):
        assert most_at_once([span for run, span in spans.items() if run.endswith(f"/rep{n}")]) == 1
    grants = node.grants()
    assert len(grants) == REPLICATES  # a replicate is one job
    assert {gpu for _, gpu in grants} == {"0", "1"}


def test_every_job_has_logs(made: Lane, node: Node) -> None:
    ended = node.completed()
    assert {job["JobState"] for job in ended} == {"COMPLETED"}
    logs = {path.stem for path in (made.root / "results" / "logs" / "slurm").rglob("*.log")}
    assert logs == {job["JobId"] for job in ended}
    assert all((made.root / run.replace("results/", "results/logs/", 1)).with_suffix(".log").exists() for run in RUNS)


def test_a_job_whose_node_fails_is_started_again(made: Lane, local: Lane, node: Node) -> None:
    lost = f"{STUDY}/canonical/H1/rep5"
    shutil.rmtree(made.root / lost)
    arguments = [*HERE, *AS_GPU, "--", f"{lost}/record.json"]
    command = ["timeout", "--kill-after=10", "300", str(SNAKEMAKE), "--profile", "workflow/profiles/slurm", *arguments]
    before = len(node.grants())
    with subprocess.Popen(
        command, cwd=made.root, env=node.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        while len(node.grants()) == before and process.poll() is None:
            time.sleep(0.1)
        node.command("scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=test")
        node.command("scontrol", "update", f"NodeName={node.name}", "State=RESUME")
        output = process.communicate()[0]
    assert process.returncode == 0, output + node.diagnosis()
    (first, _), *others = node.grants()[before:]
    assert [job for job, _ in others] == [first]  # the same job, once more
    assert made.digests() == local.digests()


def test_a_check_that_finds_something_is_not_tried_again(made: Lane, node: Node) -> None:
    tensors = made.root / RUNS[0] / "tensors.safetensors"
    sound = tensors.read_bytes()
    tensors.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    (made.root / SCORE).unlink()
    before = len(node.completed())
    done = made.snakemake(*HERE, *AS_GPU, "--", SCORE, node=node)
    tensors.write_bytes(sound)
    assert done.returncode == 1
    assert [job["JobState"] for job in node.completed()[before:]] == ["FAILED"]
    log = made.root / SCORE.replace("results/", "results/logs/", 1).replace(".json", ".log")
    assert RUNS[0].removeprefix(f"{STUDY}/") in log.read_text()


BODY = """
import sys, time
sys.path.insert(0, {here!r})
from single_node import single_node
with single_node(limit_s=60) as node:
    node.command("sbatch", "--output=/dev/null", "--wrap", "srun sleep 50")
    while not node.command("squeue", "--noheader", "--states=RUNNING"):
        time.sleep(0.1)
    time.sleep(0.5)
    print(node.folder, flush=True)
    {then}
"""


@pytest.mark.parametrize(
    ("then", "number"),
    [
        ("pass", None),
        ("raise RuntimeError('a failed test')", None),
        ("time.sleep(50)", signal.SIGINT),
        ("time.sleep(50)", signal.SIGTERM),
        ("time.sleep(50)", signal.SIGKILL),
    ],
    ids=["ended", "failed", "interrupted", "terminated", "killed"],
)
def test_no_process_and_no_file_is_left(then: str, number: signal.Signals | None) -> None:
    code = BODY.format(here=str(Path(__file__).parent), then=then)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as p:
        assert p.stdout is not None
        folder = Path(p.stdout.readline().strip())
        assert folder.name.startswith("routeblock-slurm-")
        if number is not None:
            names = set(reaper.marked(folder).values())
            assert {"munged", "slurmctld", "slurmd", "slurmstepd", "sleep"} <= names
            p.send_signal(number)
    until = time.monotonic() + 30
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.1)
    left = reaper.marked(folder)
    reaper.end(folder)
    assert not left and not folder.exists()


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("single_node.TOOLS", ("munged", "no-such-tool"))
    with pytest.raises(RuntimeError, match="no-such-tool not found"), single_node():
        pass


def test_a_daemon_that_does_not_start_is_said_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("single_node.CONFIG", "ClusterName=nothing else\n")
    with pytest.raises(RuntimeError, match=r"slurm(ctld|d) ended with 1\n== "), single_node():
        pass
