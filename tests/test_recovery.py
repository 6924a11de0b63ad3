# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from routeblock import recovery
from routeblock.errors import InputError

ROOT = Path(__file__).resolve().parent.parent


READY = "import pathlib, sys, time; print(flush=True); "
SLEEP = READY + "time.sleep(60)"


def started(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Python at work: right after its start, what /proc tells of a process is not there yet."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, **options)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    process.stdout.close()
    return process


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job of the workflow in `tmp_path`, elsewhere at work."""
    process = started("-c", SLEEP, cwd="/", env=os.environ | {recovery.MARK: os.path.realpath(tmp_path)})
    yield process
    process.kill()
    process.wait()


def test_a_job_carries_the_mark_of_its_workflow(
    orphan: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recovery.living(tmp_path)
    assert [(job.pid, job.is_scheduler) for job in found] == [(orphan.pid, False)]
    assert recovery.living(tmp_path / "other") == []
    monkeypatch.delenv(recovery.MARK, raising=False)
    recovery.mark(tmp_path)
    child = started("-c", SLEEP)
    try:
        assert {job.pid for job in recovery.living(tmp_path)} == {orphan.pid, child.pid}
    finally:
        child.kill()
        child.wait()


def test_a_job_that_does_not_end_is_named(orphan: subprocess.Popen[bytes], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"process {orphan.pid} of a killed workflow still runs.*--limit"):
        recovery.recover(tmp_path, tmp_path / "results", 0)


def test_recovery_waits_for_a_job_then_clears_what_is_half_written(tmp_path: Path) -> None:
    environment = os.environ | {recovery.MARK: os.path.realpath(tmp_path)}
    half = tmp_path / "results" / "run" / ".rep1.0.routeblock-tmp"
    late = READY + "time.sleep(1); (pathlib.Path(sys.argv[1]) / 'late').write_text('x')"
    half.mkdir(parents=True)
    (half.parent / "record.json").write_text("whole")
    with started("-c", late, str(half), env=environment):
        began = time.monotonic()
        said = recovery.recover(tmp_path, tmp_path / "results", 60)
    assert time.monotonic() - began > 0.5
    assert len(said) == 2 and said[0].startswith("waited for 1 ") and said[1].startswith("removed 1 ")
    assert [p.name for p in half.parent.iterdir()] == ["record.json"]
    assert recovery.recover(tmp_path, tmp_path / "results", 60) == []


def test_a_scheduler_at_work_is_not_disturbed(tmp_path: Path) -> None:
    (tmp_path / "snakemake").write_text(SLEEP)
    with started("snakemake", cwd=tmp_path) as process:
        try:
            with pytest.raises(InputError, match=f"runs already, process {process.pid}"):
                recovery.recover(tmp_path, tmp_path, 60)
        finally:
            process.kill()


@pytest.mark.parametrize("target", ["study", "repair"])
def test_make_recovers_before_anything_else(target: str) -> None:
    command = ["make", "--dry-run", "--no-print-directory", "setup=", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ours = [line for line in done.stdout.splitlines() if "routeblock " in line or "routeblock.workflow_run " in line]
    ours = [line for line in ours if not line.endswith("routeblock workflow check-config")]
    assert ours[0].endswith("routeblock recover results") and "--profile" in ours[-2 if target == "repair" else -1]
