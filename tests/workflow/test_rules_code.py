# SPDX-License-Identifier: Apache-2.0
"""Read from the source: what the command line imports for a rule, and package files that code names, are in its digest.

What commands import at run time is traced by tests/recovery.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from routeblock import rule_code as workflow
from routeblock.evidence.digest import PACKAGE_ROOT, import_closure
from routeblock.q6k_dispatch.targets import TABLES as DISPATCH_TABLES

COMMANDS = ("cli.py", "cli_alignment.py", "cli_dispatch.py", "cli_figures.py", "cli_grouped.py", "cli_native.py")
# What hands on or shows, and makes no result: the digest itself, a progress bar, a lane by its name.
APART = {"routeblock.rule_code", "routeblock.progress", "routeblock.route_block.runs.lanes"}
# A prediction takes its turn to ask a GPU for its name alone; no rule is made from how it waits.
APART_FOR = {rule: {"routeblock.cuda.gpu_lock"} for rule in ("prediction", "run", "identity")}
# `code(rule)` with a name that the command computes.
COMPUTED = {
    ("cli.py", "run"): ["run", "run_cuda"],
    ("cli.py", "freeze_identity"): ["identity", "identity_cuda"],
    ("cli.py", "table"): [f"table_{name}" for name in (*workflow.TABLES, *workflow.GPU_TABLES)],
    ("cli_alignment.py", "alignment_table"): [f"table_{name}" for name in workflow.ALIGNMENT_TABLES],
    ("cli_dispatch.py", "dispatch_table"): [f"table_{name}" for name in DISPATCH_TABLES],
    ("cli_figures.py", "_route_block"): [f"figure_{name}" for name in workflow.FIGURES],
    ("cli_figures.py", "_grouped"): [f"figure_{name}" for name in workflow.GROUPED_FIGURES],
    ("cli_figures.py", "_alignment"): [f"figure_{name}" for name in workflow.ALIGNMENT_FIGURES],
    ("cli_grouped.py", "grouped_table"): [f"table_{name}" for name in workflow.GROUPED_TABLES],
    ("cli_grouped.py", "_record"): ["sweep", "confirmation", "beyond"],
}
# A module that is imported by name, so that it is in nobody's digest, and why that may be.
BY_NAME = {
    "route_block/operating_point.py": "what a GPU is called has no part in the results of a CPU",
    "vllm_plugin/alignment.py": "vLLM's own modules, where vLLM loads the plug-in; no rule does",
}
SOURCES = [
    path.relative_to(PACKAGE_ROOT).as_posix()
    for path in PACKAGE_ROOT.rglob("*")
    if path.suffix not in {".py", ".pyc", ".typed"} and path.is_file()
]


def imports(function: ast.FunctionDef) -> set[str]:
    """The modules of the package that a command imports."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("routeblock"):
            for name in node.names:
                inner = PACKAGE_ROOT.joinpath(*node.module.split(".")[1:], name.name)
                is_module = inner.with_suffix(".py").is_file() or inner.is_dir()
                found.add(f"{node.module}.{name.name}" if is_module else node.module)
    return found


def rules_of(file: str, function: ast.FunctionDef) -> list[str]:
    """The rules whose digest a command asks for."""
    named = [
        node.args[0]
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "code"
    ]
    if all(isinstance(argument, ast.Constant) for argument in named):
        return [str(argument.value) for argument in named if isinstance(argument, ast.Constant)]
    return COMPUTED[file, function.name]


def commands() -> Iterator[tuple[str, set[str]]]:
    """Each rule that the command line serves, with what it imports for it."""
    for file in COMMANDS:
        for function in ast.parse((PACKAGE_ROOT / file).read_text()).body:
            if isinstance(function, ast.FunctionDef):
                for rule in rules_of(file, function):
                    yield rule, imports(function)


def test_every_rule_has_a_command() -> None:
    assert {rule for rule, _ in commands()} == workflow.RULES.keys()


def test_what_a_command_imports_is_in_the_digest_of_its_rule() -> None:
    outside = {}
    for rule, found in commands():
        closure = set(import_closure(workflow.RULES[rule].modules))
        outside[rule] = found - closure - APART - APART_FOR.get(rule, set())
    assert {rule: modules for rule, modules in outside.items() if modules} == {}


def test_a_module_imported_by_name_is_declared_here() -> None:
    found = set()
    for path in PACKAGE_ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func if isinstance(node, ast.Call) else None
            called = name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""
            if called in {"import_module", "__import__", "exec", "eval", "run_path", "run_module"}:
                found.add(path.relative_to(PACKAGE_ROOT).as_posix())
    assert found == BY_NAME.keys()


@pytest.mark.parametrize(
    "rule", ["build_kernels", "probe", "run_cuda", "identity_cuda", "capture", "census", "unassisted"]
)
def test_sources_that_the_code_of_a_rule_names_are_in_its_digest(rule: str) -> None:
    named = set()
    for module in import_closure(workflow.RULES[rule].modules):
        base = PACKAGE_ROOT.joinpath(*module.split(".")[1:])
        path = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        texts = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        named |= {source for source in SOURCES if source in texts or Path(source).name in texts}
    assert named == set(workflow.RULES[rule].files) and named


def test_compiled_code_that_is_kept_by_its_file_uses_that_file_alone() -> None:
    # numba keeps machine code for as long as the file of a function is the same, whatever the function calls elsewhere.
    foreign = set[str]()
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
            if any("cache=True" in ast.unparse(decorator) for decorator in decorators):
                used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} & imported
                foreign |= {f"{path.name}: {name}" for name in used}
    assert foreign == set()
