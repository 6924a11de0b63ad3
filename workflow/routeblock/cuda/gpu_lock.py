# SPDX-License-Identifier: Apache-2.0
"""Turns on a GPU: which one a process takes, whose end it waits for, and the lock that it holds until it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock.errors import InputError

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Slurm's names of the GPUs that a step or job holds. Where it hides the others, every job's first is CUDA's number 0.
GRANTED = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
POLL_S = 0.01
LIMIT_S = 600.0
# Descriptors close in ascending order when a process ends: the lock goes after the driver's own files.
HIGH_DESCRIPTOR = 512


@dataclass(frozen=True)
class Turn:
    """When a process may use its GPU.

    gpu: place among the GPUs that are visible (a scheduler's choice in CUDA_VISIBLE_DEVICES, else all); after: a file
    that the predecessor writes when it is done, or None; limit: seconds to wait for each of predecessor and lock.
    """

    gpu: int = 0
    after: Path | None = None
    limit: float = LIMIT_S

    def choose(self) -> str:
        """Make this process see its own GPU alone, before CUDA starts; returns the GPU's name as CUDA takes it."""
        listed = _listed(os.environ.get(VISIBLE, str(self.gpu)))
        # Empty: somebody hides all GPUs from this process, and the device says so later.
        chosen = listed[self.gpu % len(listed)] if listed else ""
        os.environ[VISIBLE] = chosen
        return chosen

    def take(self) -> dict[str, Any]:
        """Wait for the predecessor, then for the GPU's lock, which this process keeps until it ends.

        Returns telemetry: seconds waited, and which of the driver's files were open beforehand (none, if nothing
        touched a GPU before its turn). Raises InputError when a wait outlasts the limit.
        """
        listed = _listed(os.environ.get(VISIBLE, ""))
        chosen, touched = self.choose(), open_driver_files()
        started = time.perf_counter()
        if self.after is not None:
            _wait(
                self.after.exists,
                self.limit,
                where=str(self.after),
                what="the predecessor on this GPU has not finished",
                way_out="run it, see why it failed, or leave out --after",
            )
        met = time.perf_counter()
        _lock(lock_file(_on_machine(chosen, listed)), self.limit)
        return {
            "gpu": chosen,
            "driver_files_before": touched,
            "seconds": {"predecessor": met - started, "lock": time.perf_counter() - met},
        }


def lock_file(gpu: str) -> Path:
    """The lock of a GPU, by the name in CUDA_VISIBLE_DEVICES."""
    name = re.sub(r"[^A-Za-z0-9-]", "_", gpu) or "none"
    return Path(tempfile.gettempdir()) / f"routeblock-{os.getuid()}-gpu-{name}.lock"


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _on_machine(chosen: str, listed: list[str]) -> str:
    """The name of a GPU that no other GPU of this machine has: Slurm's where it granted those listed, else CUDA's."""
    granted = next((_listed(os.environ[name]) for name in GRANTED if os.environ.get(name)), [])
    names = dict(zip(listed, granted, strict=True)) if len(granted) == len(listed) else {}
    return names.get(chosen, chosen)


def open_driver_files() -> list[str]:
    """The NVIDIA device files that this process has open (Linux; elsewhere none are seen)."""
    found = set()
    with suppress(OSError):
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                target = str(link.readlink())
                if target.startswith("/dev/nvidia"):
                    found.add(target)
    return sorted(found)


def _lock(path: Path, limit: float) -> None:
    low = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        held = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    except OSError as e:
        if e.errno != errno.EINVAL:  # fewer descriptors allowed than that
            raise
        held = low
    if held != low:
        os.close(low)

    def locked() -> bool:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    _wait(
        locked,
        limit,
        where=str(path),
        what="another process holds this GPU",
        way_out="end it, or wait longer with --limit",
    )


def _wait(done: Callable[[], bool], limit: float, *, where: str, what: str, way_out: str) -> None:
    until = time.monotonic() + limit
    while not done():
        if time.monotonic() > until:
            raise InputError(what, where=where, limit=f"waited {limit:g} s", way_out=way_out)
        time.sleep(POLL_S)
