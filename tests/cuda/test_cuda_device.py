# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from routeblock.cuda import device
from routeblock.cuda.device import Device, open_device, split_grid
from routeblock.errors import InputError


def fake_torch(*, cuda: str | None = "13.0", gpus: int = 1, major: int = 9, minor: int = 0, free: int = 1 << 37) -> Any:
    properties = SimpleNamespace(
        name="NVIDIA H200", major=major, minor=minor, multi_processor_count=132, uuid="0123", total_memory=1 << 37
    )
    return SimpleNamespace(
        __version__="2.11.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: gpus > 0,
            device_count=lambda: gpus,
            current_device=lambda: 0,
            get_device_properties=lambda index: properties,
            mem_get_info=lambda: (free, 1 << 37),
        ),
    )


def test_an_h200_is_opened_and_has_hopper_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    found = open_device(1 << 30)
    assert found == Device("NVIDIA H200", "0123", (9, 0), 132, 1 << 37)
    assert found.architecture == "hopper"


def test_a_gpu_without_a_twin_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(major=12))
    assert open_device(0).architecture is None


@pytest.mark.parametrize(
    ("torch", "line"),
    [
        (None, "torch is not installed.*envs/cuda.txt"),
        (fake_torch(cuda=None), "has no CUDA.*envs/cuda.txt"),
        (fake_torch(gpus=0), "no CUDA GPU is visible.*recorded-h200"),
        (fake_torch(major=7, minor=5), "compute capability 7.5.*Ampere, Ada or Hopper"),
        (fake_torch(free=100 << 20), "100 MiB free.*needs 1024 MiB"),
    ],
    ids=["no torch", "no CUDA", "no GPU", "too old", "too little memory"],
)
def test_what_a_machine_lacks_is_one_line_with_the_way_out(
    torch: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(InputError, match=line) as caught:
        open_device(1 << 30)
    assert "\n" not in str(caught.value)


def test_a_driver_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = fake_torch()

    def fail() -> None:
        raise RuntimeError("CUDA driver initialization failed\nmore lines")

    torch.cuda.mem_get_info = fail
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(InputError, match="does not start: CUDA driver initialization failed;"):
        open_device(0)


@pytest.mark.parametrize(
    ("grid", "sms", "split"),
    [
        (528, 132, (132, 4)),  # a multiple of the SM count needs no answer
        (396, 132, (132, 3)),
        (246, 82, (82, 3)),
        (246, 132, (123, 2)),
        (200, 132, (100, 2)),
        (400, 132, (100, 4)),
        (7, 132, (7, 1)),
    ],
)
def test_a_grid_is_split_so_that_every_block_is_resident(grid: int, sms: int, split: tuple[int, int]) -> None:
    assert split_grid(grid, sms, 4) == split
    assert split[0] * split[1] == grid
    assert split[0] <= sms


@pytest.mark.parametrize("grid", [251, 660, 532])
def test_a_grid_that_cannot_be_resident_is_refused(grid: int) -> None:
    with pytest.raises(InputError, match=f"grid {grid}"):
        split_grid(grid, 132, 4)


def test_state_is_read_from_nvidia_smi_where_nvml_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        '[ -z "$LD_PRELOAD" ] || exit 1\n'
        'case "$1" in *compute-apps*) echo "4242, 812"; echo "$PPID, 100" ;;\n'
        '*) echo "580.159.04, 1980, 3201, 0x0000000000000004, 31" ;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert device.state("0123") == {
        "source": "nvidia-smi",
        "driver": "580.159.04",
        "clocks_mhz": {"sm": 1980, "memory": 3201},
        "throttle_reasons": 4,
        "temperature_c": 31,
        "other_processes": [{"pid": 4242, "memory_bytes": 812 << 20}],
    }


def test_state_says_when_nobody_could_be_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.state("0123") == {"source": None}
