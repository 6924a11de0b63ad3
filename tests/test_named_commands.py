# SPDX-License-Identifier: Apache-2.0
"""A command that a page, an error or a rule names exists, with every option that stands beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from routeblock import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "fixtures").rglob("*.md"),
    *(ROOT / "envs").glob("*.txt"),
]
SCRIPTS = [ROOT / "Makefile", ROOT / "config.yaml", ROOT / ".ci" / "run", *(ROOT / "workflow" / "rules").glob("*.smk")]
PACKAGE = sorted((ROOT / "workflow" / "routeblock").rglob("*.py"))
TREE: Any = typer.main.get_group(cli.app)
# The program, its command, and what stands behind: up to the end of the line, the code, the sentence or the command.
_NAMED = re.compile(r"(?:\broutebl?ock|\{params\.routeblock\})((?: +[a-z][a-z-]*)+|(?= +-))([^`|>;&()]*)")
# What follows the program's name in a sentence and is no command.
PROSE = {"is", "shows", "names", "code", "study"}


def strings(path: Path) -> Iterator[str]:
    """The text of a file in which a command may be named; of code the string literals, f-strings with their gaps."""
    if path.suffix != ".py":
        yield re.sub(r'"\n\s*"|\\\n\s*', "", path.read_text())  # a shell text over several lines is one
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def named(path: Path) -> Iterator[tuple[str, ...]]:
    """The words behind the program's name, wherever a file has it."""
    for text in strings(path):
        for line in text.splitlines():
            for match in _NAMED.finditer(line):
                yield (*match[1].split(), *re.findall(r"(?<![\w-])--[a-z][a-z-]*", match[2]))


def fault(words: tuple[str, ...]) -> str | None:
    """What of these words the command line does not have, or None."""
    found, rest = TREE, list(words)
    while rest and hasattr(found, "commands") and not rest[0].startswith("-"):
        if rest[0] not in found.commands:
            return None if found is TREE and rest[0] in PROSE else f"no command {rest[0]!r} in {' '.join(words)!r}"
        found = found.commands[rest.pop(0)]
    options = {text for parameter in found.params for text in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    wrong = [word for word in rest if word.startswith("--") and word not in options]
    return f"no option {wrong[0]} of {' '.join(words)!r}" if wrong else None


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS, *PACKAGE], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_command_that_a_file_names_exists(path: Path) -> None:
    assert [wrong for words in named(path) if (wrong := fault(words))] == []


def test_commands_are_found_and_wrong_ones_seen() -> None:
    every = [words for path in (*PAGES, *SCRIPTS, *PACKAGE) for words in named(path)]
    assert len(every) > 150
    assert ("study-a", "score") in {words[:2] for words in every}
    assert fault(("study-a", "score", "--golden")) is None
    assert fault(("golden",)) and fault(("study-a", "golden")) and fault(("verify", "--nope"))
