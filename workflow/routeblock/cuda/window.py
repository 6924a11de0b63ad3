# SPDX-License-Identifier: Apache-2.0
"""A guarded window: a measurement while resident serving processes stay on the GPU, drained and held.

Commands of the user drain what serves and hold its queue (`before`), say that it is so (`check`), and open it again
(`after`). The measurement runs between two checks. Then its own processes have to be gone from the GPU: what remains
there may only be resident processes that were named. A window whose check or cleanup fails yields no batches.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from routeblock.cuda import telemetry
from routeblock.errors import InputError
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal

FORMAT = "routeblock.window.v1"
COMMAND_LIMIT_S, CLEANUP_LIMIT_S, POLL_S = 600.0, 30.0, 0.2
LAST_CHARACTERS = 400  # of a command's output, kept


class Step(StrEnum):
    """What a command of a window is for, in the order of running."""

    BEFORE = "before"
    CHECK = "check"
    MEASURE = "measure"
    CHECK_AGAIN = "check_again"
    CLEANUP = "cleanup"
    AFTER = "after"


@dataclass(frozen=True)
class Settings:
    """The commands of a window, as a shell takes them, and the names of processes that may stay on the GPU."""

    before: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()

    def options(self) -> str:
        """The options of `routeblock gpu window` that say the same, quoted for a shell; empty: no window."""
        given = [
            part
            for name in ("before", "check", "after", "resident")
            for value in getattr(self, name)
            for part in (f"--{name}", value)
        ]
        return shlex.join(given)


@dataclass
class _Log:
    entries: list[dict[str, Any]] = field(default_factory=list)

    def add(self, step: Step, what: str, ok: bool, began: float, output: str = "") -> bool:
        self.entries.append(
            {
                "step": str(step),
                "what": what,
                "ok": ok,
                "seconds": round(time.monotonic() - began, 3),
                "output": output.strip()[-LAST_CHARACTERS:],
            }
        )
        return ok


def run(
    settings: Settings,
    command: Sequence[str],
    yields: Path | None,
    out: Path,
    *,
    foreign: Callable[[], list[str]] | None = None,
) -> int:
    """Run `command` in a window and write what happened to the file `out`, sealed; returns the exit code.

    0: it ran, and both checks and the cleanup held. Where one of these failed, `yields`, the folder or file that the
    command writes, is taken away and 1 is returned; the command's own failure is returned as it is. `after` runs in
    any case once `before` has begun. foreign: names of the processes on the GPUs that may not be there, by default
    those that the driver lists. Raises InputError for a program that cannot be started.
    """
    log, looked = _Log(), foreign or (lambda: telemetry.foreign(settings.resident))
    status = 1
    try:
        ready = all(_shell(log, Step.BEFORE, c) for c in settings.before)
        if ready and all(_shell(log, Step.CHECK, c) for c in settings.check):
            status = _measure(log, command, settings.resident)
            held = all(_shell(log, Step.CHECK_AGAIN, c) for c in settings.check)
            clean = _cleaned(log, looked)  # looked at whether it was held or not
            status = status or int(not (held and clean))
    finally:
        for c in settings.after:
            _shell(log, Step.AFTER, c)
        if status and yields is not None:
            _take_away(yields)
        write_json(
            out,
            {"format": FORMAT, "command": list(command), "resident": list(settings.resident), "exit": status,
             "steps": log.entries},
        )  # fmt: skip
        seal(out.with_suffix(SUFFIX), rule="window", outputs=[out], inputs=[], parameters={}, modules=[__name__])
    return status


def failed(out: Path, entries: Sequence[dict[str, Any]]) -> str:
    """One line about the first step that failed."""
    first = next((e for e in entries if not e["ok"]), None)
    return "" if first is None else f"{out}: {first['step']} failed: {first['what']}: {first['output'] or 'no output'}"


def _shell(log: _Log, step: Step, command: str) -> bool:
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return log.add(step, command, False, began, f"not done after {COMMAND_LIMIT_S:g} s")
    return log.add(step, command, done.returncode == 0, began, done.stdout)


def _measure(log: _Log, command: Sequence[str], resident: Sequence[str]) -> int:
    began = time.monotonic()
    environment = os.environ | {telemetry.RESIDENT_VARIABLE: ",".join(resident)}
    try:
        status = subprocess.run(command, env=environment).returncode
    except OSError as e:
        raise InputError(
            f"cannot start {command[0]}: {e.strerror}",
            where="window",
            limit="a program and its arguments after --",
            way_out="name one that is there",
        ) from e
    log.add(Step.MEASURE, shlex.join(command), status == 0, began)
    return status


def _cleaned(log: _Log, foreign: Callable[[], list[str]]) -> bool:
    """Whether nothing but resident processes is left on the GPUs, looked at until it is so or the limit is over."""
    began = time.monotonic()
    while left := foreign():
        if time.monotonic() - began > CLEANUP_LIMIT_S:
            break
        time.sleep(POLL_S)
    names = ", ".join(left)
    return log.add(Step.CLEANUP, "processes on the GPUs other than resident ones", not left, began, names)


def _take_away(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
