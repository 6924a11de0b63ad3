# SPDX-License-Identifier: Apache-2.0
"""Tables of launches: the selection's rule beside every launch that was read off, and what it gives on each GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from routeblock.diagnose.layer import GEMMS, Layer
from routeblock.diagnose.recorded import FILES, Recorded
from routeblock.evidence.archive import CONTENTS
from routeblock.moe.automatic_launch import FoundLaunch, automatic_launch, derived_launch
from routeblock.moe.devices import DEVICES
from routeblock.moe.kernels import kernel_for
from routeblock.moe.launches import PUBLISHED_LAYER, SELECTED
from routeblock.moe.marlin_launch import Gemm, Weights
from routeblock.moe.partition import BLOCK_SIZES
from routeblock.moe.sources import Source
from routeblock.tables import Column, Row, Table, write_sealed

# The study's vLLM commit is no release; it lies beside this one, and the registers of sm_80 are the same around it.
STUDY_RELEASE = "0.22.0"
REGISTERS = "routeblock.moe.marlin_launch"  # whose table of registers launches are derived from
_SHAPE = (Column("block_size", "count"), Column("dtype"), Column("zero_points", "flag"), Column("group_size", "count"))
RULE_COLUMNS = (
    Column("gpu"), Column("vllm"), *_SHAPE, Column("N", "count"), Column("K", "count"), Column("routes", "count"),
    Column("seen"), Column("status"), Column("source"), Column("derived"), Column("equal", "flag"),
)  # fmt: skip
DEVICE_COLUMNS = (
    Column("gpu"), Column("capability"), Column("sms", "count"), Column("sms_source"),
    Column("shared_memory_bytes", "count"), Column("blocks_per_sm_at_most", "count"), Column("kernel"), Column("gemm"),
    Column("block_size", "count"), Column("launch"), Column("status"), Column("basis"),
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """The layer and release that the launches are of; a recorded check whose launches the rule is held against too."""

    layer: Layer
    version: str
    record: Recorded | None = None


def rule_rows(asked: Asked) -> list[Row]:
    """Does the selection's rule give every launch that was read off?

    Each launch that was recorded or published, with what the rule gives there.
    """
    return [*_rule_rows(), *(_recorded_rows(asked.record) if asked.record else ())]


def _rule_rows() -> Iterator[Row]:
    for entry in SELECTED:
        if entry.status is Source.ASSUMED:
            continue
        version = STUDY_RELEASE if entry.gpu == "RTX 3090" else entry.version
        weights = Weights(entry.dtype, entry.zero_points, entry.group_size or -1)
        for n, k in PUBLISHED_LAYER if entry.n is None else ((entry.n, entry.k or 0),):
            derived = derived_launch(DEVICES[entry.gpu], version, weights, entry.block_size, Gemm(n, k, entry.routes))
            yield {
                "gpu": entry.gpu, "vllm": entry.version, "block_size": entry.block_size, "dtype": entry.dtype,
                "zero_points": entry.zero_points, "group_size": entry.group_size, "N": n, "K": k,
                "routes": entry.routes, "seen": _text(entry.launch), "status": str(entry.status),
                "source": entry.source, "derived": _text(derived.launch), "equal": derived.launch == entry.launch,
            }  # fmt: skip


def _recorded_rows(record: Recorded) -> Iterator[Row]:
    for one in record.launches():
        yield {
            "gpu": record.gpu, "vllm": record.vllm, "block_size": one.block_size, "dtype": one.weights.dtype,
            "zero_points": one.weights.zero_points, "group_size": one.weights.group_size, "N": one.gemm.n,
            "K": one.gemm.k, "routes": one.gemm.routes, "seen": "; ".join(map(_text, one.seen)),
            "status": str(Source.RECORDED), "source": "recorded after the rule was written, shapes not used for it",
            "derived": _text(one.derived.launch), "equal": one.seen == (one.derived.launch,),
        }  # fmt: skip


def device_rows(asked: Asked) -> list[Row]:
    """Which launches does each GPU take?

    At every block size, for batches that fill it; each with where it comes from.
    """
    return list(_device_rows(asked.layer, asked.version))


def _device_rows(layer: Layer, version: str) -> Iterator[Row]:
    for device in DEVICES.values():
        kernel = str(kernel_for(device, version, False, awq=layer.awq).kernel)
        for block in BLOCK_SIZES:
            for gemm in GEMMS:
                found: FoundLaunch = automatic_launch(
                    device, version, layer.weights, block, layer.gemm(gemm, block * layer.experts)
                )
                yield {
                    "gpu": device.name, "capability": device.capability, "sms": device.sms,
                    "sms_source": f"{device.source}: {device.basis}",
                    "shared_memory_bytes": device.facts.shared_memory_optin,
                    "blocks_per_sm_at_most": device.facts.blocks_per_sm, "kernel": kernel, "gemm": gemm.upper(),
                    "block_size": block, "launch": _text(found.launch), "status": str(found.source),
                    "basis": found.basis,
                }  # fmt: skip


RULE = Table(
    "launch_rule",
    rule_rows,
    RULE_COLUMNS,
    "The selection's rule against every launch that was read off",
    "`routes`: the fewest that the launch was seen with. `derived` on capability 9.0 takes registers as ptxas 13.0.88"
    " allots them; for 0.24.0 a driver was seen to allot the same.",
)
LAUNCHES = Table(
    "launches",
    device_rows,
    DEVICE_COLUMNS,
    "Launches on each GPU",
    "Marlin's launches, thread_k, thread_n, grid, for batches that fill the GPU. Where `kernel` is another, they are"
    " what Marlin would take.",
)


def write(asked: Asked, out: Path) -> bool:
    """Write both tables to `out`, sealed; returns whether the rule gives every launch that was read off."""
    found = rule_rows(asked)
    inputs = [asked.record.source / name for name in (*FILES, CONTENTS)] if asked.record else []
    write_sealed(out, RULE, found, inputs=inputs, modules=[REGISTERS])
    note = f" vLLM {asked.version}, layer {asked.layer.document()}."
    write_sealed(out, LAUNCHES, device_rows(asked), inputs=[], note=note, modules=[REGISTERS])
    return all(row["equal"] for row in found)


def _text(launch: tuple[int, int, int] | None) -> str:
    return "cannot derive" if launch is None else f"({launch[0]}, {launch[1]}), {launch[2]}"
