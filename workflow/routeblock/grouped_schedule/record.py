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
from pathlib import Path
from typing import Any

from routeblock.evidence.manifest import seal
from routeblock.grouped_schedule import measure
from routeblock.grouped_schedule.protocol import Protocol
from routeblock.grouped_schedule.study import STUDY
from routeblock.timing.batches import Row
from routeblock.timing.plan import Stage
from routeblock.timing.record import Record


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
) -> Record:
    """Run `stages` on `backend` and write the folder, sealed by `{rule}.manifest.json`.

    `inputs` are the files that were read (protocol, cubin); `modules` are those whose code records; `progress` is told
    of every stage that is done. Rejected batches are kept. The counts are not asserted here: the statistics do that.
    """
    rows: list[Row] = []
    comparisons: list[dict[str, Any]] = []
    fixtures: list[dict[str, Any]] = []
    usage = Usage(backend)
    for measured in measure.run_stages(backend, stages, protocol):
        progress(measured.stage.label)
        rows += measured.rows
        comparisons += [c.record() for c in measured.checks]
        if measured.fixture not in fixtures:
            fixtures.append(measured.fixture)
        usage.look()
    run = {
        "device": backend.identity(),
        "protocol_sha256": protocol.digest(),
        "batches": dict(Counter(map(STUDY.counted, rows))),
        "comparisons": dict(Counter(f"{c['campaign']}, {'equal' if c['holds'] else 'different'}" for c in comparisons)),
        "telemetry": usage.told(),
    }
    documents = {"comparisons": comparisons, "fixtures": fixtures, "run": run}
    batches = [STUDY.table.batch(row) for row in rows]
    STUDY.write(folder, batches, documents)
    place = backend.place
    seal(
        folder / f"{rule}.manifest.json",
        rule=rule,
        outputs=[folder / name for name in STUDY.files],
        inputs=inputs,
        parameters={"lane": place.lane, "device": place.device, "protocol_sha256": protocol.digest()},
        modules=modules,
    )
    return Record(folder, batches, documents)
