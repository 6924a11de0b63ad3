# SPDX-License-Identifier: Apache-2.0
"""The command line. A command imports what it needs when it runs, so that `--help` answers at once.

Exit codes: 0 it holds, 1 a check found something, 2 bad input or a disk that does not take the result (one line on
stderr), 130 and 143 interrupted, 141 if the reader of the output went away.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import Abort, TyperException

from routeblock.cli import (
    alignment,
    answers,
    checkpoint,
    diagnose,
    fast_paths,
    gpu,
    results,
    serving,
    study_a,
    study_a_gpu,
    study_b,
    workflow,
)
from routeblock.errors import InputError


class _ReaderGoneError(Exception):
    """Nobody reads the output any more."""


class _Commands(TyperGroup):
    """The commands. Typer takes the end of a file for the end of the user's answers, and a reader that has gone for a
    failure: it never sees either from here.
    """

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().make_context(*arguments, **options)
        except BrokenPipeError as e:  # the help's
            raise _ReaderGoneError from e

    # Typer names this context by its base class, which it does not export.
    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except BrokenPipeError as e:
            raise _ReaderGoneError from e
        except EOFError as e:
            raise InputError(
                f"a file ends too early: {e}",
                where="routeblock",
                limit="every input must be whole",
                way_out="restore the inputs or make them again",
            ) from e
        except UnicodeError as e:
            raise InputError(
                f"not UTF-8: {e}",
                where="routeblock",
                limit="text files and names are UTF-8",
                way_out="correct the file, or rename it",
            ) from e


app = typer.Typer(cls=_Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

# What a user types stands at the top; the rest is in groups.
study_a.app.add_typer(study_a_gpu.app)
app.add_typer(results.app)
app.add_typer(answers.app)
for name, group in {
    "study-a": study_a.app,
    "study-b": study_b.app,
    "alignment": alignment.app,
    "serving": serving.app,
    "fast-paths": fast_paths.app,
    "checkpoint": checkpoint.app,
    "gpu": gpu.app,
    "diagnose": diagnose.app,
    "workflow": workflow.app,
}.items():
    app.add_typer(group, name=name)

# What a path must be that the system refuses, and the way out.
_NEEDED = {
    errno.ENOENT: ("the command needs it", "name one that exists, or make it first"),
    errno.ELOOP: ("links must lead to a file or folder", "replace the links that lead to each other"),
    errno.ENOTDIR: ("every part of the path but the last must be a folder", "name another path"),
    errno.EISDIR: ("a file is needed, this is a folder", "name the file"),
    errno.EACCES: ("it must be readable", "change its permissions"),
    errno.EPERM: ("it must be readable", "change its permissions"),
    errno.ENAMETOOLONG: ("names have at most 255 bytes", "choose a shorter name"),
}


@app.callback()
def routeblock() -> None:
    """Bit-level evidence about Mixture-of-Experts kernels."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return its exit code."""
    signal.signal(signal.SIGTERM, _stop)
    _open_streams()
    try:
        _check_text(sys.argv[1:] if arguments is None else arguments)
        code = app(args=arguments, prog_name="routeblock", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except InputError as e:
        return _refuse(str(e))
    except TyperException as e:
        context = getattr(e, "ctx", None)
        command = context.command_path if context else "routeblock"
        message = " ".join(e.format_message().split()).replace(": Value error, ", ": ").rstrip(".")
        return _refuse(f"{command}: {message}; see {command} --help")
    except (BrokenPipeError, _ReaderGoneError):
        _silence(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as e:
        return _refuse(str(_unusable(e)))
    except Abort:
        return 128 + signal.SIGINT


def _open_streams() -> None:
    """Open what this process was started without: a file that is opened later would take the place of stdout."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        elif isinstance(stream, io.TextIOWrapper):  # a path may hold what the terminal's encoding does not
            stream.reconfigure(errors="backslashreplace")


def _silence(stream: IO[str]) -> None:
    """Send what is still to be written to nobody: its reader has gone, also for what is flushed at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _check_text(arguments: Sequence[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as e:
            raise InputError(
                "not UTF-8",
                where=f"argument {argument!a}",
                limit="seals name files in UTF-8",
                way_out="rename the file or folder",
            ) from e


def _unusable(error: OSError) -> InputError:
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        limit, way_out = "a disk with space that takes the output is needed", "free space or choose another place"
    else:
        limit, way_out = _NEEDED.get(error.errno or 0, ("it cannot be used", "name another, or restore it"))
    name = error.filename
    where = "routeblock" if name is None else os.fsdecode(name) if isinstance(name, bytes) else str(name)
    return InputError(what, where=where, limit=limit, way_out=way_out)


def _refuse(line: str) -> int:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # nobody reads it, or the disk that it goes to is full
        _silence(sys.stderr)
    return 2


def _stop(number: int, _frame: object) -> None:
    # As an exception, so that half-written files go away.
    sys.exit(128 + number)
