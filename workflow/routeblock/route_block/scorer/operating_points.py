# SPDX-License-Identifier: Apache-2.0
"""The scorer's own list of native launches: what each operating point is on each lane, and where that is from.

Held apart from `moe.launches`, by which predictions are made; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Launch = tuple[int, int, int]

PUBLISHED: Launch = (64, 128, 246)
SUPERSEDED_GRID = 240
GPUS = {"twin-ampere": "RTX 3090", "twin-hopper": "H200"}
ARCHITECTURES = {"twin-ampere": "ampere", "twin-hopper": "hopper"}
CAPABILITIES = {"8.0": "ampere", "8.6": "ampere", "8.7": "ampere", "8.9": "ada", "9.0": "hopper"}
NO_TWIN = "no twin"
SMS = {"RTX 3090": 82, "H200": 132}


@dataclass(frozen=True)
class Selected:
    """The automatic launch of one GEMM; None stands for every value."""

    gpu: str
    block_size: int
    dtype: str
    group_size: int | None
    n: int | None
    k: int | None
    thread_k: int
    thread_n: int
    blocks_per_sm: int
    status: str


# The first that fits is taken.
AUTOMATIC = (
    Selected("RTX 3090", 8, "float16", 128, 1536, 2048, 64, 128, 3, "published"),
    Selected("RTX 3090", 8, "float16", 128, 2048, 768, 64, 128, 3, "assumed"),
    Selected("H200", 8, "float16", 32, 768, 1024, 64, 128, 4, "recorded"),
    Selected("H200", 8, "float16", 128, 1536, 2048, 128, 64, 4, "recorded"),
    Selected("H200", 8, "float16", 128, 2048, 768, 128, 64, 4, "recorded"),
    Selected("H200", 16, "float16", 128, 512, 1024, 64, 128, 3, "recorded"),
    Selected("H200", 16, "float16", 128, None, None, 64, 128, 3, "recorded"),
    Selected("H200", 32, "float16", 128, None, None, 64, 128, 2, "recorded"),
    Selected("H200", 48, "float16", 128, None, None, 64, 128, 2, "recorded"),
    Selected("H200", 64, "bfloat16", 128, 512, 1024, 64, 128, 2, "recorded"),
    Selected("RTX 3090", 8, "float16", None, None, None, 64, 128, 3, "assumed"),
    Selected("H200", 8, "float16", None, None, None, 128, 64, 4, "assumed"),
    Selected("H200", 8, "bfloat16", None, None, None, 128, 64, 4, "assumed"),
)


def gpu_of(lane: str, environment: Mapping[str, str]) -> str:
    """The GPU of a lane; of lane cuda that of the expected identity."""
    name = GPUS.get(lane, environment.get("gpu", ""))
    return next((known for known in SMS if name.endswith(f" {known}")), name)


def architecture_of(lane: str, environment: Mapping[str, str]) -> str:
    """The tensor cores of a lane; of lane cuda those of the expected identity's compute capability."""
    return ARCHITECTURES.get(lane) or CAPABILITIES.get(environment.get("compute_capability", ""), NO_TWIN)


def native_launches(
    point: str, gpu: str, block_size: int, dtype: str, group_size: int, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[Launch, str]] | None:
    """The launch of each GEMM and its status; `shapes`: (N, K). None where there is no such point, or none is known."""
    if point == "published":
        return {gemm: (PUBLISHED, "published" if gemm == "w13" else "assumed") for gemm in shapes}
    found = {}
    for gemm, (n, k) in shapes.items() if point == "auto" else ():
        group = -1 if group_size == k else group_size  # the operator counts groups: one is none
        wanted = (gpu, block_size, dtype, group, n, k)
        for entry in AUTOMATIC:
            have = (entry.gpu, entry.block_size, entry.dtype, entry.group_size, entry.n, entry.k)
            if all(h in (None, w) for h, w in zip(have, wanted, strict=True)):
                found[gemm] = ((entry.thread_k, entry.thread_n, SMS[gpu] * entry.blocks_per_sm), entry.status)
                break
    return found if found.keys() == shapes.keys() else None
