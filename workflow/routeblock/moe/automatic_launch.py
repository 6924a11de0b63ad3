# SPDX-License-Identifier: Apache-2.0
"""The automatic launch of any release on any GPU: read off where it was, else derived by the selection's rule."""

from __future__ import annotations

from dataclasses import dataclass

from routeblock.moe.devices import Device
from routeblock.moe.launches import PUBLISHED_LAYER, SELECTED, Launch, SelectedLaunch
from routeblock.moe.marlin_launch import Gemm, Weights, registers_for, select
from routeblock.moe.partition import operator_group
from routeblock.moe.sources import Source


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
        and operator_group(entry.group_size or -1, gemm.k) == operator_group(weights.group_size, gemm.k)
        and (gemm.n, gemm.k) in shapes
        and gemm.routes >= entry.routes
    )
