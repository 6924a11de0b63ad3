# SPDX-License-Identifier: Apache-2.0
"""Snakemake for output into a pipe: `python -m routeblock.workflow_run ARGUMENTS`.

Where the reader of a pipe leaves (`make study | head`), the next write fails, in Snakemake and in every job, and the
study would end half done. Here both write into a pipe of their own, which a thread empties: into the reader's as long
as there is one.
"""

from __future__ import annotations

import os
import runpy
import stat
import sys
import threading
from contextlib import suppress

CHUNK = 1 << 16
LEFT_BEHIND_S = 2.0  # a process that a job left running may hold its end of the pipe open


def relay(descriptor: int) -> threading.Thread:
    """Put a pipe in the place of `descriptor` and forward what is written there until its last writer has ended."""
    reader = os.dup(descriptor)
    out, into = os.pipe()
    os.dup2(into, descriptor)
    os.close(into)

    def forward() -> None:
        is_read = True
        while data := os.read(out, CHUNK):
            while is_read and data:
                try:
                    data = data[os.write(reader, data) :]
                except OSError:
                    is_read = False

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    return thread


def main() -> None:
    """Run Snakemake with this process's arguments; exits as it does."""
    piped = [number for number in (1, 2) if stat.S_ISFIFO(os.fstat(number).st_mode)]
    threads = [relay(number) for number in piped]
    sys.argv[0] = "snakemake"
    try:
        runpy.run_module("snakemake", run_name="__main__", alter_sys=True)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        null = os.open(os.devnull, os.O_WRONLY)
        for number, thread in zip(piped, threads, strict=True):
            os.dup2(null, number)
            thread.join(LEFT_BEHIND_S)


if __name__ == "__main__":
    main()
