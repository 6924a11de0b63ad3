# SPDX-License-Identifier: Apache-2.0
"""A study's `statistics.json`: its comparisons, under the digest of the protocol that they follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from routeblock.errors import InputError
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import seal

Comparison = TypeVar("Comparison")


def write(
    out: Path,
    comparisons: Iterable[Any],
    protocol_sha256: str,
    *,
    rule: str,
    inputs: Iterable[Path],
    modules: Sequence[str],
) -> None:
    """Write `statistics.json` with `comparisons`, dataclasses, and its manifest to `out`."""
    path = out / "statistics.json"
    write_json(path, {"protocol_sha256": protocol_sha256, "comparisons": [asdict(c) for c in comparisons]})
    seal(
        out / "statistics.manifest.json",
        rule=rule,
        outputs=[path],
        inputs=inputs,
        parameters={"protocol_sha256": protocol_sha256},
        modules=modules,
    )


def read(path: Path, make: Callable[[dict[str, Any]], Comparison], command: str) -> list[Comparison]:
    """The comparisons of a `statistics.json` that `command` wrote, by `make`. Raises InputError if it is none."""
    try:
        return [make(c) for c in json.loads(path.read_text(encoding="utf-8"))["comparisons"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise InputError(
            f"no statistics: {e}",
            where=str(path),
            limit=f"a file of `routeblock {command}` is needed",
            way_out="run that command",
        ) from e
