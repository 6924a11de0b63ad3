# SPDX-License-Identifier: Apache-2.0
"""A census is summed up only if each process's counts are those of the calls that it made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routeblock.cli import main
from routeblock.evidence.packed import read_lines

EVIDENCE = Path(__file__).resolve().parents[2] / "fixtures/recorded/h200-vllm0.24.0"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def census(tmp_path: Path) -> Path:
    """The recorded processes of one census, as files."""
    for line in read_lines(EVIDENCE / "auto.census.jsonl"):
        for document in line["documents"].values():
            if "calls" in document:
                path = tmp_path / "census" / document["history"] / f"process{document['process']}.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(document))
    return tmp_path / "census"


def summarized(census: Path) -> int:
    out = census.parent / "census.json"
    return main(["study-a", "summarize-census", str(census), "--lane", "recorded-h200", "--out", str(out)])


def test_the_recorded_census_is_summed_up(census: Path) -> None:
    assert summarized(census) == 0
    rows = json.loads((census.parent / "census.json").read_bytes())["rows"]
    assert {row["calls"] for row in rows if row["history"] == "both"} == {2000}


def fewer(document: dict[str, Any]) -> None:
    document["native"][0]["count"] -= 1


def dropped(document: dict[str, Any]) -> None:
    del document["canonical"][0]


def calls(document: dict[str, Any]) -> None:
    document["calls"] += 1


def negative(document: dict[str, Any]) -> None:
    """The sum stays."""
    first, second = document["native"][:2]
    second["count"] += first["count"] + 1
    first["count"] = -1


def halved(document: dict[str, Any]) -> None:
    """One outcome as two: the sum stays."""
    first = document["native"][0]
    first["count"] -= 1
    document["native"].append(first | {"count": 1})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (fewer, "native counts 199 calls, the process made 200"),
        (dropped, "canonical counts 0 calls, the process made 200"),
        (calls, "native counts 200 calls, the process made 201"),
        (negative, "native counts -1 calls of one outcome"),
        (halved, "native counts one outcome twice"),
        (lambda d: d.pop("canonical"), "'canonical'"),
    ],
)
def test_counts_that_are_not_those_of_the_calls_are_refused(
    census: Path, capsys: pytest.CaptureFixture[str], change: Change, words: str
) -> None:
    path = census / "H1/process3.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))
    assert summarized(census) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"{path}: ") and words in line and line.count("\n") == 1
    assert not (census.parent / "census.json").exists()
