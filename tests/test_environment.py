# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from routeblock import environment
from routeblock.cli import main
from routeblock.evidence.chain import verify

ROOT = Path(__file__).resolve().parent.parent


def test_the_environment_names_every_pin_as_installed_and_is_sealed(tmp_path: Path) -> None:
    environment.write(tmp_path, ROOT / "envs" / "base.txt")
    told = json.loads((tmp_path / "environment.json").read_bytes())
    pins = [line for line in (ROOT / "envs" / "base.txt").read_text().splitlines() if "==" in line]
    assert [f"{name}=={told['packages'][name]}" for name in (p.split("==")[0] for p in pins)] == pins
    assert told["packages"]["numpy"] == version("numpy")
    assert told["python"] == platform.python_version()
    assert verify(tmp_path, sources=[ROOT / "envs"]) == []


def test_a_package_that_is_not_installed_is_null(tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("# comment\nno-such-package-here==1\n")
    assert environment.describe(pins)["packages"] == {"no-such-package-here": None}


@pytest.mark.parametrize("content", [None, b"numpy==1\n\xff"])
def test_pins_that_cannot_be_read_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    pins, out = tmp_path / "pins.txt", tmp_path / "out"
    if content is not None:
        pins.write_bytes(content)
    assert main(["workflow", "environment", "--pins", str(pins), "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{pins}: cannot be read: ") and line.endswith("; name one with --pins")
    assert not out.exists()
