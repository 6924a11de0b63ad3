# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routeblock.diagnose.launch_tables import Asked, rule_rows
from routeblock.diagnose.layer import Layer
from routeblock.diagnose.recorded import DIAGNOSIS, FILES, REGISTERS, check, prediction_rows, read, write
from routeblock.errors import InputError
from routeblock.evidence.archive import CONTENTS
from routeblock.evidence.digest import canonical_json, sha256_file
from routeblock.moe.marlin_launch import Weights

RECORD = Path(__file__).resolve().parents[2] / "fixtures" / "recorded" / "diagnosis" / "h200"


def edited(tmp_path: Path, name: str, edit: Callable[[Any], None]) -> Path:
    """A copy of the record with one file edited, and a list of contents that agrees."""
    shutil.copytree(RECORD, tmp_path / "record")
    path = tmp_path / "record" / name
    document = json.loads(path.read_bytes())
    edit(document)
    path.write_text(json.dumps(document))
    files = {n: tmp_path / "record" / n for n in FILES}
    contents = {n: {"size": p.stat().st_size, "sha256": sha256_file(p)} for n, p in files.items()}
    (tmp_path / "record" / CONTENTS).write_bytes(canonical_json(contents))
    return tmp_path / "record"


def test_the_record_holds_and_has_what_the_tables_say(tmp_path: Path) -> None:
    assert write(RECORD, tmp_path) == []
    rows = prediction_rows(read(RECORD))
    assert [row["plans"] for row in rows] == [667] * 3 + [400] * 5
    assert sum(row["outside"] for row in rows) == 0
    rules = rule_rows(Asked(Layer(2048, 768, 128, 8, Weights("float16", True, 128)), "0.24.0", read(RECORD)))
    assert len(rules) == 46
    assert all(row["equal"] for row in rules)


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        (DIAGNOSIS, lambda d: d["launches"][4].update(seen=[[64, 128, 132]]), "blocks of 64: seen"),
        (DIAGNOSIS, lambda d: d["launches"].pop(), "launches of 29"),
        (DIAGNOSIS, lambda d: d["predictions"][1].update(predicted=[0, 4835]), "prediction 1: predicted"),
        (DIAGNOSIS, lambda d: d["predictions"][4].update(changed=[14141, 0]), "prediction 4: 0 rows outside"),
        (DIAGNOSIS, lambda d: d["predictions"][7].update(outside=1), "prediction 7: 1 rows outside"),
        (DIAGNOSIS, lambda d: d["predictions"].pop(), "7 predictions; 8"),
        (REGISTERS, lambda d: d["registers"]["float16"]["u4"]["8"]["64x128"].__setitem__(3, 127), "registers are not"),
    ],
)
def test_an_edit_is_found(tmp_path: Path, name: str, edit: Callable[[Any], None], says: str) -> None:
    wrong = check(read(edited(tmp_path, name, edit)))
    assert len(wrong) == 1
    assert says in wrong[0]


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    shutil.copytree(RECORD, tmp_path / "record")
    with (tmp_path / "record" / DIAGNOSIS).open("a") as f:
        f.write("\n")
    with pytest.raises(InputError, match="not the bytes that were recorded"):
        read(tmp_path / "record")


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no list of contents"):
        read(tmp_path)
