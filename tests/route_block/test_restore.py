# SPDX-License-Identifier: Apache-2.0
"""Runs packed as evidence and restored: every byte as it was, or a refusal in one line."""

from __future__ import annotations

import json
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save
from synthetic import SignatureLane, Study, make_study

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, sha256_file
from routeblock.evidence.record import RECORD, RESTORED
from routeblock.route_block.runs.recorded import INDEX, STORE, pack_evidence, restore

GROUP = "published.stored"
RUNS = 70  # seven cells, two histories, five replicates


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Study]:
    """Evidence of a small study, and the study as it was."""
    root = tmp_path_factory.mktemp("packed")
    study = make_study(root / "study", lane_name="cuda", lane=SignatureLane("observed"))
    results = root / "results"
    shutil.copytree(study.fixture, results / "fixtures" / "small")
    shutil.copytree(study.runs, results / "route_block" / "small" / "cuda" / "published" / "stored")
    pack_evidence([results], [], root / "evidence")
    return root / "evidence", study


@pytest.fixture
def evidence(packed: tuple[Path, Study], tmp_path: Path) -> Path:
    """A copy of the evidence to damage."""
    shutil.copytree(packed[0], tmp_path / "evidence")
    return tmp_path / "evidence"


@pytest.fixture(scope="module")
def fixture_folder(packed: tuple[Path, Study]) -> Path:
    return packed[1].fixture


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def rewrite_index(evidence: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((evidence / INDEX).read_bytes())
    change(index)
    (evidence / INDEX).write_bytes(canonical_json(index))


def vouch(evidence: Path) -> None:
    """Let the index name the files as they are now."""

    def change(index: dict[str, Any]) -> None:
        index["groups"][GROUP]["sha256"] = sha256_file(evidence / f"{GROUP}.jsonl")
        index["tensors"] = sha256_file(evidence / STORE)

    rewrite_index(evidence, change)


def test_restored_runs_are_the_packed_ones_in_every_byte(
    packed: tuple[Path, Study], evidence: Path, tmp_path: Path
) -> None:
    study = packed[1]
    out = tmp_path / "out"
    restore(study.fixture, evidence, GROUP, out)
    found = files(out)
    made = {name: found.pop(name) for name in (RESTORED, "restored.manifest.json")}
    assert found == files(study.runs)
    assert len(list(out.rglob(RECORD))) == RUNS
    assert json.loads(made[RESTORED])["files"].keys() == found.keys()
    again = Study(tmp_path, study.replicates)
    again.fixture, again.runs, again.prediction = study.fixture, out, out / "prediction.json"
    again.identity = study.identity
    assert not again.reasons()
    assert again.judge().document == study.judge().document


def test_packing_is_deterministic_and_takes_packed_evidence_along(evidence: Path, tmp_path: Path) -> None:
    pack_evidence([], [evidence], tmp_path / "again")
    assert files(tmp_path / "again") == files(evidence)
    index = json.loads((evidence / INDEX).read_bytes())
    assert index["groups"][GROUP]["runs"] == RUNS


def test_a_group_with_two_contents_is_refused(evidence: Path, tmp_path: Path) -> None:
    shutil.copytree(evidence, tmp_path / "other")
    lines = (evidence / f"{GROUP}.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "other" / f"{GROUP}.jsonl").write_bytes(b"".join(lines[:-1]))
    rewrite_index(tmp_path / "other", lambda i: i["groups"][GROUP].update(runs=RUNS - 1, folders=RUNS))
    vouch(tmp_path / "other")
    with pytest.raises(InputError, match=f"group {GROUP} comes twice"):
        pack_evidence([], [evidence, tmp_path / "other"], tmp_path / "both")
    assert not (tmp_path / "both").exists()


def edit_record(evidence: Path) -> None:
    path = evidence / f"{GROUP}.jsonl"
    text = path.read_bytes()
    assert text.count(b'"launched":4') > 1
    path.write_bytes(text.replace(b'"launched":4', b'"launched":5', 1))


def edit_tensor(evidence: Path) -> None:
    path = evidence / STORE
    entries = load(lzma.decompress(path.read_bytes()))
    name = next(n for n in sorted(entries) if len(n) == 64)
    entries[name] = entries[name].copy()
    entries[name].reshape(-1)[0] ^= np.uint8(1)
    path.write_bytes(lzma.compress(save(entries)))


@pytest.mark.parametrize("edit", [edit_record, edit_tensor])
def test_an_edited_file_is_not_the_one_of_the_index(
    evidence: Path, fixture_folder: Path, tmp_path: Path, edit: Callable[[Path], None]
) -> None:
    edit(evidence)
    with pytest.raises(InputError, match="its bytes are not those of the index") as refused:
        restore(fixture_folder, evidence, GROUP, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("edit", [edit_record, edit_tensor])
def test_an_edited_file_that_the_index_vouches_for_is_rebuilt_to_other_bytes(
    evidence: Path, fixture_folder: Path, tmp_path: Path, edit: Callable[[Path], None]
) -> None:
    edit(evidence)
    vouch(evidence)
    with pytest.raises(InputError, match="rebuilt to other bytes"):
        restore(fixture_folder, evidence, GROUP, tmp_path / "out")
    assert not (tmp_path / "out" / RESTORED).exists()


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda i: i.update(format="routeblock.recorded.v0"), "not canonical JSON of this version"),
        (lambda i: i["fixture"].update(sha256="0" * 64), "recorded on fixture small 0{16}.*this is fixture"),
        (lambda i: i["groups"].pop(GROUP), f"no recorded group {GROUP}"),
        (lambda i: i["groups"][GROUP].update(sha256="0" * 64), "its bytes are not those of the index"),
        (lambda i: i.update(tensors="0" * 64), "its bytes are not those of the index"),
        (lambda i: i["groups"][GROUP].update(runs=69), "69 runs in 71 folders"),
        (lambda i: i["groups"][GROUP].update(folders=72), "70 runs in 72 folders"),
    ],
    ids=["format", "fixture", "group", "lines", "tensors", "runs", "folders"],
)
def test_an_edited_index_is_refused(
    evidence: Path, fixture_folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], refusal: str
) -> None:
    rewrite_index(evidence, change)
    with pytest.raises(InputError, match=refusal) as refused:
        restore(fixture_folder, evidence, GROUP, tmp_path / "out")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"format": "routeblock.recorded.v1"}'])
def test_an_index_that_cannot_be_read_is_refused(
    evidence: Path, fixture_folder: Path, tmp_path: Path, data: bytes
) -> None:
    (evidence / INDEX).write_bytes(data)
    with pytest.raises(InputError, match="not readable evidence"):
        restore(fixture_folder, evidence, GROUP, tmp_path / "out")


def test_nothing_to_pack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="evidence of nothing"):
        pack_evidence([tmp_path], [], tmp_path / "evidence")
    assert not (tmp_path / "evidence").exists()
