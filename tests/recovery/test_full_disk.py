# SPDX-License-Identifier: Apache-2.0
"""A disk that is full or read-only under every kind of writer: one line, exit 2, nothing half-written or lost.

The disk is a preloaded library: a process can write so many bytes below a folder, then no more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from study import STUDY, Finished

FIXTURE = "--fixture results/fixtures/checkpoint"
PREDICTION = f"{FIXTURE} --prediction {STUDY}/prediction.json"
IDENTITY = "--identity results/identity/twin-hopper/identity.json"
RECORDED = "fixtures/recorded/grouped_schedule/h200"
ALIGNMENT = "results/alignment_cost/recorded-h200"

LAST = 100  # bytes: times may be written in some more or fewer digits; the last file is longer

# What each kind of writer is, and a command that ends with `--out` and the place to write.
WRITERS = {
    "tensors and records of a run": f"study-a run {PREDICTION} --lane twin-hopper --cell native --history H0 --out run",
    "a streamed layer": (
        "checkpoint fixture checkpoints/small --manifest results/checkpoint/files.json --layer 0 --prompt Sort."
        " --out fixture"
    ),
    "a table": f"study-a table relations --from {STUDY}/score.json --out tables",
    "a score": f"study-a score {PREDICTION} {IDENTITY} --runs {STUDY} --replicates 1 --out score.json",
    "raw batches": (
        f"study-b recorded --source {RECORDED}/cuda/gpu0/confirmation --contents {RECORDED}/contents.json --out batches"
    ),
    "statistics": f"alignment statistics --record {ALIGNMENT} --out statistics",
    "an archive": f"study-b bundle --source {ALIGNMENT} --readme fixtures/bundles/grouped_schedule.md --out bundle",
    "restored evidence": (
        "study-a restore-evidence --fixture results/fixtures/published_geometry"
        " --evidence fixtures/recorded/h200-vllm0.24.0 --group probe_control --out restored"
    ),
    "an environment": "workflow environment --out environment",
}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("library") / "full_disk.so"
    source = Path(__file__).with_name("full_disk.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True)
    return built


@dataclass(frozen=True)
class Disk:
    """A folder that a command writes below, and how much it takes."""

    root: Path
    checkout: Path
    library: Path

    def run(self, command: str, **limit: str) -> subprocess.CompletedProcess[str]:
        """Run a command whose last word is the place to write."""
        *words, out = command.split()
        environment = os.environ | {"PYTHONPATH": str(self.checkout / "workflow")}
        if limit:
            environment |= {"LD_PRELOAD": str(self.library), "DISK": str(self.root)} | limit
        return subprocess.run(
            [sys.executable, "-m", "routeblock", *words, str(self.root / out)],
            cwd=self.checkout,
            env=environment,
            capture_output=True,
            text=True,
        )

    def files(self) -> dict[str, bytes]:
        """What lies there."""
        return {p.relative_to(self.root).as_posix(): p.read_bytes() for p in self.root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_takes_no_more_is_one_line_and_loses_nothing(
    finished: Finished, library: Path, tmp_path: Path, writer: str
) -> None:
    command = WRITERS[writer]
    first = Disk(tmp_path / "first", finished.checkout.root, library)
    first.root.mkdir()
    done = first.run(command)
    assert done.returncode == 0, done.stderr
    whole = first.files()
    size = sum(map(len, whole.values()))
    assert size > 0
    # Full at once; full before the last bytes and read-only, with an earlier result in place.
    for limit, earlier in (
        ({"DISK_BYTES": "0"}, False),
        ({"DISK_BYTES": str(size - LAST)}, True),
        ({"DISK_READ_ONLY": "1"}, True),
    ):
        place = tmp_path / ("earlier" if earlier else "new")
        place.mkdir(exist_ok=True)
        if earlier and not any(place.iterdir()):
            shutil.copytree(first.root, place, dirs_exist_ok=True)
        here = Disk(place, first.checkout, library)
        before = here.files()
        done = here.run(command, **limit)
        assert done.returncode == 2, (limit, done.stdout, done.stderr)
        line = done.stderr
        assert line.count("\n") == 1 and "Traceback" not in line and str(place) in line, line
        assert "cannot be written: " in line and line.count("; ") == 2, line
        after = here.files()
        assert after.keys() <= whole.keys() and after.keys() >= before.keys()
        # What is there is whole; times differ from run to run.
        partial = {name for name in after if len(after[name]) != len(whole[name])}
        changed = {name for name in before if after[name] != before[name]}
        assert not any("telemetry" not in name for name in partial | changed), (limit, partial, changed)
