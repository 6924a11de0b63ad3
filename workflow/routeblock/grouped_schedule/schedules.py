# SPDX-License-Identifier: Apache-2.0
"""The schedules of study B as one table: how jobs are grouped and how far a band of rows reaches.

A schedule changes which work runs near which; it changes neither the dot product nor where a result goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Grouping(StrEnum):
    """How the order of jobs is made before the dot products."""

    NONE = "none"  # job slots as they come
    RANK = "rank"  # parallel rank sort by expert, stable, sentinels last
    SERIAL = "serial"  # one thread, insertion sort: the prototype kept as a negative result


class Family(StrEnum):
    """What a fixture's jobs are."""

    INDEPENDENT = "independent"  # ids drawn with replacement below the pool bound
    PAIRED = "paired"  # two tokens, each with distinct ids; matching experts may be fused


class Scope(StrEnum):
    """What a timed batch covers. Two scopes are an inference from the published counts, which fit nothing else."""

    INCLUSIVE = "inclusive"  # grouping and dot products
    COMPUTE = "compute"  # dot products alone, over an order made before


@dataclass(frozen=True)
class Arm:
    """One schedule. `band` is the number of rows in a band, 0 for full rows; `fused` if it exists for pairs only."""

    index: int
    name: str
    grouping: Grouping
    band: int
    fused: bool = False


ARMS = (
    Arm(0, "job_major", Grouping.NONE, 0),
    Arm(1, "expert_sorted", Grouping.RANK, 0),
    Arm(2, "band4", Grouping.RANK, 4),
    Arm(3, "band32", Grouping.RANK, 32),
    Arm(4, "band128", Grouping.RANK, 128),
    Arm(5, "band512", Grouping.RANK, 512),
    Arm(6, "paired_incumbent", Grouping.NONE, 0, fused=True),
    Arm(7, "serial_band32", Grouping.SERIAL, 32),
)
BY_NAME = {arm.name: arm for arm in ARMS}


def is_fused(arm: Arm, family: Family) -> bool:
    """Whether `arm` reads a weight row once for two jobs of the same expert.

    In the paired family every schedule but the control keeps the incumbent's fusion. `job_major` stays unfused there:
    the others' bits are held against it. The source does not say which it was; this is our reading.
    """
    return arm.fused or (family is Family.PAIRED and arm.grouping is not Grouping.NONE)


@dataclass(frozen=True)
class Geometry:
    """A three-dimensional walk: x tiles inside a band, y jobs, z bands; x runs fastest. No index needs a division."""

    tiles: int
    jobs: int
    bands: int
    tile_rows: int
    band_rows: int


def geometry(arm: Arm, slots: int, rows: int, tile_rows: int) -> Geometry:
    """The walk of `arm` over `slots` jobs of `rows` rows, `tile_rows` rows at a time. The last band may be short."""
    band = min(arm.band or rows, rows)
    return Geometry(-(-band // tile_rows), slots, -(-rows // band), tile_rows, band)
