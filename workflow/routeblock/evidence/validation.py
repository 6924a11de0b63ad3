# SPDX-License-Identifier: Apache-2.0
"""What a second computation of the statistics found: tables are made only from what it agreed with."""

from __future__ import annotations

import json
from pathlib import Path

from routeblock.errors import InputError


def must_agree(path: Path) -> None:
    """Read a `validation.json`. Raises InputError if it is none, compared nothing, or lists a disagreement."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        compared, found = int(told["comparisons"]), list(told["disagreements"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise InputError(
            f"no validation: {e}",
            where=str(path),
            limit="a validation.json of validate-timings or validate-alignment is needed",
            way_out="run that command",
        ) from e
    if found or not compared:
        raise InputError(
            f"the second computation disagrees {len(found)} times in {compared} comparisons",
            where=str(path),
            limit="a table needs statistics that were computed twice with the same result",
            way_out="see the disagreements in that file",
        )
