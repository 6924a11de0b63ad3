# SPDX-License-Identifier: Apache-2.0
"""A recorded run is proved again on this CPU, and what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_measure import CODE
from tiny import PLAN, MadeUpClock, write

from routeblock.evidence.archive import pack
from routeblock.grouped_schedule import bundle, campaigns, record, reprove, tables, wiring
from routeblock.grouped_schedule.campaigns import Mode


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    stages = campaigns.confirmation(PLAN, Mode.CALL, 0)
    record.write(folder, MadeUpClock(), stages, PLAN, rule="confirmation", inputs=[write(tmp_path)], code=CODE)
    return folder


def again(source: Path, out: Path) -> list[str]:
    return reprove.write(out, source, "recorded-h200", PLAN, threads=1, inputs=[], code=CODE)


def test_a_sound_record_is_proved_and_keeps_its_times(source: Path, tmp_path: Path) -> None:
    assert again(source, tmp_path / "out") == []
    was, now = record.read(source), record.read(tmp_path / "out")
    assert [b.time_us for b in now.batches] == [b.time_us for b in was.batches]
    assert {b.lane for b in now.batches} == {"recorded-h200"}
    assert now.fixtures == was.fixtures and now.run["protocol_sha256"] == was.run["protocol_sha256"]


def edit(source: Path, name: str, change: Callable[[Any], None]) -> None:
    told = json.loads((source / name).read_text())
    change(told)
    (source / name).write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("comparisons.json", lambda t: t[2].update(sha256="0" * 64), "other output bits"),
        ("fixtures.json", lambda t: t[0].update(distinct_experts=1), "not what its seed gives"),
        ("fixtures.json", lambda t: t[0]["sha256"].update(weights="0" * 64), "not what its seed gives"),
        ("run.json", lambda t: t.update(protocol_sha256="0" * 64), "carries protocol"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_written(
    source: Path, tmp_path: Path, name: str, change: Callable[[Any], None], message: str
) -> None:
    edit(source, name, change)
    assert any(message in line for line in again(source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_archive_depends_on_the_files_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
        pack(tmp_path / f"{name}.tar.gz", {"f/x": tmp_path / name / "x"})
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()


def test_a_bundle_holds_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tarfile

    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    Path("d/x").write_text("x")
    path = bundle.write(Path("out"), [Path("d")], code=CODE)
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["contents.json", "d/x"]


def test_the_rules_know_every_table() -> None:
    assert tuple(tables.TABLES) == wiring.TABLES
