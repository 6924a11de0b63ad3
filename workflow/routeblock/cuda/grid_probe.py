# SPDX-License-Identifier: Apache-2.0
"""The grid probe: a preloaded object that answers another SM count to one extension and records its launches.

The kernel's host code launches SM count x blocks per SM, so an answered SM count sets the grid without a patch; the
recorded grid says what was really launched. See grid_probe.c.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from routeblock.errors import InputError
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import SUFFIX, seal

SOURCES = ("grid_probe.c",)
SOURCE = Path(__file__).with_name(SOURCES[0])
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wl,--build-id=none")
PROBE_VARIABLE = "ROUTEBLOCK_PROBE"  # for people: the built probe
TARGET_VARIABLE, SMS_VARIABLE = "ROUTEBLOCK_PROBE_TARGET", "ROUTEBLOCK_PROBE_SMS"  # for the probe
# int64 template arguments name the types; then threads, blocks of 16 along M, N and K, of which two are sizes.
MARLIN_NAME = re.compile(r"6MarlinI(?:Ll-?\d+E)+Li(?P<threads>\d+)ELi\d+ELi(?P<n>\d+)ELi(?P<k>\d+)E")


def make(out: Path) -> None:
    """Build the probe and seal it; `code` is the code digest for the manifest. Raises InputError as `build` does."""
    build(out)
    seal(
        out.with_name(out.stem + SUFFIX),
        rule="probe",
        outputs=[out],
        inputs=[],
        parameters={"flags": FLAGS},
        modules=[__name__],
    )


def build(out: Path) -> Path:
    """Compile the probe to `out` with the system's C compiler ($CC, else cc, gcc or clang); returns `out`.

    Raises InputError when there is no compiler, or when it refuses.
    """
    named = shlex.split(os.environ.get("CC", ""))
    found = [c for c in ([named[0]] if named else COMPILERS) if shutil.which(c)]
    if not found:
        raise InputError(
            f"no C compiler ({' or '.join(named[:1] or COMPILERS)})",
            where="grid probe",
            limit="grids that are no multiple of the GPU's SM count, and recorded grids, need the probe",
            way_out="install gcc or clang, or name a compiler in CC",
        )
    with atomic_file(out) as temporary:
        command = [found[0], *named[1:], *FLAGS, "-o", str(temporary), str(SOURCE), "-ldl", "-pthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            raise InputError(
                f"{found[0]} refuses: {lines[0]}",
                where=str(SOURCE),
                limit="a C11 compiler with the C library's headers, on Linux",
                way_out="install the C library's development files, or name another compiler in CC",
            )
    return out


def environment(probe: Path, extension: Path, sms: int | None = None) -> dict[str, str]:
    """This process's environment for a child in which `probe` watches `extension`.

    `sms`: an SM count that is answered from the start. Raises InputError for a path that LD_PRELOAD cannot hold.
    """
    if re.search(r"[ :]", str(probe.resolve())):
        raise InputError(
            "its path holds a space or a colon",
            where=str(probe),
            limit="LD_PRELOAD separates its entries by them",
            way_out="build the probe in another folder",
        )
    chosen = dict(os.environ)
    others = [p for p in re.split(r"[ :]+", chosen.get("LD_PRELOAD", "")) if p]
    chosen["LD_PRELOAD"] = ":".join([str(probe.resolve()), *others])
    chosen[TARGET_VARIABLE] = str(extension.resolve())
    chosen.pop(SMS_VARIABLE, None)
    if sms is not None:
        chosen[SMS_VARIABLE] = str(sms)
    return chosen


def without_probe(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment for tools that have nothing to do with the extension."""
    return {k: v for k, v in variables.items() if k not in ("LD_PRELOAD", TARGET_VARIABLE, SMS_VARIABLE)}


