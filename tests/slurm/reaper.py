# SPDX-License-Identifier: Apache-2.0
"""Ends what a test of Slurm started, however the test ends.

    python reaper.py FOLDER SECONDS

waits until its standard input closes (whoever holds the other end is gone, kill -9 included) or the time is over. Then
it ends every process that has ROUTEBLOCK_SLURM=FOLDER in its environment (daemons, job steps and jobs inherit it,
wherever they were put), by pid, and removes the folder.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "ROUTEBLOCK_SLURM"
GRACE_S = 3.0


def marked(folder: Path) -> dict[int, str]:
    """The processes that carry the folder's mark, with their names. What has ended has no environment."""
    wanted, found = f"{MARK}={folder}".encode(), {}
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and wanted in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "comm").read_text().strip()
    return found


def end(folder: Path) -> None:
    """End them all: asked first, then killed; those that they start meanwhile too."""
    started = time.monotonic()
    while left := marked(folder):
        late = time.monotonic() - started > GRACE_S
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.05 if late else 0.2)


def main(folder: Path, seconds: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    select.select([sys.stdin], [], [], seconds)
    end(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
