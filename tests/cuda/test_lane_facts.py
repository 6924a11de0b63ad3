# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import pytest

from routeblock.cuda import device
from routeblock.cuda.device import Device
from routeblock.route_block.operating_point import LaneFacts, lane_facts


@pytest.mark.parametrize(
    ("name", "capability", "facts"),
    [
        ("NVIDIA H200", (9, 0), LaneFacts("H200", "hopper", "observed")),
        ("NVIDIA GeForce RTX 3090", (8, 6), LaneFacts("RTX 3090", "ampere", "observed")),
        ("NVIDIA H200 NVL", (9, 0), LaneFacts("NVIDIA H200 NVL", "hopper", "observed")),
        ("NVIDIA GeForce RTX 3090 Ti", (8, 6), LaneFacts("NVIDIA GeForce RTX 3090 Ti", "ampere", "observed")),
        ("NVIDIA B200", (10, 0), LaneFacts("B200", "no twin", "observed")),
    ],
)
def test_the_cuda_lane_stands_for_the_gpu_of_this_process(
    name: str, capability: tuple[int, int], facts: LaneFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "open_device", lambda memory: Device(name, "", capability, 132, 0))
    assert lane_facts("cuda") == facts


def test_the_lane_imports_without_torch_numba_and_pandas() -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(('torch', 'numba', 'pandas', 'scipy')))\n"
    code += "from routeblock.route_block.runs import cuda, lanes, run"
    subprocess.run([sys.executable, "-c", code], check=True)
