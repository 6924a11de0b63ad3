# SPDX-License-Identifier: Apache-2.0
"""`snakemake --lint` without the one lint that does not apply; exit 1 if another is left or the linter failed.

Software comes from pinned requirements in one .venv, so no rule names a conda environment or container.
"""

from __future__ import annotations

import re
import subprocess
import sys

WAIVED = "Specify a conda environment or container for each rule."
_WHERE, _TITLE, _BODY = re.compile(r"Lints for (.*):"), re.compile(r" {4}\* (.*):"), re.compile(r" {6}\S")


def remaining(report: str) -> list[str]:
    """What the report of the linter says besides waived lints: `where: title`, and lines that are part of no lint."""
    left, where, inside = [], "", False
    for line in report.splitlines():
        if match := _WHERE.fullmatch(line):
            where, inside = match[1], False
        elif match := _TITLE.fullmatch(line):
            inside = True
            if match[1] != WAIVED:
                left.append(f"{where}: {match[1]}")
        elif line.strip() and not (inside and _BODY.match(line)):
            left.append(line)
    return left


def main() -> int:
    command = [sys.executable, "-m", "snakemake", "--lint"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return 0
    left = remaining(done.stdout)
    # A linter that fails without naming a lint has not looked.
    if not left and WAIVED not in done.stdout:
        left = [f"snakemake --lint failed with {done.returncode} and said nothing"]
    for line in left:
        print(line, file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
