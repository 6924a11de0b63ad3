# SPDX-License-Identifier: Apache-2.0
"""The contract of vLLM's alignment, read from the Python files inside its wheels: nothing of them is run or kept.

    python tests/vllm_plugin/read_wheels.py FACTS.json [--versions V ...] [--check]

Of each version: the wheel's name and SHA-256; the signatures of `moe_align_block_size` and of the operator's wrapper;
the operator's schema; the modules that import the function by name, which a plug-in has to replace there, and what
their calls pass. --check reads the versions of FACTS.json again and exits 1 if a fact differs. A wheel is some 300 MB,
downloaded and removed one by one.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

FUNCTION = "moe_align_block_size"
HOME = "vllm/model_executor/layers/fused_moe/moe_align_block_size.py"
OPERATORS = "vllm/_custom_ops.py"
EXTENSIONS = ("vllm/_moe_C_stable_libtorch.abi3.so", "vllm/_moe_C.abi3.so")
PYTHON = "3.12"
# pip matches the number exactly, and the wheels' differ.
PLATFORMS = ["manylinux1_x86_64", *(f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35, 39))]


def signature(source: bytes) -> list[list[str]]:
    """Parameters of the function as [name, default or ""], in order; overloads only describe it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == FUNCTION and not node.decorator_list:
            if node.args.kwonlyargs or node.args.vararg or node.args.kwarg:
                raise ValueError(f"{FUNCTION} has other parameters than plain ones")
            names = [a.arg for a in node.args.args]
            defaults = [ast.unparse(d) for d in node.args.defaults]
            return [list(pair) for pair in zip(names, [""] * (len(names) - len(defaults)) + defaults, strict=True)]
    raise ValueError(f"no function {FUNCTION}")


def schema(extension: bytes) -> str:
    """The operator's schema as the extension registers it."""
    found = re.search(rb"(?<![a-z_])" + FUNCTION.encode() + rb"\([^\0]*?\) *-> *\(\)", extension)
    if found is None:
        raise ValueError(f"no schema of {FUNCTION}")
    return " ".join(found[0].decode().split())


def calls(source: bytes) -> list[list[str]]:
    """What each call of the function passes: a star for a positional argument, else its name."""
    return [
        [*("*" for _ in node.args), *(k.arg or "**" for k in node.keywords)]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == FUNCTION
    ]


def imports_it(source: bytes) -> bool:
    """Whether a module takes the function by name from its home."""
    home = HOME.removesuffix(".py").replace("/", ".")
    return FUNCTION.encode() in source and any(
        isinstance(node, ast.ImportFrom) and node.module == home and any(a.name == FUNCTION for a in node.names)
        for node in ast.walk(ast.parse(source))
    )


def facts(wheel: Path) -> dict[str, Any]:
    """What one wheel says."""
    with ZipFile(wheel) as archive:
        modules = [n for n in archive.namelist() if n.startswith("vllm/model_executor/") and n.endswith(".py")]
        users = [n for n in modules if imports_it(archive.read(n))]
        return {
            "wheel": wheel.name,
            "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
            "function": signature(archive.read(HOME)),
            "operator": signature(archive.read(OPERATORS)),
            "schema": schema(archive.read(next(n for n in EXTENSIONS if n in archive.namelist()))),
            "calls": {n.removesuffix(".py").replace("/", "."): calls(archive.read(n)) for n in sorted(users)},
        }


def download(version: str) -> dict[str, Any]:
    """The facts of a version's wheel, which is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        platforms = [word for p in PLATFORMS for word in ("--platform", p)]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps",
             "--only-binary=:all:", "--python-version", PYTHON, *platforms, "-d", folder, f"vllm=={version}"],
            check=True,
        )  # fmt: skip
        return facts(next(Path(folder).glob("*.whl")))


def main() -> int:
    parser = argparse.ArgumentParser(description="Read the contract of vLLM's alignment from its wheels")
    parser.add_argument("facts", type=Path)
    parser.add_argument("--versions", nargs="*", default=[])
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    known = json.loads(asked.facts.read_bytes()) if asked.facts.exists() else {}
    differing = []
    for version in asked.versions or known:
        found = download(version)
        if asked.check and found != known.get(version):
            differing.append(version)
        print(f"vllm {version}: {', '.join(found['calls'])}", flush=True)
        if not asked.check:
            known[version] = found
            asked.facts.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if differing:
        print(f"other facts than {asked.facts} has: {', '.join(differing)}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
