# SPDX-License-Identifier: Apache-2.0
"""Build and sanitizer documents are those of the recording machine, or no table is made from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from routeblock.cli import main
from routeblock.evidence.manifest import Manifest
from routeblock.grouped_schedule import documents

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "fixtures/recorded/grouped_schedule/h200"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    source = tmp_path / "record"
    for path in [HERE / "contents.json", *documents.documents_of(HERE)]:
        copy = source / path.relative_to(HERE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return source


def copy_documents(record: Path, out: Path) -> int:
    options = ["--source", record, "--contents", record / "contents.json", "--out", out]
    return main(["study-b", "recorded-documents", *map(str, options)])


def test_the_committed_documents_are_copied_and_sealed(record: Path, tmp_path: Path) -> None:
    assert copy_documents(record, tmp_path / "out") == 0
    made = Manifest.model_validate_json((tmp_path / "out/documents.manifest.json").read_bytes())
    assert {e.path for e in made.outputs} == {p.relative_to(record).as_posix() for p in documents.documents_of(record)}
    assert any(e.path.endswith("contents.json") for e in made.inputs)


@pytest.mark.parametrize("name", ["build/sm_90/build.json", "cuda/gpu0/sanitizer/sanitizer.json"])
def test_an_edited_document_makes_nothing(
    record: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record / name
    path.write_text(path.read_text().replace("clean", "found", 1) + " ")
    assert copy_documents(record, tmp_path / "out") == 1
    assert f"{name}: not the bytes that were recorded" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_document_about_another_binary_makes_nothing_though_it_is_listed(
    record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record / "contents.json"
    listed = json.loads(path.read_text())
    listed["build/sm_90/q6k_schedules.cubin"]["sha256"] = "0" * 64
    path.write_text(json.dumps(listed))
    assert copy_documents(record, tmp_path / "out") == 1
    assert "about another cubin than the listed build/sm_90/q6k_schedules.cubin" in capsys.readouterr().out


def test_a_record_without_a_sanitizer_document_is_bad_input(record: Path, tmp_path: Path) -> None:
    for path in record.rglob("sanitizer.json"):
        path.unlink()
    assert copy_documents(record, tmp_path / "out") == 2
