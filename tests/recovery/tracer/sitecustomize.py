# SPDX-License-Identifier: Apache-2.0
"""Notes what a process imports from the package, and who imports it, and which files it opens to read.

Python imports this module at its start when its folder is on PYTHONPATH. One JSON file a process goes to $TRACE.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = "routeblock"
edges: set[tuple[str, str, bool]] = set()  # importer, imported, at the top of the importer
read: set[str] = set()
rules: dict[str, list[str]] = {}  # what was sealed, by which modules
real_import, real_import_module = builtins.__import__, importlib.import_module


def note(frame: FrameType, name: str) -> None:
    importer = str(frame.f_globals.get("__name__"))
    if name in sys.modules and name.split(".")[0] == PACKAGE:
        edges.add((importer, name, frame.f_code.co_name == "<module>"))


def noted_import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    module = real_import(name, globals, locals, fromlist, level)
    frame = sys._getframe(0).f_back
    if frame is None:  # called from C
        return module
    whole = name
    if level:
        base = str(globals["__package__"]).split(".")
        whole = ".".join([*base[: len(base) - level + 1], *([name] if name else [])])
    note(frame, whole)
    for item in fromlist or ():
        note(frame, f"{whole}.{item}")
    if whole == f"{PACKAGE}.evidence.manifest" and "seal" in (fromlist or ()) and not hasattr(module, "traced"):
        note_seals(module)
    return module


def note_seals(module: Any) -> None:
    real_seal, module.traced = module.seal, True

    def seal(path: Path, *, rule: str, modules: Any, **others: Any) -> None:
        rules[rule] = list(modules)
        real_seal(path, rule=rule, modules=modules, **others)

    module.seal = seal


def noted_import_module(name: str, package: str | None = None) -> Any:
    module = real_import_module(name, package)
    note(sys._getframe(1), module.__name__)
    return module


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not isinstance(arguments[0], str | bytes):
        return
    if not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        read.add(str(Path(os.fsdecode(arguments[0])).absolute()))


def write() -> None:
    for rule, modules in rules.items():  # a command seals for one rule
        trace = {"rule": rule, "modules": modules, "edges": sorted(edges), "read": sorted(read)}
        Path(os.environ["TRACE"], f"{os.getpid()}.json").write_text(json.dumps(trace))


if "TRACE" in os.environ:
    builtins.__import__ = noted_import
    importlib.import_module = noted_import_module
    sys.addaudithook(audit)
    atexit.register(write)
