# SPDX-License-Identifier: Apache-2.0
"""Opening a lane by its name; a lane's own imports happen only when it is opened."""

from __future__ import annotations

from routeblock.route_block.lane import Lane
from routeblock.route_block.lane_twin import TwinLane
from routeblock.route_block.operating_point import CUDA


def open_lane(name: str) -> Lane:
    """The lane of this name. Raises InputError if there is none, or if this machine cannot run it."""
    if name == CUDA:
        from routeblock.route_block.lane_cuda import open_cuda_lane

        return open_cuda_lane()
    return TwinLane(name)
