# SPDX-License-Identifier: Apache-2.0
"""Launches of the fast paths follow from sizes alone, fit the GPU, and cover every row of every expert."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from routeblock.cuda.q6k_dispatch import SOURCE, compile_for
from routeblock.cuda.q6k_plan import (
    ACTIVATION_BYTES,
    ACTIVATION_STRIDE,
    CAPACITIES,
    HEADER_BYTES,
    SHARED_BYTES,
    Products,
    Sizes,
    plan,
    tuned,
)
from routeblock.errors import InputError

SIZES = [
    Sizes(slots, experts, 8, rows, cols)
    for slots in (8, 64, 256, 4096)
    for experts in (8, 60, 256)
    for rows, cols in ((2048, 512), (768, 2048), (1408, 4096), (17, 768), (5, 256))
]


@pytest.mark.parametrize("architecture", ["sm_75", "sm_86", "sm_90"])
def test_every_launch_fits_and_covers_all_rows(architecture: str) -> None:
    for sizes in SIZES:
        if architecture == "sm_75" and sizes.cols == 4096:
            continue  # refused: 16 rows do not fit beside the activations
        for path in Products:
            launch = plan(sizes, tuned(sizes, 132), path, architecture=architecture)
            assert launch.shared_bytes <= SHARED_BYTES[architecture] * 1024
            assert launch.tile_rows % 16 == 0 and launch.capacity in CAPACITIES
            covered = launch.slabs * launch.tiles * launch.tile_rows
            assert sizes.rows <= covered < sizes.rows + launch.tiles * launch.tile_rows
            assert launch.grid == launch.slabs * min(sizes.slots, sizes.experts)


def test_constants_are_the_kernels() -> None:
    source = SOURCE.read_text()
    for name, value in (
        ("kActivationBytes", ACTIVATION_BYTES),
        ("kActivationStride", ACTIVATION_STRIDE),
        ("kHeaderBytes", HEADER_BYTES),
    ):
        assert re.search(rf"constexpr int {name} = {value};", source)
    most = re.search(r"kMostCapacity = (\d+);", source)
    assert most and max(CAPACITIES) <= int(most[1])


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((7, 4, 2, 16, 512), "slots are tokens times top_k"),
        ((8, 4, 2, 16, 500), "a multiple of 256"),
        ((0, 4, 1, 16, 512), "0 job slots"),
        ((8, 70_000, 1, 16, 512), "70,000 experts"),
        ((8, 4, 1, 0, 512), "0 rows"),
    ],
)
def test_sizes_that_the_kernels_cannot_run_are_refused(sizes: tuple[int, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Sizes(*sizes)


def test_columns_beyond_shared_memory_and_unknown_gpus_are_refused() -> None:
    wide = Sizes(8, 8, 8, 16, 256 * 200)
    with pytest.raises(InputError, match="shared memory are needed"):
        plan(wide, tuned(wide, 132))
    with pytest.raises(InputError, match="sm_30"):
        plan(SIZES[0], tuned(SIZES[0], 132), architecture="sm_30")


def test_the_tensor_core_form_of_turing_compiles() -> None:
    """sm_90 is compiled beside the recorded binary's identity."""
    cubin = compile_for("sm_75")
    assert b"dispatch_even" in cubin.code and not cubin.log


def test_the_dp4a_form_of_volta_compiles() -> None:
    from routeblock.cuda import nvrtc

    root = Path(__file__).resolve().parents[2]
    libraries = nvrtc.installed(root.glob(".venv-cuda12/lib/python*/site-packages"))
    assert libraries, "make test installs envs/cuda12.txt into .venv-cuda12"
    headers = (SOURCE.with_name("q6k_machine.cuh"),)
    cubin = nvrtc.for_architecture("sm_70", libraries).compile(SOURCE, "sm_70", headers)
    assert b"dispatch_even" in cubin.code
