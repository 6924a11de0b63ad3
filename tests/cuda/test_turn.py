# SPDX-License-Identifier: Apache-2.0
"""One process a GPU at a time, in the order of the study."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from routeblock.cuda import gpu_lock as turn
from routeblock.cuda.gpu_lock import VISIBLE, Turn, lock_file
from routeblock.errors import InputError

HOLDER = (
    "import sys, time; from routeblock.cuda.gpu_lock import Turn; "
    "Turn().take(); print('held', flush=True); time.sleep(60)"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Locks of this test alone. What `take` locks stays locked as long as this process lives."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(turn.tempfile, "tempdir", None)
    monkeypatch.delenv(VISIBLE, raising=False)
    yield
    turn.tempfile.tempdir = None


@pytest.mark.parametrize(
    ("visible", "gpu", "chosen"),
    [(None, 0, "0"), (None, 3, "3"), ("5,6", 1, "6"), ("5, 6", 2, "5"), ("GPU-1a2b", 0, "GPU-1a2b"), ("", 0, "")],
)
def test_a_process_sees_its_own_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpu: int, chosen: str
) -> None:
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    assert Turn(gpu).choose() == chosen
    assert turn.os.environ[VISIBLE] == chosen


def test_a_process_waits_until_its_predecessor_has_written(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    writer = threading.Timer(0.15, record.touch)
    writer.start()
    waited = Turn(after=record, limit=20).take()
    assert record.exists()
    writer.join()
    assert waited["seconds"]["predecessor"] >= 0.1
    assert waited["driver_files_before"] == []


def test_without_a_predecessor_nobody_waits() -> None:
    started = time.perf_counter()
    assert Turn(limit=20).take()["gpu"] == "0"
    assert time.perf_counter() - started < 5


def test_a_predecessor_that_never_comes_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"predecessor on this GPU has not finished.*waited 0.05 s.*--after"
    ) as refused:
        Turn(after=tmp_path / "never.json", limit=0.05).take()
    assert "\n" not in str(refused.value)
    assert not lock_file("0").exists()  # it never came to the lock


def test_a_gpu_is_held_until_its_process_ends_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with pytest.raises(InputError, match=r"another process holds this GPU.*waited 0.05 s"):
                Turn(limit=0.05).take()
            monkeypatch.setenv(VISIBLE, "1")
            assert Turn(limit=20).take()["gpu"] == "1"  # another GPU is free
        finally:
            holder.kill()
    monkeypatch.setenv(VISIBLE, "0")
    assert Turn(limit=20).take()["gpu"] == "0"


def test_a_lock_that_is_a_link_to_another_file_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    lock_file("0").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        Turn(limit=0.05).take()
    assert not target.exists()


def test_names_of_gpus_stay_inside_the_folder_of_locks() -> None:
    assert lock_file("../x/y").parent == lock_file("0").parent
    assert lock_file("0") != lock_file("1")


@pytest.mark.parametrize(
    ("visible", "granted", "gpu", "locked"),
    [
        ("0", {"SLURM_STEP_GPUS": "3"}, 0, "3"),  # a control group hides the others
        ("3", {"SLURM_STEP_GPUS": "3"}, 0, "3"),
        ("0,1", {"SLURM_JOB_GPUS": "2,3"}, 1, "3"),
        ("0", {"SLURM_STEP_GPUS": "1", "SLURM_JOB_GPUS": "0,1"}, 0, "1"),
        ("0", {"SLURM_JOB_GPUS": "2,3"}, 0, "0"),  # nobody says which of the two
        ("0", {}, 0, "0"),
    ],
)
def test_two_jobs_of_slurm_lock_two_gpus_that_each_calls_its_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, granted: dict[str, str], gpu: int, locked: str
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    for name in turn.GRANTED:
        monkeypatch.delenv(name, raising=False)
    for name, value in granted.items():
        monkeypatch.setenv(name, value)
    Turn(gpu, limit=20).take()
    assert list(tmp_path.glob("*.lock")) == [lock_file(locked)]
