# SPDX-License-Identifier: Apache-2.0
"""Opening a lane by its name; a lane's own imports happen only when it is opened."""

from __future__ import annotations

from routeblock.route_block.operating_point import CUDA
from routeblock.route_block.runs.lane import Lane
from routeblock.route_block.runs.twin import TwinLane


def open_lane(name: str) -> Lane:
    """The lane of this name. Raises InputError if there is none, or if this machine cannot run it."""
    if name == CUDA:
        from routeblock.route_block.runs.cuda import open_cuda_lane

        return open_cuda_lane()
    return TwinLane(name)
