# SPDX-License-Identifier: Apache-2.0
"""What a packed launch hands to the driver, read by a library that stands for it."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest

from routeblock.cuda import packed_launch
from routeblock.cuda.packed_launch import PackedLaunch, Step


class Seen(ctypes.Structure):
    _fields_ = (
        ("launch", ctypes.c_uint * 7),
        ("cluster", ctypes.c_uint * 3),
        ("attribute_count", ctypes.c_uint),
        ("attribute_id", ctypes.c_int),
        ("integers", ctypes.c_int * 8),
        ("stream", ctypes.c_ulonglong),
        ("function", ctypes.c_ulonglong),
        ("pointers", ctypes.c_ulonglong * 8),
    )


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    library = tmp_path / "driver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("fake_driver.c")], check=True)
    loaded = ctypes.PyDLL(str(library))
    ctypes.c_int.in_dll(loaded, "pointers").value = 2
    ctypes.c_int.in_dll(loaded, "integers").value = 3
    monkeypatch.setattr(packed_launch, "_driver", lambda: loaded)
    return loaded


def test_each_call_hands_over_its_own_pointers_and_integers(driver: Any) -> None:
    launch = PackedLaunch(5, [Step(0x7FFF12345678, 3, 512, 70_000)])
    for stream, values in ((0, (2**47 - 8, 0, -1, 2**31 - 1, 0)), (0x55AA00, (16, 2**46, 7, -(2**31), 5))):
        launch(stream, values)
        seen = Seen.in_dll(driver, "seen")
        assert (tuple(seen.launch), seen.attribute_count) == ((3, 1, 1, 512, 1, 1, 70_000), 0)
        assert (seen.stream, seen.function) == (stream, 0x7FFF12345678)
        assert tuple(seen.pointers)[:2] == values[:2]
        assert tuple(seen.integers)[:3] == values[2:]


def test_a_cluster_is_an_attribute_of_the_launch(driver: Any) -> None:
    PackedLaunch(5, [Step(1, 16, 1024, cluster=16)])(0, (0,) * 5)
    seen = Seen.in_dll(driver, "seen")
    # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert (seen.attribute_count, seen.attribute_id, tuple(seen.cluster)) == (1, 4, (16, 1, 1))


def test_a_refusal_of_the_driver_is_raised_with_its_number(driver: Any) -> None:
    ctypes.c_int.in_dll(driver, "status").value = 719
    with pytest.raises(RuntimeError, match="error 719"):
        PackedLaunch(5, [Step(1, 1, 32)])(0, (0,) * 5)


def test_two_kernels_take_the_same_parameters_in_order(driver: Any) -> None:
    PackedLaunch(5, [Step(1, 2, 32), Step(7, 5, 64, 16)])(3, (8, 16, 1, 2, 3))
    seen = Seen.in_dll(driver, "seen")
    assert (ctypes.c_int.in_dll(driver, "count").value, seen.function, seen.stream) == (2, 7, 3)
    assert (tuple(seen.launch), tuple(seen.integers)[:3]) == ((5, 1, 1, 64, 1, 1, 16), (1, 2, 3))
