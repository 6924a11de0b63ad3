# SPDX-License-Identifier: Apache-2.0
"""An interpreter for `-m routeblock ...` whose lane `cuda` needs no GPU: an H200 whose kernels are the twin.

Its records are observed on no GPU; it exists to drive commands and workflow. The history is told by the prelude alone,
so the alignment gives H1 another plan after it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from twin_operators import TwinOperators

from routeblock.cli import main
from routeblock.cuda import device as cuda_device
from routeblock.cuda import operators as vllm_ops
from routeblock.cuda.device import Device
from routeblock.cuda.grid_probe import KernelLaunch
from routeblock.moe.routing import align
from routeblock.route_block.runs import cuda as lane_cuda

SMS = 132


class Operators(TwinOperators):
    """The twin's operators; alignment is in ascending order, and after H1's prelude in descending order."""

    preluded = False

    def align(self, topk_ids, num_experts, block_size, *buffers):  # type: ignore[no-untyped-def]
        if self.preluded:
            super().align(topk_ids, num_experts, block_size, *buffers)
            return
        plan = align(vllm_ops.to_host(topk_ids), num_experts, block_size)
        buffers[0].fill_(plan.num_routes)
        buffers[1].fill_(-1)
        buffers[0][: plan.num_tokens_post_padded] = torch.from_numpy(np.ascontiguousarray(plan.sorted_token_ids))
        buffers[1][: plan.num_blocks] = torch.from_numpy(np.ascontiguousarray(plan.expert_ids))
        buffers[2].fill_(plan.num_tokens_post_padded)


class Probe:
    """The probe of the stand-in's own launches."""

    def __init__(self, extension: Path) -> None:
        self.path = Path(os.environ[lane_cuda.PROBE])
        self.answers = 0

    def answer(self, sms: int | None) -> None:
        """Answer `sms`, or the truth."""
        operators.answered = sms

    def take(self) -> list[KernelLaunch]:
        """Launches since the last call."""
        taken, operators.launches = operators.launches, []
        return taken


def prelude(fixture: Any) -> list[Any]:
    """H1's prelude, noted."""
    operators.preluded = True
    return real_prelude(fixture)


operators = Operators(SMS)
operators.register()
real_prelude = lane_cuda._prelude
device = Device("NVIDIA H200", "none", (9, 0), SMS, 1 << 40)
for module in (lane_cuda, cuda_device):
    module.open_device = lambda memory: device  # type: ignore[attr-defined]
lane_cuda.require_torch = lambda: None
lane_cuda.DEVICE = "cpu"
lane_cuda.GridProbe = Probe  # type: ignore[assignment,misc]
lane_cuda._prelude = prelude
lane_cuda.state = lambda uuid: {"driver": "none"}
vllm_ops._load = lambda path: None
torch.cuda.synchronize = lambda *_: None

if __name__ == "__main__":
    assert sys.argv[1:3] == ["-m", "routeblock"], "stands in for an interpreter: -m routeblock ..."
    sys.exit(main(sys.argv[3:]))
