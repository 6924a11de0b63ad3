# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over a module of this package. A machine that refuses the tool is recorded, not passed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from routeblock.evidence.digest import PACKAGE_ROOT
from routeblock.evidence.files import write_json

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")

FOUND_EXIT = 86  # what we ask it to exit with when it finds something
TIMEOUT_S = 240
_SUMMARY = re.compile(r"=+ (ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard).*")


class Outcome(StrEnum):
    """What became of one tool."""

    CLEAN = "clean"
    FOUND = "found"  # the tool, or the check of bits under it, found something
    REFUSED = "refused"  # the tool did not run on this machine
    ABSENT = "absent"  # the tool is not installed


@dataclass(frozen=True)
class Report:
    """One tool's outcome and the lines that tell it."""

    tool: str
    outcome: Outcome
    exit_code: int | None
    lines: tuple[str, ...]


def judge(tool: str, exit_code: int, output: str) -> Report:
    """The outcome of a finished run: clean only with exit code 0 and a summary of no errors."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    summary = next((m for line in lines if (m := _SUMMARY.match(line))), None)
    differences = [line for line in lines if re.fullmatch(r"\d+ cases, \d+ differences", line)]
    if exit_code == 0 and summary and int(summary[2] or summary[3]) == 0 and differences:
        return Report(tool, Outcome.CLEAN, exit_code, (*differences, summary[0]))
    # Without the last line of the exercise the program never got through: the device or the tool refused.
    outcome = Outcome.FOUND if differences or exit_code == FOUND_EXIT else Outcome.REFUSED
    return Report(tool, outcome, exit_code, tuple(lines[:10] + lines[10:][-5:]))


def run_tool(tool: str, module: str, arguments: Sequence[str]) -> Report:
    """Run one tool over `python -m module arguments`, which ends with the line `N cases, N differences`."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return Report(tool, Outcome.ABSENT, None, ("compute-sanitizer is not on PATH",))
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND_EXIT), sys.executable, "-m", module, *arguments]
    paths = [str(PACKAGE_ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Report(tool, Outcome.REFUSED, None, (f"not done after {TIMEOUT_S} s",))
    return judge(tool, done.returncode, done.stdout)


def write(path: Path, module: str, arguments: Sequence[str]) -> None:
    """Run every tool over a module and write a `sanitizer.json`."""
    write_json(path, {"tools": [asdict(run_tool(tool, module, arguments)) for tool in TOOLS]})


def findings(told: Mapping[str, Any]) -> list[str]:
    """What tools found, of a `sanitizer.json`, and what does not follow from their own lines, one line each. A refused
    or absent tool is no finding.
    """
    tools = [t["tool"] for t in told["tools"]]
    wrong = [] if tools == list(TOOLS) else [f"tools {', '.join(map(str, tools))}, where {', '.join(TOOLS)} belong"]
    for t in told["tools"]:
        code, lines = t["exit_code"], tuple(t["lines"])
        if t["outcome"] == Outcome.FOUND:
            wrong.append(f"{t['tool']}: {lines[-1]}")
        elif code is None and t["outcome"] not in (Outcome.REFUSED, Outcome.ABSENT):
            wrong.append(f"{t['tool']}: {t['outcome']} without an exit code")
        elif code is not None and judge(t["tool"], code, "\n".join(lines)) != Report(**{**t, "lines": lines}):
            wrong.append(f"{t['tool']}: {t['outcome']} does not follow from exit code {code} and its lines")
    return wrong
