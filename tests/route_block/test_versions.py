# SPDX-License-Identifier: Apache-2.0
"""Versions of the extension: which surfaces are the recorded ones, and which launch each selector chose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json
from routeblock.route_block.gpu.versions import compare

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "fixtures/recorded/h200-vllm0.24.0/versions").glob("*.json"))
CONTENTS = ROOT / "fixtures/recorded/h200-vllm0.24.0/versions.contents.json"
GOLDEN = ROOT / "fixtures/golden"


def versions(results: list[Path], tmp_path: Path) -> dict[str, dict[str, Any]]:
    out = tmp_path / "versions.json"
    compare(results, GOLDEN, out)
    return {row["version"]: row for row in json.loads(out.read_bytes())["versions"]}


def edited(tmp_path: Path, change: Callable[[dict[str, Any]], object], name: str = "0.24.1.json") -> Path:
    document = json.loads(next(p for p in RESULTS if p.stem == "0.24.0").read_bytes())
    change(document)
    path = tmp_path / name
    path.write_bytes(canonical_json(document))
    return path


def test_the_recorded_versions_are_in_the_order_of_versions(tmp_path: Path) -> None:
    ten = edited(tmp_path, lambda document: None, "0.100.0.json")
    assert list(versions([ten, *reversed(RESULTS)], tmp_path)) == ["0.22.0", "0.24.0", "0.33.0", "0.100.0"]


def test_an_older_and_a_newer_version_give_the_recorded_bits_at_fixed_launches(tmp_path: Path) -> None:
    for row in versions(RESULTS, tmp_path).values():
        for launch in ("g246", "g200"):
            assert len(row["same"][launch]) == row["compared"][launch] == 8
        assert all(len(launches) == 1 for launches in row["automatic"].values())
    digests = {json.loads(path.read_bytes())["environment"]["extension_sha256"] for path in RESULTS}
    assert len(digests) == len(RESULTS)  # three files, not one under three names


@pytest.mark.parametrize("surface", ["w13", "activation", "w2", "final"])
def test_one_surface_with_other_bits_is_not_the_same(tmp_path: Path, surface: str) -> None:
    path = edited(tmp_path, lambda document: document["layer g200 rev"].update({surface: "0" * 64}))
    row = versions([path], tmp_path)["0.24.1"]
    assert len(row["same"]["g246"]) == 8
    assert len(row["same"]["g200"]) == 7 and f"rev {surface}" not in row["same"]["g200"]


def test_another_automatic_launch_is_told(tmp_path: Path) -> None:
    other = {"kernel": "", "launch": [64, 128, 132]}
    path = edited(tmp_path, lambda document: document["automatic launch"].update(w2=[other]))
    assert versions([path], tmp_path)["0.24.1"]["automatic"] == {"w13": [[128, 64, 528]], "w2": [[64, 128, 132]]}


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda document: document.pop("automatic launch"), "the check did not come to its end"),
        (lambda document: document.update(format="other"), "format other"),
    ],
)
def test_a_result_that_did_not_end_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], refusal: str
) -> None:
    path = edited(tmp_path, change)
    with pytest.raises(InputError, match=refusal):
        versions([path], tmp_path)
    assert not (tmp_path / "versions.json").exists()


def test_a_version_that_comes_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    shutil.copy(RESULTS[0], tmp_path / "again")
    with pytest.raises(InputError, match="this version comes twice"):
        versions([RESULTS[0], tmp_path / "again" / RESULTS[0].name], tmp_path)


def copied(tmp_path: Path) -> tuple[list[Path], Path]:
    folder = Path(shutil.copytree(RESULTS[0].parent, tmp_path / "versions"))
    return sorted(folder.iterdir()), Path(shutil.copy(CONTENTS, tmp_path))


def test_the_committed_versions_are_those_listed(tmp_path: Path) -> None:
    results, contents = copied(tmp_path)
    compare(results, GOLDEN, tmp_path / "out.json", contents=contents)
    manifest = json.loads((tmp_path / "out.manifest.json").read_bytes())
    assert CONTENTS.name in {Path(entry["path"]).name for entry in manifest["inputs"]}


@pytest.mark.parametrize("change", ["edited", "left out", "one more", "no list"])
def test_versions_that_are_not_those_listed_are_refused(tmp_path: Path, change: str) -> None:
    results, contents = copied(tmp_path)
    if change == "edited":
        results[1].write_bytes(results[1].read_bytes() + b" ")
    elif change == "left out":
        del results[1]
    elif change == "one more":
        results.append(Path(shutil.copy(results[0], tmp_path / "versions/0.21.0.json")))
    else:
        contents.write_text("[]")
    words = {"edited": "not the bytes", "left out": "not given", "one more": "not listed", "no list": "no list of"}
    with pytest.raises(InputError, match=words[change]):
        compare(results, GOLDEN, tmp_path / "out.json", contents=contents)
    assert not (tmp_path / "out.json").exists()
