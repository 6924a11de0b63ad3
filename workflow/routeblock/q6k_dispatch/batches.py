# SPDX-License-Identifier: Apache-2.0
"""Raw batches, accepted and rejected, as a parquet table whose bytes depend on the values alone."""

from __future__ import annotations

from dataclasses import dataclass

from routeblock.timing.batches import BatchTable


@dataclass(frozen=True)
class Batch:
    """One timed batch, `time_us` a call. `position` counts from 0 in its repetition.

    `clock_events` is NVML's mask of clock event reasons seen before or after the repetition, `compute_processes` the
    most processes it listed; -1 stands for what could not be read. `reason` is empty when the batch was accepted.
    """

    role: str
    slots: int
    pool: int
    rows: int
    cols: int
    series: str
    side: str
    repetition: int
    attempt: int
    position: int
    direction: str
    time_us: float
    launches: int
    accepted: bool
    reason: str
    clock_events: int
    compute_processes: int
    sm_clock_mhz: int
    temperature_c: int


TABLE = BatchTable(Batch, {"side": "side", "calls": "launches"}, "record again: routeblock fast-paths record")
