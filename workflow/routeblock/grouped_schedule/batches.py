# SPDX-License-Identifier: Apache-2.0
"""Raw timing batches, accepted and rejected, as a parquet table that two runs write alike but for what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from routeblock.timing.batches import BatchTable


@dataclass(frozen=True)
class Batch:
    """One timed batch. `time_us` is the mean of `launches` launches; `position` counts from 0 in its repetition.

    `clock_events` is NVML's mask of clock event reasons seen before or after, `compute_processes` the most processes it
    listed; -1 stands for what could not be read. `reason` is empty when the batch was accepted.
    """

    lane: str
    device: str
    campaign: str
    family: str
    slots: int
    pool: int
    rows: int
    cols: int
    warps: int
    mode: str
    baseline: str
    series: str
    arm: str
    scope: str
    repetition: int
    position: int
    direction: str
    attempt: int
    time_us: float
    launches: int
    warmups: int
    accepted: bool
    reason: str
    clock_events: int
    compute_processes: int
    sm_clock_mhz: int
    temperature_c: int


TABLE = BatchTable(
    Batch, {"side": "arm", "clock": "scope", "calls": "launches"}, "run the sweep or the confirmation again"
)
