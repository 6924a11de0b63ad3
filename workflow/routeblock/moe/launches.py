# SPDX-License-Identifier: Apache-2.0
"""Which launch the kernel's automatic selector chose, as facts, and where nobody recorded it as its rule gives it.

Adding a GPU is one entry in devices.py, adding a launch that was read off is one here. `recorded` was read off a
running kernel, `published` stands in the source study, `derived` is computed by marlin_launch.py, `assumed` is none of
these and says so wherever it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from routeblock.errors import InputError
from routeblock.moe.devices import DEVICES, Device
from routeblock.moe.marlin_launch import Gemm, Weights, effective_group, registers_for, select
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


@dataclass(frozen=True)
class FoundLaunch:
    """The automatic launch of one GEMM, where it is from, on what that rests; `launch` None: it cannot be derived."""

    launch: Launch | None
    source: Source
    basis: str


def automatic_launch(device: Device, version: str, weights: Weights, block_size: int, gemm: Gemm) -> FoundLaunch:
    """The launch that vLLM `version` takes on `device`: read off or published where it was, else by the rule."""
    for entry in SELECTED:
        if entry.status is not Source.ASSUMED and _is_for(entry, device, version, weights, block_size, gemm):
            return FoundLaunch(entry.launch, entry.status, entry.source)
    return derived_launch(device, version, weights, block_size, gemm)


def derived_launch(device: Device, version: str, weights: Weights, block_size: int, gemm: Gemm) -> FoundLaunch:
    """The launch that the selection's rule gives."""
    found = registers_for(device.facts.kernel_target, version)
    if found is None:
        target = device.facts.kernel_target
        basis = f"cannot derive: nobody read the registers of {target} kernels of vLLM {version}"
        return FoundLaunch(None, Source.DERIVED, basis)
    table, source, basis = found
    chosen = select(device, table, weights, block_size, gemm)
    if chosen is None:
        return FoundLaunch(None, source, "the operator has no kernel for this shape")
    launch = Launch(chosen.thread_k, chosen.thread_n, device.sms * chosen.blocks_per_sm)
    return FoundLaunch(launch, source, f"the selection's rule; registers: {basis}")


def _is_for(entry: SelectedLaunch, device: Device, version: str, weights: Weights, block_size: int, gemm: Gemm) -> bool:
    shapes = PUBLISHED_LAYER if entry.n is None else ((entry.n, entry.k),)
    return (
        (entry.gpu, entry.version, entry.block_size, entry.dtype) == (device.name, version, block_size, weights.dtype)
        and entry.zero_points == weights.zero_points
        and effective_group(entry.group_size or -1, gemm.k) == effective_group(weights.group_size, gemm.k)
        and (gemm.n, gemm.k) in shapes
        and gemm.routes >= entry.routes
    )
