# SPDX-License-Identifier: Apache-2.0
"""Writes docs/licences.md: every package that the studies install, its version, and the licence that it states."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "licences.md"
LOCK = ROOT / "envs" / "lock" / "base.txt"
_PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+) *(?:; *([^\\]+))?", re.MULTILINE)
HEAD = """# Licences of what is installed

The packages of `make setup`, as [envs/lock/base.txt](../envs/lock/base.txt) pins them, with the licence that each
states in its own metadata. Routeblock is under Apache-2.0 and contains none of their code. `make lock` writes this
page.

| package | version | licence |
|---|---|---|
"""


def pins(lock: Path) -> dict[str, tuple[str, str]]:
    """Version and marker (empty: everywhere) by the name of each package that a lock file pins."""
    return {name: (version, (marker or "").strip()) for name, version, marker in _PIN.findall(lock.read_text())}


def licence(of: Distribution) -> str:
    """What a distribution says: its expression, else its classifiers, else its field, else its licence file's title."""
    if expression := of.metadata["License-Expression"]:
        return expression
    classifiers = of.metadata.get_all("Classifier") or []
    if stated := [c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License :: ")]:
        return ", ".join(stated)
    field = (of.metadata["License"] or "").strip()
    if field and "\n" not in field:
        return field
    for file in of.files or ():
        if re.match(r"(?i)licen[cs]e|copying", file.name) and (text := file.read_text()).strip():
            return text.strip().splitlines()[0].strip()
    return "not stated"


def rows(lock: Path) -> list[tuple[str, str, str]]:
    """Name, version and licence of every package of a lock file; of those for other systems, which system."""
    found = []
    for name, (version, marker) in sorted(pins(lock).items()):
        try:
            stated = licence(distribution(name))
        except PackageNotFoundError:
            stated = f"not installed here: {marker}"
        found.append((name, version, stated))
    return found


def page() -> str:
    """The page."""
    return HEAD + "".join(f"| {name} | {version} | {stated} |\n" for name, version, stated in rows(LOCK))


if __name__ == "__main__":
    PAGE.write_text(page())
