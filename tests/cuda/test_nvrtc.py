# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled by NVRTC wheels on a machine without a GPU, sm_70 included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from routeblock.cuda import build, nvrtc
from routeblock.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
CUDA12 = nvrtc.installed(ROOT.glob(".venv-cuda12/lib/python*/site-packages"))
LIBRARIES = nvrtc.installed() + CUDA12


def test_both_environments_are_there() -> None:
    """`make test` installs envs/cuda13.txt into .venv and envs/cuda12.txt into .venv-cuda12."""
    assert [nvrtc.Nvrtc(p).version for p in LIBRARIES] == ["13.0.88", "12.8.93"]


@pytest.mark.parametrize("architecture", build.ARCHITECTURES)
def test_kernels_compile(architecture: str) -> None:
    cubin = build.compile_kernels(architecture, LIBRARIES)
    assert nvrtc.cubin_architecture(cubin.code) == architecture
    assert cubin.nvrtc == ("12.8.93" if architecture == "sm_70" else "13.0.88")
    # Only NVRTC's own farewell to old architectures may be said.
    assert not cubin.log or (architecture == "sm_70" and cubin.log.count("warning") == 1)


def test_a_cubin_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    source, *headers = (tmp_path / name for name in build.SOURCES)
    for path in (source, *headers):
        path.write_bytes(build.SOURCE.with_name(path.name).read_bytes())
    moved = nvrtc.Nvrtc(LIBRARIES[0]).compile(source, "sm_90", headers)
    assert moved.sha256 == build.compile_kernels("sm_90", LIBRARIES).sha256


def test_a_build_records_the_binary_identity(tmp_path: Path) -> None:
    build.build(tmp_path, "sm_80", libraries=LIBRARIES)
    record = json.loads((tmp_path / "build.json").read_text())["q6k_schedules"]
    cubin = build.compile_kernels("sm_80", LIBRARIES)
    assert (tmp_path / "q6k_schedules.cubin").read_bytes() == cubin.code
    assert record["sha256"] == cubin.sha256 and record["nvrtc"] == "13.0.88"
    assert set(record["sources"]) == {"cuda/q6k_schedules.cu", "cuda/q6k_dot.cuh"}


def test_cuda_13_alone_refuses_a_v100() -> None:
    with pytest.raises(InputError, match=r"no NVRTC here compiles for sm_70.*cuda12\.txt"):
        nvrtc.for_architecture("sm_70", nvrtc.installed())


def test_missing_nvrtc_is_one_line() -> None:
    with pytest.raises(InputError, match="0 found; pip install") as e:
        nvrtc.for_architecture("sm_90", [])
    assert "\n" not in str(e.value)


def test_a_file_that_is_no_nvrtc_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libnvrtc.so.13").write_bytes(b"not a library")
    with pytest.raises(InputError, match="not an NVRTC library"):
        nvrtc.Nvrtc(tmp_path / "libnvrtc.so.13")


def test_source_that_does_not_compile_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.cu").write_text('extern "C" __global__ void f() { nonsense; }\n')
    with pytest.raises(InputError, match="nonsense") as e:
        nvrtc.Nvrtc(LIBRARIES[0]).compile(tmp_path / "x.cu", "sm_90")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("data", [b"", b"\x7fELF" + bytes(60), b"x" * 100])
def test_what_is_no_cubin_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="not a cubin"):
        nvrtc.cubin_architecture(data)
