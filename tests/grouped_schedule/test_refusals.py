# SPDX-License-Identifier: Apache-2.0
"""What cannot run is refused by the command in one line, and nothing is left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny

from routeblock import cli
from routeblock.cuda import build, launch, nvrtc
from routeblock.errors import InputError

SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "columns": ({"cols": 300}, "cols is 300; a row holds whole Q6_K blocks of 256 weights"),
    "no columns": ({"cols": 0}, "cols is 0"),
    "no rows": ({"rows": 0}, "0 rows"),
    "rows": ({"rows": 262_141}, "262,141 rows"),
}
FAMILY: dict[str, tuple[dict[str, Any], str]] = {
    "jobs": ({"slots": [65_536]}, "65,536 job slots; at most 65,535 fit a launch"),
    "experts": ({"slots": [16], "pools": [65_536]}, "a pool of 65,536 experts; 1 to 65,535 are allowed"),
    "no experts": ({"slots": [16], "pools": [0]}, "a pool of 0 experts"),
}


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line with which a command ends."""
    assert cli.main([str(a) for a in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [*SHAPES, *FAMILY])
def test_a_shape_that_no_kernel_can_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    plan = tiny.told() | {"rows": 1, "cols": 256}
    plan["families"] = plan["families"][1:]
    change, message = (SHAPES | FAMILY)[name]
    if name in SHAPES:
        plan |= change
    else:
        plan["families"][0] |= change
    (tmp_path / "p.json").write_text(json.dumps(plan))
    line = refused(
        capsys,
        "study-b",
        "sweep",
        "--device",
        "cpu0",
        "--protocol",
        tmp_path / "p.json",
        "--out",
        tmp_path / "o",
        "--threads",
        1,
    )
    assert message in line
    assert not (tmp_path / "o").exists()


def test_kernels_without_nvrtc(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "installed", lambda _=None: [])
    line = refused(capsys, "gpu", "build-kernels", "--arch", "sm_90", "--out", tmp_path / "o")
    assert "no NVRTC here compiles for sm_90" in line and "pip install" in line
    assert not (tmp_path / "o").exists()


def test_kernels_for_an_unknown_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "sm_35" in refused(capsys, "gpu", "build-kernels", "--arch", "sm_35", "--out", tmp_path / "o")


def test_a_cubin_for_another_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the driver sees it, so no device is needed to see the refusal."""
    cubin = tmp_path / "x.cubin"
    cubin.write_bytes(build.compile_kernels("sm_80").code)
    monkeypatch.setattr(launch.Gpu, "architecture", "sm_90")
    with pytest.raises(InputError, match=r"a cubin for sm_80; this device is sm_90") as e:
        launch.Gpu.load(object.__new__(launch.Gpu), cubin, ("job_major",))
    assert "\n" not in str(e.value)


def test_a_gpu_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = "gpu63"
    cubin = tmp_path / "x.cubin"
    cubin.write_bytes(build.compile_kernels("sm_80").code)
    line = refused(
        capsys,
        "study-b",
        "sweep",
        "--device",
        device,
        "--cubin",
        cubin,
        "--protocol",
        tiny.COMMITTED,
        "--out",
        tmp_path / "o",
    )
    assert "lane cuda" in line and not (tmp_path / "o").exists()


def test_a_table_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--record", tmp_path, "--statistics", tmp_path / "s.json", "--out", tmp_path / "o")
    given += ("--validation", tmp_path / "v.json")
    assert "no table is called 'medians'" in refused(capsys, "study-b", "table", "medians", *given)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_protocol_whose_seed_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    plan = tiny.told()
    plan["bootstrap"]["seed"] = seed
    (tmp_path / "p.json").write_text(json.dumps(plan))
    given = ("--device", "cpu0", "--protocol", tmp_path / "p.json", "--out", tmp_path / "o")
    assert "bootstrap.seed" in refused(capsys, "study-b", "sweep", *given)


@pytest.mark.parametrize("device", ["x", "gpu", "cpu0", "gpu-1", "gpu²"])
def test_a_device_that_the_sanitizer_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    (tmp_path / "c.cubin").write_bytes(b"x")
    given = ("--device", device, "--cubin", tmp_path / "c.cubin", "--protocol", tiny.COMMITTED, "--out", tmp_path / "o")
    assert f"device {device!r}" in refused(capsys, "study-b", "sanitize", *given)
    assert not (tmp_path / "o").exists()


def test_a_cubin_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cubin = tmp_path / "c.cubin"
    given = ("--device", "gpu0", "--cubin", cubin, "--protocol", tiny.COMMITTED, "--out", tmp_path / "o")
    assert refused(capsys, "study-b", "sanitize", *given).startswith(f"{cubin}: no such file; ")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"", b"{}"])
def test_a_protocol_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    (tmp_path / "p.json").write_bytes(content)
    given = ("--device", "cpu0", "--protocol", tmp_path / "p.json", "--out", tmp_path / "o")
    assert "not a protocol: " in refused(capsys, "study-b", "sweep", *given)


def test_a_bundle_of_a_name_that_is_not_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s").mkdir()
    Path("README.md").write_text("x")
    Path(os.fsdecode(b"s/n\xff")).write_text("x")
    assert "not UTF-8" in refused(capsys, "study-b", "bundle", "--source", "s", "--readme", "README.md", "--out", "o")
    assert not Path("o").exists()
