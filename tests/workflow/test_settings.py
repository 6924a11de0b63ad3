# SPDX-License-Identifier: Apache-2.0
"""A config.yaml that cannot be used ends the workflow with one line and 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import Checkout


@pytest.mark.parametrize("content", ["", "- 1\n", "fixture: [\n", "repeated", "folder", "gone"])
def test_settings_that_cannot_be_used_are_one_line(tmp_path: Path, content: str) -> None:
    checkout = Checkout.fresh(tmp_path)
    file = tmp_path / "config.yaml"
    if content == "repeated":
        file.write_text(file.read_text() + "replicates: 5\n")
    else:
        file.unlink()
        if content == "folder":
            file.mkdir()
        elif content != "gone":
            file.write_text(content)
    done = checkout.command("snakemake", "--cores", "1", "--dry-run")
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    assert done.stderr.startswith("config.yaml") and done.stderr.count("\n") == 1
