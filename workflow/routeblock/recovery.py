# SPDX-License-Identifier: Apache-2.0
"""After a killed workflow: its jobs live on for a while, locks and half-written files stay.

Every job inherits a mark in its environment, so that it is told from other processes also when its parent has gone;
`/proc` shows it from the moment that the job starts. Only this machine is looked at.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from routeblock.errors import InputError
from routeblock.evidence.files import is_temporary, writable_folder

MARK = "ROUTEBLOCK_WORKFLOW"
SCHEDULERS = ("snakemake", "routeblock.workflow_run")
PROCESSES = Path("/proc")
POLL_S = 0.2


@dataclass(frozen=True)
class Living:
    """A process of a workflow: its scheduler, or one of its jobs."""

    pid: int
    command: str
    is_scheduler: bool


def mark(checkout: Path) -> None:
    """Let every process that this one starts carry the mark of the workflow in `checkout`."""
    os.environ[MARK] = os.path.realpath(checkout)


def living(checkout: Path) -> list[Living]:
    """The processes of the workflow in `checkout`, this one and those that it runs in left out."""
    home = os.path.realpath(checkout)
    marked = f"{MARK}={home}".encode()
    own = _ancestors(os.getpid())
    found = []
    for entry in PROCESSES.iterdir():
        if not entry.name.isdecimal() or int(entry.name) in own:
            continue
        try:
            words = [os.fsdecode(word) for word in (entry / "cmdline").read_bytes().split(b"\0")[:-1]]
            is_job = marked in (entry / "environ").read_bytes().split(b"\0")
            is_scheduler = any(Path(word).name in SCHEDULERS for word in words[:3]) and (
                os.path.realpath(entry / "cwd") == home
            )
        except OSError:  # it has ended, or is another user's
            continue
        if words and (is_job or is_scheduler):
            found.append(Living(int(entry.name), " ".join(words), is_scheduler and not is_job))
    return sorted(found, key=lambda process: process.pid)


def recover(checkout: Path, results: Path, limit_s: float) -> list[str]:
    """Wait for the jobs that a killed workflow left in `checkout`, then clear its lock and half-written files.

    Returns what was found, in lines; none after a workflow that ended by itself. Raises InputError if a workflow
    still runs there, if its jobs take longer than `limit_s` seconds, and if the checkout takes no files.
    """
    # Snakemake would end in a traceback where it cannot keep its notes.
    writable_folder(checkout / ".snakemake")
    said: list[str] = []
    end = time.monotonic() + limit_s
    while processes := living(checkout):
        scheduler = next((process for process in processes if process.is_scheduler), None)
        if scheduler is not None:
            raise InputError(
                f"the workflow runs already, process {scheduler.pid}",
                where=str(checkout),
                limit="one workflow at a time in a folder",
                way_out="wait for it, or stop it with Ctrl-C",
            )
        if time.monotonic() > end:
            raise InputError(
                f"process {processes[0].pid} of a killed workflow still runs: {processes[0].command[:120]}",
                where=str(checkout),
                limit=f"waited {limit_s:g} s for {len(processes)} of them",
                way_out="wait longer (--limit) or end it",
            )
        if not said:
            said.append(f"waited for {len(processes)} processes of a killed workflow, {processes[0].pid} first")
        time.sleep(POLL_S)
    if any((checkout / ".snakemake" / "locks").glob("*")):
        command = [sys.executable, "-m", "snakemake", "--cores", "1", "--unlock"]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
        if done.returncode:
            raise InputError(
                f"cannot be unlocked: {(done.stderr or done.stdout).strip().splitlines()[-1:]}",
                where=str(checkout),
                limit="a killed workflow's lock has to go",
                way_out="see what snakemake --unlock says",
            )
        said.append("unlocked what a killed workflow held")
    if leftovers := _clear(results):
        said.append(f"removed {leftovers} half-written files and folders")
    return said


def _clear(results: Path) -> int:
    leftovers = []
    for folder, folders, names in os.walk(results):
        inside = [name for name in folders if is_temporary(name)]
        leftovers += [Path(folder, name) for name in [*inside, *filter(is_temporary, names)]]
        folders[:] = [name for name in folders if name not in inside]
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return len(leftovers)


def _ancestors(pid: int) -> set[int]:
    found = set[int]()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            status = (PROCESSES / str(pid) / "stat").read_text()
        except OSError:
            break
        pid = int(status.rpartition(")")[2].split()[1])
    return found