def reexecute(probe: Path, extension: Path) -> NoReturn:
    """Start this very command line again in this process (same pid), with the probe preloaded."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment(probe, extension))


@dataclass(frozen=True)
class KernelLaunch:
    """One recorded launch: grid and block sizes, dynamic shared memory in bytes, the kernel's mangled name."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory: int
    kernel: str

    @property
    def blocks(self) -> int:
        """Number of CUDA blocks."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def thread_sizes(self) -> tuple[int, int] | None:
        """(thread_k, thread_n) of a Marlin kernel, read from its name; None for another kernel."""
        found = MARLIN_NAME.search(self.kernel)
        if found is None:
            return None
        thread_k, thread_n = 16 * int(found["k"]), 16 * int(found["n"])
        if not int(found["threads"]) == self.block[0] == thread_k * thread_n // 64:
            raise InputError(
                f"kernel {self.kernel} ran with {self.block[0]} threads",
                where="grid probe",
                limit="its name says otherwise",
                way_out="report this version of the extension: its kernel names are not understood",
            )
        return thread_k, thread_n


class _Record(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_memory", ctypes.c_uint64),
        ("kernel", ctypes.c_char_p),
    )


class GridProbe:
    """The probe inside this process."""

    def __init__(self, extension: Path) -> None:
        """Raises InputError unless the probe is preloaded and watches `extension`."""
        library = ctypes.CDLL(None)
        try:
            library.routeblock_probe_target.restype = ctypes.c_char_p
            library.routeblock_probe_answers.restype = ctypes.c_ulong
            library.routeblock_probe_launches.restype = ctypes.c_ulong
            library.routeblock_probe_read.argtypes = (ctypes.c_ulong, ctypes.POINTER(_Record))
        except AttributeError as e:
            raise InputError(
                "the grid probe is not preloaded in this process",
                where="grid probe",
                limit="grids are recorded by an object in LD_PRELOAD",
                way_out=f"build it (routeblock gpu build-probe) and name it in {PROBE_VARIABLE}",
            ) from e
        self._library = library
        watched = os.fsdecode(library.routeblock_probe_target())
        if watched != str(extension.resolve()):
            raise InputError(
                f"the grid probe watches {watched or 'nothing'}",
                where="grid probe",
                limit=f"this run needs it to watch {extension}",
                way_out=f"set {TARGET_VARIABLE} to that file before the process starts",
            )
        self._seen = self._count

    @cached_property
    def path(self) -> Path:
        """The file of the preloaded probe, as this process has it mapped."""
        address = ctypes.cast(self._library.routeblock_probe_answer, ctypes.c_void_p).value or 0
        for line in Path("/proc/self/maps").read_text().splitlines():
            low, high = (int(x, 16) for x in line.split()[0].split("-"))
            if low <= address < high:
                return Path(line.split(maxsplit=5)[5])
        raise RuntimeError("the probe is loaded from no file")

    @property
    def _count(self) -> int:
        return int(self._library.routeblock_probe_launches())

    @property
    def answers(self) -> int:
        """How often the extension was given another SM count than the true one."""
        return int(self._library.routeblock_probe_answers())

    def answer(self, sms: int | None) -> None:
        """From now on answer `sms` when the extension asks for the SM count; None: the truth."""
        self._library.routeblock_probe_answer(ctypes.c_int(sms or 0))

    def take(self) -> list[KernelLaunch]:
        """The extension's launches since the last call. Raises InputError when there was no room to record them."""
        taken = []
        for i in range(self._seen, self._count):
            raw = _Record()
            if self._library.routeblock_probe_read(i, ctypes.byref(raw)):
                raise InputError(
                    f"launch {i} was not recorded",
                    where="grid probe",
                    limit="the probe has room for 65536 launches a process",
                    way_out="split the work over more processes",
                )
            x, y = tuple(raw.grid), tuple(raw.block)
            name = raw.kernel.decode("ascii", "replace") if raw.kernel else ""
            taken.append(KernelLaunch((x[0], x[1], x[2]), (y[0], y[1], y[2]), int(raw.shared_memory), name))
        self._seen += len(taken)
        return taken
