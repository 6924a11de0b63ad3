# SPDX-License-Identifier: Apache-2.0
"""The launch of both GEMMs at an operating point, and the grid of the `full_k` cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from routeblock.errors import InputError
from routeblock.moe.devices import DEVICES
from routeblock.moe.launches import Launch, selected_launch
from routeblock.moe.partition import Partition, operator_group, partition
from routeblock.moe.shared_memory import check_launch
from routeblock.moe.sources import Source
from routeblock.route_block.facts import largest_divisor

PUBLISHED = Launch(64, 128, 246)
GEMMS = ("w13", "w2")
CUDA = "cuda"


@dataclass(frozen=True)
class LaneFacts:
    """What a lane stands for: whose automatic launch, whose tensor cores, and how its results are to be called."""

    gpu: str
    architecture: str
    status: str


LANES = {
    "twin-ampere": LaneFacts("RTX 3090", "ampere", "modelled"),
    "twin-hopper": LaneFacts("H200", "hopper", "computed, by a twin that equals recorded H200 kernels"),
}


def lane_facts(lane: str) -> LaneFacts:
    """What a lane stands for; for `cuda` the GPU of this process. InputError for other names, and without a GPU."""
    if lane == CUDA:
        # By name: what a GPU is has no part in the results of the lanes on a CPU, nor its code in their digests.
        device = import_module("routeblock.cuda.device").open_device(0)
        # "NVIDIA H200" is the table's H200; "NVIDIA H200 NVL" is another GPU.
        known = [name for name in DEVICES if device.name.endswith(f" {name}")]
        return LaneFacts(known[0] if known else device.name, device.architecture or "no twin", "observed")
    check_lane(lane)
    return LANES[lane]


def check_lane(lane: str) -> None:
    """Raise InputError for a lane that does not exist."""
    if lane not in (*LANES, CUDA):
        raise InputError(
            f"lane {lane!r} is not known",
            where="lane",
            limit=f"known are {', '.join((*LANES, CUDA))}",
            way_out="choose one of them",
        )


@dataclass(frozen=True)
class OperatingPoint:
    """Launches of W13 and W2 and where each comes from."""

    name: str
    launches: Mapping[str, Launch]
    status: Mapping[str, str]


def operating_point(point: str, lane: str, spec: Mapping[str, Any]) -> OperatingPoint:
    """`published` or `auto` for a fixture (its `spec`) on a lane.

    Raises InputError for other names, for unknown launches, and for those that the operator refuses on the lane's GPU.
    """
    check_lane(lane)
    shapes = {"w13": (2 * spec["intermediate"], spec["hidden"]), "w2": (spec["hidden"], spec["intermediate"])}
    if point == "published":
        status = {"w13": Source.PUBLISHED, "w2": Source.ASSUMED}
        return _checked(OperatingPoint(point, dict.fromkeys(GEMMS, PUBLISHED), status), lane, spec, shapes)
    if point == "auto":
        gpu = lane_facts(lane).gpu
        found = {
            gemm: selected_launch(gpu, spec["block_size"], spec["dtype"], operator_group(spec["group_size"], k), n, k)
            for gemm, (n, k) in shapes.items()
        }
        launches, status = ({g: getattr(f, part) for g, f in found.items()} for part in ("launch", "status"))
        return _checked(OperatingPoint(point, launches, status), lane, spec, shapes)
    raise InputError(
        f"point {point!r} is not known", where="operating point", limit="published, auto", way_out="choose one of them"
    )


def _checked(
    point: OperatingPoint, lane: str, spec: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]]
) -> OperatingPoint:
    """`point`, unless its launches are refused on a lane that stands for one GPU: with or without zero points."""
    if lane in LANES:
        for gemm, launch in point.launches.items():
            group = operator_group(spec["group_size"], shapes[gemm][1])
            where = f"operating point {point.name}, {gemm}"
            check_launch(DEVICES[LANES[lane].gpu], launch, block_size=spec["block_size"], group_size=group, where=where)
    return point


def cut(spec: Mapping[str, Any], gemm: str, blocks: int, launch: Launch) -> Partition:
    """The partition of `w13` or `w2` of a fixture at a launch."""
    n, k = (2 * spec["intermediate"], spec["hidden"]) if gemm == "w13" else (spec["hidden"], spec["intermediate"])
    return partition(blocks, n, k, launch.thread_n, launch.thread_k, launch.grid, spec["group_size"])


def full_k_grid(spec: Mapping[str, Any], blocks: int, launch: Launch) -> int:
    """The grid of the `full_k` cell: the largest divisor of W13's tile count that is not above the native grid."""
    return largest_divisor(cut(spec, "w13", blocks, launch).tiles, launch.grid)
