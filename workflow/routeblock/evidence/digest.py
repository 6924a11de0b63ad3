# SPDX-License-Identifier: Apache-2.0
"""Digests: canonical JSON, files, arrays, and the code that made a result."""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.errors import InputError

PACKAGE = "routeblock"
PACKAGE_ROOT = Path(__file__).resolve().parent.parent


def canonical_json(value: Any) -> bytes:
    """Canonical JSON of `value`: sorted keys, no spaces, UTF-8, no newline at the end. NaN is refused.

    Raises `InputError` for text that UTF-8 cannot hold: a file's name in other bytes, half of a pair of surrogates.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise InputError(
            f"not UTF-8 at {text[max(e.start - 40, 0) : e.end]!a}",
            where="a name or a text in a document",
            limit="documents are UTF-8",
            way_out="rename the file or correct the text",
        ) from e


def sha256_bytes(data: bytes | memoryview) -> str:
    """SHA-256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`."""
    return sha256_bytes(canonical_json(value))


def sha256_array(array: np.ndarray[Any, Any]) -> str:
    """SHA-256 of the C-contiguous bytes of `array`; shape and dtype are not part of it."""
    return sha256_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, streamed."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _module_file(module: str) -> Path | None:
    base = PACKAGE_ROOT.joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _parsed(module: str) -> tuple[str, frozenset[str]]:
    """SHA-256 of the module's code without comments and docstrings, and the package's modules that it imports."""
    path = _module_file(module)
    assert path is not None, module
    code, names = _remembered(module, path)
    found = {m for m in names if _module_file(m) is not None}
    # A package's __init__ runs before its modules, so it belongs to them.
    for m in [module, *found]:
        parts = m.split(".")
        found.update(".".join(parts[:i]) for i in range(1, len(parts)))
    found.discard(module)
    return code, frozenset(found)


def _remembered(module: str, path: Path) -> tuple[str, list[str]]:
    """What `_read` says, from the user's cache where these very bytes were read before.

    Parsing takes most of the time of a dry run, and half a second of each command's. Content is the key, no clock.
    """
    source = path.read_bytes()
    key = sha256_json([module, sha256_bytes(source), _reader()])
    try:
        kept = Path.home() / ".cache" / PACKAGE / "code" / f"{key}.json"
    except RuntimeError:  # no home
        return _read(module, source, is_package=path.name == "__init__.py")
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(kept.read_bytes())
        return str(known["code"]), list(known["names"])
    code, names = _read(module, source, is_package=path.name == "__init__.py")
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        written = kept.with_suffix(f".{os.getpid()}")
        written.write_bytes(canonical_json({"code": code, "names": names}))
        written.replace(kept)
    return code, names


@cache
def _reader() -> str:
    return sha256_file(Path(__file__))


def _read(module: str, source: bytes, *, is_package: bool) -> tuple[str, list[str]]:
    """SHA-256 of the code in `source`, and every name below this package that it may import, module or not."""
    tree = ast.parse(source)
    imports: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.update(a.name for a in node.names if a.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") if is_package else module.split(".")[:-1]
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join(parts + ([base] if base else []))
            if base.split(".")[0] != PACKAGE:
                continue
            imports.add(base)
            imports.update(f"{base}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # Also those below a field: a text that stands alone does nothing.
            body: list[ast.stmt] = [statement for statement in node.body if not _is_text(statement)]
            node.body = body or ([] if isinstance(node, ast.Module) else [ast.Pass()])
    return sha256_bytes(_dump(tree).encode()), sorted(imports)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _dump(node: Any) -> str:
    """The tree as text without what is empty: Python versions differ in which empty fields they have and show."""
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields)
        shown = (f"{name}={_dump(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({', '.join(shown)})"
    return f"[{', '.join(map(_dump, node))}]" if isinstance(node, list) else repr(node)


def import_closure(modules: Iterable[str]) -> list[str]:
    """Every module of this package that `modules` import, directly or not, in sorted order, themselves included."""
    todo, seen = list(modules), set[str]()
    while todo:
        m = todo.pop()
        if m in seen:
            continue
        if _module_file(m) is None:
            raise ModuleNotFoundError(f"no module {m} in {PACKAGE_ROOT}")
        seen.add(m)
        todo.extend(_parsed(m)[1])
    return sorted(seen)


def other_sources(module: str) -> list[Path]:
    """The files (.cu, .c, a template) that a module lists in its constant `SOURCES`, by their names beside it."""
    path = _module_file(module)
    assert path is not None, module
    source = path.read_bytes()
    for node in ast.parse(source).body if b"SOURCES = " in source else ():
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["SOURCES"]:
            return [path.with_name(name) for name in ast.literal_eval(node.value)]
    return []


def code_digest(*modules: str) -> str:
    """SHA-256 over the code that `modules` import inside this package; comments and docstrings do not count.

    Of the files in `SOURCES` of these modules (not of those that they import) every byte counts. Raises
    ModuleNotFoundError if there is no such module.
    """
    code = {m: _parsed(m)[0] for m in import_closure(modules)}
    files = [path for m in modules for path in other_sources(m)]
    named = {path.relative_to(PACKAGE_ROOT).as_posix(): sha256_file(path) for path in files}
    return sha256_json({"modules": code, "files": named})
