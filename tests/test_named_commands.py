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
from routeblock.alignment_cost import targets as alignment
from routeblock.config import load
from routeblock.grouped_schedule import targets as grouped
from routeblock.q6k_dispatch import targets as fast_paths
from routeblock.route_block.targets import StudyA
from routeblock.target import Target

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "fixtures").rglob("*.md"),
    *(ROOT / "envs").glob("*.txt"),
]
RULES = sorted((ROOT / "workflow" / "rules").glob("*.smk"))
RUN_STUDY = ROOT / "tests" / "gpu" / "run_study.sh"
SCRIPTS = [ROOT / "Makefile", ROOT / "config.yaml", ROOT / ".ci" / "run", RUN_STUDY, *RULES]
PACKAGE = sorted((ROOT / "workflow" / "routeblock").rglob("*.py"))
TREE: Any = typer.main.get_group(cli.app)
# The program, its command, and what stands behind: up to the end of the line, the code, the sentence or the command.
_NAMED = re.compile(r"(?:\brouteblock|\{params\.routeblock\})((?: +[a-z][a-z-]*)+|(?= +-))([^`|>;&()]*)")
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


def command(words: tuple[str, ...]) -> Any:
    """The command that the first of these words name."""
    found = TREE
    for word in words:
        found = getattr(found, "commands", {}).get(word, found)
    return found


def options(command: Any) -> set[str]:
    """The options of a command."""
    return {text for parameter in command.params for text in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def fault(words: tuple[str, ...]) -> str | None:
    """What of these words the command line does not have, or None."""
    found, rest = TREE, list(words)
    while rest and hasattr(found, "commands") and not rest[0].startswith("-"):
        if rest[0] not in found.commands:
            return None if found is TREE and rest[0] in PROSE else f"no command {rest[0]!r} in {' '.join(words)!r}"
        found = found.commands[rest.pop(0)]
    wrong = [word for word in rest if word.startswith("--") and word not in options(found)]
    return f"no option {wrong[0]} of {' '.join(words)!r}" if wrong else None


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS, *PACKAGE], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_command_that_a_file_names_exists(path: Path) -> None:
    assert [wrong for words in named(path) if (wrong := fault(words))] == []


CONFIG = load(ROOT / "config.yaml")
TARGETS = [
    *(target for study in (StudyA(CONFIG), alignment) for made in (study.tables, study.figures) for target in made()),
    *grouped.tables(CONFIG),
    *grouped.figures(),
    *fast_paths.tables(),
]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_command_of_a_table_or_figure_exists(target: Target) -> None:
    words = target.command.split()
    assert fault((*words, *(word for word in target.arguments if word.startswith("--")))) is None
    assert not hasattr(command(tuple(words)), "commands")


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_options_that_a_rule_puts_together_are_of_a_command_that_it_runs(path: Path) -> None:
    for block in re.split(r"(?m)^ *(?=rule\b|checkpoint\b)", re.sub(r'"\n\s*"', "", path.read_text()))[1:]:
        params, _, shell = block.partition("shell:")
        run = [match[1].split() for line in shell.splitlines() for match in _NAMED.finditer(line)]
        known = set().union(*(options(command(tuple(words))) for words in run))
        literals = "".join(re.findall(r'"(?:[^"\\]|\\.)*"', params))
        assert not run or set(re.findall(r"--[a-z][a-z-]*", literals)) <= known, block


def test_commands_are_found_and_wrong_ones_seen() -> None:
    every = [words for path in (*PAGES, *SCRIPTS, *PACKAGE) for words in named(path)]
    assert len(every) > 150
    assert ("study-a", "score") in {words[:2] for words in every}
    assert fault(("study-a", "score", "--golden")) is None
    assert fault(("golden",)) and fault(("study-a", "golden")) and fault(("verify", "--nope"))
