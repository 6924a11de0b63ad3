# SPDX-License-Identifier: Apache-2.0
"""The command line. A command imports what it needs when it runs, so that `--help` answers at once.

Exit codes: 0 it holds, 1 a check found something, 2 bad input or a disk that does not take the result (one line on
stderr), 130 and 143 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import Abort, TyperException

from routeblock.errors import InputError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

Roots = Annotated[list[Path], typer.Argument(help="Folders of sealed results.")]
Sources = Annotated[
    list[Path] | None,
    typer.Option("--source", help="A file or folder of given inputs; default: those of the checkout."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="List everything, not the first alone.")]


@app.callback()
def routeblock() -> None:
    """Bit-level evidence about Mixture-of-Experts kernels."""


@app.command()
def environment(
    out: Annotated[Path, typer.Option(help="Folder for environment.json and its manifest.")],
    pins: Annotated[Path, typer.Option(help="The file of pinned packages.")] = Path("envs/base.txt"),
) -> None:
    """Record interpreter, packages, CPU and system. Differs between machines: no digest may depend on it."""
    from routeblock.environment import write
    from routeblock.workflow import code

    write(out, pins, code=code("environment"))


@app.command()
def verify(
    roots: Roots,
    source: Sources = None,
    ignore_code: Annotated[
        bool, typer.Option("--ignore-code", help="Accept results of other versions of the code.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Check sealed results on bytes and name the artifact nearest the source that does not fit."""
    from routeblock.evidence import chain
    from routeblock.workflow import codes, given

    found = chain.verify(*roots, code=None if ignore_code else codes(), sources=source or given())
    if not found:
        print(f"{' '.join(map(str, roots))}: every artifact fits its manifest")
        return
    first, *others = found
    more = f" (and {len(others)} more; -v lists them)" if others and not verbose else ""
    print(f"{first}{more}")
    for finding in others if verbose else ():
        print(finding)
    raise typer.Exit(1)


@app.command()
def repair(roots: Roots, source: Sources = None, verbose: Verbose = False) -> None:
    """Remove results that do not fit their manifests, and all that was made from them, for the workflow to remake."""
    from routeblock.evidence import chain
    from routeblock.workflow import codes, given

    removed = chain.repair(*roots, code=codes(), sources=source or given())
    print(f"{' '.join(map(str, roots))}: {len(removed)} files removed")
    for path in removed if verbose else ():
        print(path)


@app.command()
def schema(out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("workflow/schemas")) -> None:
    """Write the JSON schemas of the config and of every record."""
    from routeblock.schemas import write

    write(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return its exit code."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        code = app(args=arguments, prog_name="routeblock", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except InputError as e:
        return _refuse(str(e))
    except TyperException as e:
        context = getattr(e, "ctx", None)
        command = context.command_path if context else "routeblock"
        return _refuse(f"{command}: {' '.join(e.format_message().split()).rstrip('.')}; see {command} --help")
    except BrokenPipeError:  # the reader of our output has gone: nothing to tell it, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:
        return _refuse(f"{e.filename or 'routeblock'}: {e.strerror or e}")
    except Abort:
        return 128 + signal.SIGINT


def _refuse(line: str) -> int:
    print(line, file=sys.stderr)
    return 2


def _stop(number: int, _frame: object) -> None:
    # As an exception, so that half-written files go away.
    sys.exit(128 + number)
