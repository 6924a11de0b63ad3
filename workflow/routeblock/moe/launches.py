# SPDX-License-Identifier: Apache-2.0
"""Which launch the kernel's automatic selector chose, as facts: it depends on the occupancy of the compiled kernel.

Adding a GPU or a version is one entry. `recorded` was read off a running kernel, `published` stands in the source
study, `assumed` is neither and says so wherever it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from routeblock.errors import InputError


class Status(StrEnum):
    """Where a fact comes from."""

    RECORDED = "recorded"
    PUBLISHED = "published"
    ASSUMED = "assumed"


class Launch(NamedTuple):
    """Thread sizes and grid of one GEMM launch."""

    thread_k: int
    thread_n: int
    grid: int


@dataclass(frozen=True)
class Gpu:
    """A GPU as launches see it: SMs, the architecture of its tensor cores, bytes of shared memory that a block may opt
    in to.
    """

    name: str
    sms: int
    architecture: str
    shared_memory: int


GPUS = {g.name: g for g in (Gpu("RTX 3090", 82, "ampere", 101_376), Gpu("H200", 132, "hopper", 232_448))}


@dataclass(frozen=True)
class SelectedLaunch:
    """One automatic choice. `group_size`, `n` and `k` None: seen for every value that the source tried."""

    gpu: str
    build: str
    block_size: int
    dtype: str
    group_size: int | None
    n: int | None
    k: int | None
    thread_k: int
    thread_n: int
    blocks_per_sm: int
    status: Status
    source: str

    @property
    def launch(self) -> Launch:
        """Thread sizes and the grid: SMs times resident blocks."""
        return Launch(self.thread_k, self.thread_n, GPUS[self.gpu].sms * self.blocks_per_sm)


_STUDY, _H200 = "vLLM 752a3a50", "vLLM 0.24.0"
_LAYER = "published layer shape, E=128, k=8, M=1..512"

# The first entry that fits is taken: narrower ones stand before wider ones.
SELECTED = (
    SelectedLaunch("RTX 3090", _STUDY, 8, "float16", 128, 1536, 2048, 64, 128, 3, Status.PUBLISHED, "W13 of the study"),
    SelectedLaunch("RTX 3090", _STUDY, 8, "float16", 128, 2048, 768, 64, 128, 3, Status.ASSUMED, "as W13"),
    SelectedLaunch("H200", _H200, 8, "float16", 32, 768, 1024, 64, 128, 4, Status.RECORDED, "golden b8_f16_u4_g32"),
    SelectedLaunch("H200", _H200, 8, "float16", 128, 1536, 2048, 128, 64, 4, Status.RECORDED, _LAYER),
    SelectedLaunch("H200", _H200, 8, "float16", 128, 2048, 768, 128, 64, 4, Status.RECORDED, _LAYER),
    SelectedLaunch("H200", _H200, 16, "float16", 128, None, None, 64, 128, 3, Status.RECORDED, _LAYER),
    SelectedLaunch("H200", _H200, 32, "float16", 128, None, None, 64, 128, 2, Status.RECORDED, _LAYER),
    SelectedLaunch("H200", _H200, 48, "float16", 128, None, None, 64, 128, 2, Status.RECORDED, _LAYER),
    SelectedLaunch("H200", _H200, 64, "bfloat16", 128, 512, 1024, 64, 128, 2, Status.RECORDED, "golden b64_bf16_u4b8"),
    SelectedLaunch(
        "RTX 3090", _STUDY, 8, "float16", None, None, None, 64, 128, 3, Status.ASSUMED, "as W13 of the study"
    ),
    SelectedLaunch("H200", _H200, 8, "float16", None, None, None, 128, 64, 4, Status.ASSUMED, "as the published layer"),
    SelectedLaunch("H200", _H200, 8, "bfloat16", None, None, None, 128, 64, 4, Status.ASSUMED, "as float16"),
)


def selected_launch(gpu: str, block_size: int, dtype: str, group_size: int, n: int, k: int) -> SelectedLaunch:
    """The automatic choice on `gpu` for one GEMM; InputError if nobody has read it off and nothing stands in for it."""
    for entry in SELECTED:
        if (entry.gpu, entry.block_size, entry.dtype) != (gpu, block_size, dtype):
            continue
        if all(have in (None, want) for have, want in ((entry.group_size, group_size), (entry.n, n), (entry.k, k))):
            return entry
    raise InputError(
        f"no automatic launch is known for {gpu}, block size {block_size}, {dtype}, group {group_size}, N={n}, K={k}",
        where="moe/launches.py",
        limit="the choice depends on the compiled kernel and has to be read off",
        way_out="use the operating point `published`, or record it on that GPU and add an entry",
    )
