# SPDX-License-Identifier: Apache-2.0
"""Launches that the operator refuses for shared memory, by the rule and as recorded."""

from __future__ import annotations

import pytest

from routeblock.errors import InputError
from routeblock.moe.devices import DEVICES
from routeblock.moe.launches import SELECTED, Launch
from routeblock.moe.partition import thread_sizes
from routeblock.moe.shared_memory import check_launch
from routeblock.route_block.operating_point import operating_point

H200 = DEVICES["H200"]


@pytest.mark.parametrize(("block_size", "sizes"), [(48, (128, 64)), (64, (128, 64)), (48, (64, 256)), (64, (64, 256))])
def test_four_wide_blocks_an_sm_are_refused_in_one_line(block_size: int, sizes: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="the operator refuses it") as caught:
        check_launch(H200, Launch(*sizes, 528), block_size=block_size, group_size=128, zero_points=True, where="here")
    assert "\n" not in str(caught.value)
    check_launch(H200, Launch(*sizes, 264), block_size=block_size, group_size=128, zero_points=True, where="here")


def test_every_launch_that_a_selector_chose_fits() -> None:
    for chosen in SELECTED:
        check_launch(
            DEVICES[chosen.gpu], chosen.launch, block_size=chosen.block_size, group_size=chosen.group_size or 128,
            zero_points=True, where=chosen.source,
        )  # fmt: skip


def test_a_refusal_names_thread_sizes_that_fit() -> None:
    with pytest.raises(InputError, match=r"use thread sizes \(64, 128\)$"):
        check_launch(H200, Launch(64, 256, 528), block_size=48, group_size=128, where="here")
    assert (64, 128) in thread_sizes(48)


def test_an_operating_point_that_the_gpu_cannot_run_is_refused() -> None:
    spec = {"block_size": 64, "group_size": 128, "dtype": "float16", "intermediate": 768, "hidden": 2048}
    assert operating_point("published", "twin-hopper", spec).launches["w13"].grid == 246
    with pytest.raises(InputError, match="operating point published, w13"):
        operating_point("published", "twin-ampere", spec)
