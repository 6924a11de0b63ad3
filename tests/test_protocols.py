# SPDX-License-Identifier: Apache-2.0
"""Every protocol's changes are listed with a reason."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "fixtures" / "protocols"
# These continue another protocol's numbers.
FIRST = {"grouped_fresh": 3, "grouped_stream": 4}


def test_every_version_of_every_protocol_is_listed_and_every_change_has_a_reason() -> None:
    rows = [line.split("|")[1:-1] for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row] for row in rows]
    told: dict[str, set[int]] = {}
    for name, version, change, reason in cells:
        told.setdefault(name.strip("`"), set()).add(int(version))
        assert bool(change) == bool(reason)
        assert change or version == "1"
    files = {path.stem: json.loads(path.read_bytes())["version"] for path in FOLDER.glob("*.json")}
    assert told == {name: set(range(FIRST.get(name, 1), last + 1)) for name, last in files.items()}


def test_fresh_data_have_a_seed_that_no_other_record_used() -> None:
    """The seed of the confirmation under `grouped_fresh` draws nothing else in any protocol."""
    plans = {path.stem: json.loads(path.read_bytes()) for path in FOLDER.glob("grouped_*.json")}
    fresh = plans["grouped_fresh"]["confirmation"]["seed"]
    others = {
        (name, part): section["seed"]
        for name, plan in plans.items()
        for part, section in plan.items()
        if isinstance(section, dict) and "seed" in section and (name, part) != ("grouped_fresh", "confirmation")
    }
    assert len(others) >= 8
    assert [where for where, seed in others.items() if seed == fresh] == []
