# SPDX-License-Identifier: Apache-2.0
"""Which launch the kernel's automatic selector chose, as facts: it depends on the occupancy of the compiled kernel.

Adding a launch that was read off is one entry here and one in the scorer's own list (`scorer/operating_points.py`); a
test holds the two together. `recorded` was read off a running kernel, `published` stands in the
source study, `assumed` is neither and says so wherever it is used. Where nobody read it off: automatic_launch.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from routeblock.errors import InputError
from routeblock.moe.devices import DEVICES
from routeblock.moe.sources import Source


class Launch(NamedTuple):
    """Thread sizes and grid of one GEMM launch."""

    thread_k: int
    thread_n: int
    grid: int


@dataclass(frozen=True)
class SelectedLaunch:
    """One automatic choice. `version` is vLLM's release, or a commit. `group_size`, `n` and `k` None: seen for every
    value that the source tried. `routes` are the fewest that it was seen with; with more it is the same.
    """

    gpu: str
    version: str
    block_size: int
    dtype: str
    group_size: int | None
    n: int | None
    k: int | None
    thread_k: int
    thread_n: int
    blocks_per_sm: int
    status: Source
    source: str
    zero_points: bool = True
    routes: int = 8

    @property
    def launch(self) -> Launch:
        """Thread sizes and the grid: SMs times resident blocks."""
        return Launch(self.thread_k, self.thread_n, DEVICES[self.gpu].sms * self.blocks_per_sm)


_STUDY, _H200 = "752a3a50", "0.24.0"
_LAYER = "published layer shape, E=128, k=8, M=1..512"
_CONTACT = "versions/ of the H200 evidence, published layer shape, M=21"
PUBLISHED_LAYER = ((1536, 2048), (2048, 768))  # (N, K) of W13 and W2

# The first entry that fits is taken: narrower ones stand before wider ones.
SELECTED = (
    SelectedLaunch("RTX 3090", _STUDY, 8, "float16", 128, 1536, 2048, 64, 128, 3, Source.PUBLISHED, "W13 of the study"),
    SelectedLaunch("RTX 3090", _STUDY, 8, "float16", 128, 2048, 768, 64, 128, 3, Source.ASSUMED, "as W13"),
    SelectedLaunch(
        "H200", _H200, 8, "float16", 32, 768, 1024, 64, 128, 4, Source.RECORDED, "golden b8_f16_u4_g32", True, 168
    ),
    SelectedLaunch("H200", _H200, 8, "float16", 128, 1536, 2048, 128, 64, 4, Source.RECORDED, _LAYER),
    SelectedLaunch("H200", _H200, 8, "float16", 128, 2048, 768, 128, 64, 4, Source.RECORDED, _LAYER),
    SelectedLaunch(
        "H200", _H200, 16, "float16", 128, 512, 1024, 64, 128, 3, Source.RECORDED, "golden b16_f16_u4", True, 160
    ),
    SelectedLaunch("H200", _H200, 16, "float16", 128, None, None, 64, 128, 3, Source.RECORDED, _LAYER, True, 928),
    SelectedLaunch("H200", _H200, 32, "float16", 128, None, None, 64, 128, 2, Source.RECORDED, _LAYER, True, 1848),
    SelectedLaunch("H200", _H200, 48, "float16", 128, None, None, 64, 128, 2, Source.RECORDED, _LAYER, True, 3688),
    SelectedLaunch(
        "H200", _H200, 64, "bfloat16", 128, 512, 1024, 64, 128, 2, Source.RECORDED, "golden b64_bf16_u4b8", False, 512
    ),
    SelectedLaunch("H200", "0.22.0", 8, "float16", 128, 1536, 2048, 128, 64, 4, Source.RECORDED, _CONTACT, True, 168),
    SelectedLaunch("H200", "0.22.0", 8, "float16", 128, 2048, 768, 128, 64, 4, Source.RECORDED, _CONTACT, True, 168),
    SelectedLaunch("H200", "0.33.0", 8, "float16", 128, 1536, 2048, 64, 128, 4, Source.RECORDED, _CONTACT, True, 168),
    SelectedLaunch("H200", "0.33.0", 8, "float16", 128, 2048, 768, 64, 128, 4, Source.RECORDED, _CONTACT, True, 168),
    SelectedLaunch(
        "RTX 3090", _STUDY, 8, "float16", None, None, None, 64, 128, 3, Source.ASSUMED, "as W13 of the study"
    ),
    SelectedLaunch("H200", _H200, 8, "float16", None, None, None, 128, 64, 4, Source.ASSUMED, "as the published layer"),
    SelectedLaunch("H200", _H200, 8, "bfloat16", None, None, None, 128, 64, 4, Source.ASSUMED, "as float16"),
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
