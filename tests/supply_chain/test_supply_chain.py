# SPDX-License-Identifier: Apache-2.0
"""What is installed is pinned with digests, licences are listed, and every source file states its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from licences import LOCK, PAGE, page, pins

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {
    "base.txt": ["base.txt"],
    "dev.txt": ["base.txt", "dev.txt", "cuda13.txt", "slurm.txt"],
    "cuda12.txt": ["cuda12.txt"],
}
FOLDERS = (".ci", "bench", "tests", "workflow")
TOP = ("Makefile", "Snakefile", "config.yaml", "pyproject.toml")
NO_COMMENTS = {".md", ".json", ".rst", ".safetensors", ".npz", ".parquet", ".typed", ".txt"}
MADE = re.compile(r"__pycache__|\.egg-info/|\.snakemake/|\.hypothesis/")  # by running what is here


def _name(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_file_pins_what_the_lists_ask_for_and_every_line_has_digests(lock: str) -> None:
    text = (ROOT / "envs" / "lock" / lock).read_text()
    asked = {}
    for source in LOCKS[lock]:
        lines = (ROOT / "envs" / source).read_text().splitlines()
        asked |= dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {_name(name): version for name, (version, _) in pins(ROOT / "envs" / "lock" / lock).items()}
    assert {_name(n): v for n, v in asked.items()}.items() <= pinned.items()
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(pinned)
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry) for entry in entries)
    assert "http" not in re.sub(r"^[\w.-]+==.*$", "", text, flags=re.MULTILINE)  # no index is named


def test_lock_files_agree() -> None:
    base, dev = (
        {name: version for name, (version, _) in pins(ROOT / "envs" / "lock" / lock).items()}
        for lock in ("base.txt", "dev.txt")
    )
    assert base.items() <= dev.items()


def test_the_page_of_licences_is_that_of_the_lock_file() -> None:
    listed = re.findall(r"^\| ([\w.-]+) \| (\S+) \|", PAGE.read_text(), re.MULTILINE)[1:]
    assert dict(listed) == {name: version for name, (version, _) in pins(LOCK).items()}
    assert "not stated" not in PAGE.read_text()
    assert PAGE.read_text() == page()


def test_every_source_file_states_its_licence() -> None:
    found = [*(ROOT / name for name in TOP), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*"))]
    sources = [
        f
        for f in found
        if f.is_file() and f.suffix not in NO_COMMENTS and not MADE.search(f.relative_to(ROOT).as_posix())
    ]
    assert len(sources) > 300
    assert [f for f in sources if "SPDX-License-Identifier: Apache-2.0" not in f.read_text()[:400]] == []
