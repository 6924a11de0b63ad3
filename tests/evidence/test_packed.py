# SPDX-License-Identifier: Apache-2.0
"""Folders as lines and back, bit for bit; a line that says anything else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, sha256_array
from routeblock.evidence.packed import Line, Tensors, pack, read_lines, unpack, write_lines
from routeblock.evidence.tensors import save_tensors


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "results"
    for n in (1, 2):
        folder = root / "native" / "H0" / f"rep{n}"
        folder.mkdir(parents=True)
        (folder / "record.json").write_bytes(canonical_json({"replicate": n, "text": "µ"}))
        save_tensors(folder / "t.safetensors", {"final": np.arange(6, dtype=np.float16), "n": np.array([n], np.int32)})
    (root / "prediction.json").write_bytes(canonical_json({"arms": []}))
    return root


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def packed(root: Path) -> tuple[list[Line], Tensors]:
    tensors: Tensors = {}
    return list(pack(root, [p for p in root.rglob("*") if p.is_file()], tensors)), tensors


def test_folders_come_back_in_every_byte(root: Path, tmp_path: Path) -> None:
    lines, tensors = packed(root)
    write_lines(tmp_path / "lines.jsonl", lines)
    for line in read_lines(tmp_path / "lines.jsonl"):
        unpack(line, tensors, tmp_path / "again", where="here")
    assert files(tmp_path / "again") == files(root)


def test_a_tensor_that_comes_twice_is_kept_once(root: Path) -> None:
    lines, tensors = packed(root)
    assert [line["folder"] for line in lines] == [".", "native/H0/rep1", "native/H0/rep2"]
    assert len(tensors) == 3


@pytest.mark.parametrize("text", [b'{"a": 1}', b"not JSON", b'{"b":1,"a":2}'])
def test_a_file_that_could_not_be_rebuilt_is_not_packed(root: Path, text: bytes) -> None:
    (root / "prediction.json").write_bytes(text)
    with pytest.raises(InputError, match=r"prediction.json.*canonical JSON"):
        packed(root)


def test_an_edited_document_is_refused_and_leaves_nothing(root: Path, tmp_path: Path) -> None:
    lines, tensors = packed(root)
    lines[0]["documents"]["prediction.json"]["arms"] = [1]
    with pytest.raises(InputError, match=r"prediction.json is rebuilt to other bytes"):
        unpack(lines[0], tensors, tmp_path / "again", where="here")
    assert not files(tmp_path / "again")


def test_another_tensor_than_the_packed_one_is_refused(root: Path, tmp_path: Path) -> None:
    lines, tensors = packed(root)
    digest = sha256_array(np.arange(6, dtype=np.float16))
    changed = tensors[digest].copy()
    changed.view(np.uint16)[0] ^= 1
    with pytest.raises(InputError, match=r"t.safetensors is rebuilt to other bytes"):
        unpack(lines[1], {**tensors, digest: changed}, tmp_path / "again", where="here")
    del tensors[digest]
    with pytest.raises(InputError, match=f"no tensor {digest[:16]}"):
        unpack(lines[1], tensors, tmp_path / "again", where="here")


@pytest.mark.parametrize("folder", ["../x", "/x", "a/../b", "", "a//b", "a/.hidden"])
def test_a_line_stays_inside_its_folder(root: Path, tmp_path: Path, folder: str) -> None:
    lines, tensors = packed(root)
    with pytest.raises(InputError, match="paths stay inside the folder"):
        unpack({**lines[0], "folder": folder}, tensors, tmp_path / "again", where="here")
    with pytest.raises(InputError, match="paths stay inside the folder"):
        unpack({**lines[0], "sha256": {f"{folder}/x": "0"}}, tensors, tmp_path / "again", where="here")


@pytest.mark.parametrize(
    "text",
    [
        b'{"folder": "."}\n',
        b"[]\n",
        b"{\n",
        canonical_json({"folder": ".", "documents": {}, "tensors": {}, "sha256": {"x": "0"}}) + b"\n",
        canonical_json({"folder": ".", "documents": {}, "tensors": {}, "sha256": {}, "more": 1}) + b"\n",
        canonical_json({"folder": ".", "documents": {}, "tensors": {}, "sha256": {}}),
    ],
    ids=["spaces", "list", "no JSON", "a file that it does not hold", "another key", "no last newline"],
)
def test_lines_of_another_form_are_refused(tmp_path: Path, text: Any) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(text)
    with pytest.raises(InputError, match=r"lines.jsonl: not readable: .*one a folder"):
        read_lines(path)
