# SPDX-License-Identifier: Apache-2.0
"""Read from the source: what the command of a rule imports, and package files that code names, are in its digest.

What commands import at run time is traced by tests/recovery.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
from checkout import ROOT

from routeblock import cli
from routeblock.declared import Declared
from routeblock.evidence.digest import PACKAGE_ROOT, import_closure, other_sources
from routeblock.report.catalogue import FIGURES, TABLES
from routeblock.route_block.runs.cuda import CudaLane

# What finds or shows, and makes no result: a declaration by its name, a progress bar, a lane by its name.
APART = {"routeblock.declared", "routeblock.progress", "routeblock.route_block.runs.lanes"}
# A prediction takes its turn to ask a GPU for its name alone; no rule is made from how it waits.
LOCK = "routeblock.cuda.gpu_lock"
APART_FOR = {name: {LOCK} for name in ("prediction", "captured_prediction", "run", "identity")}
# A module that is imported by name, so that it is in nobody's digest, and why that may be.
BY_NAME = {
    "route_block/operating_point.py": "what a GPU is called has no part in the results of a CPU",
    "serving/session.py": "vLLM's own module of its MoE path, in the process that serves; no rule does",
    "vllm_plugin/alignment.py": "vLLM's own modules, where vLLM loads the plug-in; no rule does",
    "workflow_run.py": "Snakemake itself, which no rule runs",
}
SOURCES = [
    path.relative_to(PACKAGE_ROOT).as_posix()
    for path in PACKAGE_ROOT.rglob("*")
    if path.suffix not in {".py", ".pyc", ".typed"} and path.is_file()
]


@dataclass(frozen=True)
class Rule:
    """A rule as its file has it: its command, and the modules whose digest it names."""

    name: str
    command: str
    modules: tuple[str, ...]


def rules() -> list[Rule]:
    """Every rule that runs a command of this package; those of tables and figures are made in a loop."""
    found = []
    for file in sorted((ROOT / "workflow" / "rules").glob("*.smk")):
        for block in re.split(r"(?m)^(?=rule |checkpoint )|^ +(?=rule\b)", file.read_text())[1:]:
            name, code = re.match(r"\w+ ?(\w*)", block), re.search(r"code=code\(([^)]*)\)", block)
            command = re.search(
                r"(?:routeblock|{params\.routeblock}) ((?:[a-z][a-z-]* )+)", block.partition("shell:")[2]
            )
            if name and code and command:
                modules = [*re.findall(r'"([\w.]+)"', code[1]), *(CudaLane.modules if "CudaLane" in code[1] else ())]
                found.append(Rule(name[1] or file.stem, command[1].strip(), tuple(modules)))
    return found


RULES = rules()


def imports(command: str) -> set[str]:
    """The modules of the package that a command imports."""
    found: Any = typer.main.get_group(cli.app)
    for word in command.split():
        found = found.commands[word]
    callback = found.callback
    assert callback is not None
    module = ast.parse(inspect.getsource(sys.modules[callback.__module__]))
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    mine = functions[callback.__name__]
    used = {node.id for node in ast.walk(mine) if isinstance(node, ast.Name)}
    helpers = [function for name, function in functions.items() if name.startswith("_") and name in used]
    modules = set()
    for node in (node for function in (mine, *helpers) for node in ast.walk(function)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("routeblock"):
            for name in node.names:
                inner = PACKAGE_ROOT.joinpath(*node.module.split(".")[1:], name.name)
                is_module = inner.with_suffix(".py").is_file() or inner.is_dir()
                modules.add(f"{node.module}.{name.name}" if is_module else node.module)
    return modules


def test_the_rules_are_found() -> None:
    text = "".join(file.read_text() for file in (ROOT / "workflow" / "rules").glob("*.smk"))
    assert len(RULES) == text.count("code=code(") - len(("tables", "figures")) > 30


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_a_command_imports_is_in_the_digest_of_its_rule(rule: Rule) -> None:
    found = imports(rule.command)
    assert found & set(rule.modules)
    assert found - set(import_closure(rule.modules)) - APART - APART_FOR.get(rule.name, set()) == set()


@pytest.mark.parametrize("declared", [*TABLES.values(), *FIGURES.values()], ids=lambda declared: declared.name)
def test_a_table_or_figure_is_made_by_the_module_that_writes_it(declared: Declared) -> None:
    closure = set(import_closure([declared.module]))
    assert {"routeblock.tables", "routeblock.figure_style"} & closure
    assert not {"routeblock.targets", "routeblock.cli", "routeblock.config", "routeblock.generated"} & closure


def test_a_module_imported_by_name_is_declared_here() -> None:
    found = set()
    for path in PACKAGE_ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func if isinstance(node, ast.Call) else None
            called = name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""
            if called in {"import_module", "__import__", "exec", "eval", "run_path", "run_module"}:
                found.add(path.relative_to(PACKAGE_ROOT).as_posix())
    assert found == BY_NAME.keys()


def sources_of(modules: tuple[str, ...]) -> set[str]:
    """The files beside the code that a digest of these modules takes in."""
    return {path.relative_to(PACKAGE_ROOT).as_posix() for m in modules for path in other_sources(m)}


@pytest.mark.parametrize(
    "name", ["build_kernels", "probe", "run_cuda", "identity_cuda", "capture", "census", "unassisted", "report"]
)
def test_sources_that_the_code_of_a_rule_names_are_in_its_digest(name: str) -> None:
    (rule,) = [rule for rule in RULES if rule.name == name]
    named = set()
    for module in rule.modules:
        path = PACKAGE_ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
        texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        named |= {source for source in SOURCES if source in texts or Path(source).name in texts}
    assert named == sources_of(rule.modules) and named


def test_every_source_beside_the_code_is_listed_by_a_module() -> None:
    paths = [path.relative_to(PACKAGE_ROOT).with_suffix("") for path in PACKAGE_ROOT.rglob("*.py")]
    assert sources_of(tuple(".".join(("routeblock", *path.parts)) for path in paths)) == set(SOURCES)


def test_compiled_code_that_is_kept_by_its_file_uses_that_file_alone() -> None:
    # numba keeps machine code for as long as the file of a function is the same, whatever the function calls elsewhere.
    foreign = set[str]()
    kept = 0
    for path in PACKAGE_ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            name.asname or name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("routeblock")
            for name in node.names
        }
        for function in ast.walk(tree):
            decorators = function.decorator_list if isinstance(function, ast.FunctionDef) else []
            if any("cache=CACHED" in ast.unparse(decorator) for decorator in decorators):
                kept += 1
                body = [node for statement in function.body for node in ast.walk(statement)]
                used = {node.id for node in body if isinstance(node, ast.Name)} & imported
                foreign |= {f"{path.name}: {name}" for name in used}
    assert foreign == set() and kept
