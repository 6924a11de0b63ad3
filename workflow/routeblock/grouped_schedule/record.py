# SPDX-License-Identifier: Apache-2.0
"""A device's sweep, confirmation or further campaigns as a sealed folder.

`fixtures.json` and `comparisons.json` follow from seed and code alone; `batches.parquet` and `run.json` hold what was
measured and on what.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock.evidence.files import atomic_file, write_json
from routeblock.evidence.gpu_record import documents
from routeblock.evidence.manifest import seal
from routeblock.grouped_schedule import batches as raw
from routeblock.grouped_schedule import measure
from routeblock.grouped_schedule.campaigns import Campaign, Stage
from routeblock.grouped_schedule.protocol import Expected, Protocol

FILES = ("batches.parquet", "comparisons.json", "fixtures.json", "run.json")


@dataclass(frozen=True)
class Recorded:
    """The contents of one such folder."""

    folder: Path
    batches: list[raw.Batch]
    comparisons: list[dict[str, Any]]
    fixtures: list[dict[str, Any]]
    run: dict[str, Any]


class Usage:
    """What a run takes: wall and CPU seconds, peaks of host and device memory in bytes; the host's load before."""

    def __init__(self, backend: measure.Backend) -> None:
        self._backend = backend
        self._load = os.getloadavg()[0]
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._device = backend.memory_in_use()

    def look(self) -> None:
        """Note the device's memory; a stage's buffers are still there when it ends."""
        now = self._backend.memory_in_use()
        if now is not None:
            self._device = max(now, self._device or 0)

    def told(self) -> dict[str, Any]:
        """For JSON. The host's peak is the whole process's, the device's everything in use on it, context included."""
        return {
            "seconds": round(time.perf_counter() - self._wall, 3),
            "cpu_seconds": round(time.process_time() - self._cpu, 3),
            "load_before": round(self._load, 2),
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "device_peak_bytes": self._device,
        }


def write(
    folder: Path,
    backend: measure.Backend,
    stages: Iterable[Stage],
    protocol: Protocol,
    *,
    rule: str,
    inputs: Iterable[Path],
    modules: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
) -> Recorded:
    """Run `stages` on `backend` and write the folder, sealed by `{rule}.manifest.json`.

    `inputs` are the files that were read (protocol, cubin); `modules` go into the seal; `progress` gets a line for
    every stage that is done. Rejected batches are kept. The counts are not asserted here: `missing_counts` does that
    on what was written.
    """
    batches: list[raw.Batch] = []
    comparisons: list[dict[str, Any]] = []
    fixtures: list[dict[str, Any]] = []
    usage = Usage(backend)
    for measured in measure.run_stages(backend, stages, protocol):
        first = measured.batches[0]
        progress(
            f"{first.campaign}: {first.family} {first.slots}/{first.pool}, {first.cols} columns, {first.warps} warps"
        )
        batches += measured.batches
        comparisons += [c.record() for c in measured.comparisons]
        if measured.fixture not in fixtures:
            fixtures.append(measured.fixture)
        usage.look()
    run = {
        "device": backend.identity(),
        "protocol_sha256": protocol.digest(),
        "batches": dict(Counter(f"{b.campaign}, {b.reason or 'accepted'}" for b in batches)),
        "comparisons": dict(Counter(f"{c['campaign']}, {'equal' if c['holds'] else 'different'}" for c in comparisons)),
        "telemetry": usage.told(),
    }
    with atomic_file(folder / FILES[0]) as tmp:
        raw.write(tmp, batches)
    for name, value in zip(FILES[1:], (comparisons, fixtures, run), strict=True):
        write_json(folder / name, value)
    seal(
        folder / f"{rule}.manifest.json",
        rule=rule,
        outputs=[folder / name for name in FILES],
        inputs=inputs,
        parameters={"lane": backend.lane, "device": backend.device, "protocol_sha256": protocol.digest()},
        modules=modules,
    )
    return Recorded(folder, batches, comparisons, fixtures, run)


def read(folder: Path) -> Recorded:
    """Read such a folder. Raises InputError if a file is missing or malformed."""
    rest = documents(folder, FILES, "run the sweep or the confirmation again")
    return Recorded(folder, raw.read([folder / FILES[0]]), *rest)


def missing_counts(found: Iterable[Recorded], expected: Expected) -> list[str]:
    """What each device lacks of the protocol's counts, one line each; none if all are reached exactly."""
    batches: Counter[tuple[str, str, str]] = Counter()
    comparisons: Counter[tuple[str, str, str]] = Counter()
    devices: set[tuple[str, str]] = set()
    for record in found:
        device = (record.run["device"]["lane"], record.run["device"]["device"])
        devices.add(device)
        batches.update((*device, b.campaign) for b in record.batches if b.accepted)
        comparisons.update((*device, c["campaign"]) for c in record.comparisons if c["holds"])
    wanted = (
        (Campaign.SWEEP, "equal outputs", comparisons, expected.sweep_comparisons),
        (Campaign.SWEEP, "accepted batches", batches, expected.sweep_batches),
        (Campaign.CONFIRMATION, "equal outputs", comparisons, expected.confirmation_comparisons),
        (Campaign.CONFIRMATION, "accepted batches", batches, expected.confirmation_batches),
    )
    return [
        f"{lane}/{device}: {campaign} has {counts[lane, device, campaign]} {what}, the protocol asks for {n}"
        for lane, device in sorted(devices)
        for campaign, what, counts, n in wanted
        if counts[lane, device, campaign] != n
    ]


def other_protocol(found: Iterable[Recorded], protocol: Protocol) -> list[str]:
    """The records measured under another protocol, one line each."""
    return [f"{r.folder}: {line}" for r in found for line in protocol.unlike(r.run["protocol_sha256"])]
