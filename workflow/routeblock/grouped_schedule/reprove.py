# SPDX-License-Identifier: Apache-2.0
"""Committed GPU evidence, proved again on this CPU: fixtures from their seeds, output bits from our own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from routeblock.evidence.archive import changed, listed
from routeblock.evidence.files import atomic_file, write_json
from routeblock.evidence.manifest import seal
from routeblock.grouped_schedule import batches as raw
from routeblock.grouped_schedule import conform, cpu, fixture, record
from routeblock.grouped_schedule.arms import BY_NAME, Family
from routeblock.grouped_schedule.fixture import Fixture
from routeblock.grouped_schedule.measure import CONTROL, POISON, output_digest
from routeblock.grouped_schedule.protocol import Cell, Protocol
from routeblock.grouped_schedule.record import Recorded


def _cell(told: dict[str, object]) -> Cell:
    numbers = [int(str(told[name])) for name in ("slots", "pool", "rows", "cols")]
    return Cell(Family(str(told["family"])), *numbers)


def _output(made: Fixture, threads: int) -> str:
    out = np.full((made.cell.slots, made.cell.rows), POISON, np.uint32).view(np.float32)
    cpu.launch(BY_NAME[CONTROL], made, out, threads)
    return output_digest(made, out)


def unsealed(source: Path, contents: Path) -> list[str]:
    """What of a record, or the kernels it names, is not what the archive of the recording machine lists in `contents`.

    Raises InputError if `contents` cannot be read.
    """
    files = changed((source / name for name in record.FILES), contents)
    wrong = [f"{path}: not the bytes that were recorded" for path in files]
    device = record.read(source).run["device"]
    cubin = f"build/{device['architecture']}/q6k_schedules.cubin"
    if device["cubin_sha256"] != listed(contents).get(cubin):
        wrong.append(f"{source}: ran a cubin that is not the recorded {cubin}")
    return wrong


def disagreements(found: Recorded, protocol: Protocol, threads: int) -> list[str]:
    """What of a record this CPU does not reproduce, one line each: fixtures, output bits, the protocol."""
    wrong = record.other_protocol([found], protocol) + conform.deviations(found, protocol)
    outputs: dict[Cell, str] = {}
    for seed in sorted({told["seed"] for told in found.fixtures}):
        mine = [told for told in found.fixtures if told["seed"] == seed]
        made = fixture.make_all(
            [_cell(told) for told in mine],
            seed,
            sentinels=protocol.sentinels,
            checked_rows=protocol.rows_checked_per_job,
        )
        for told, again in zip(mine, made, strict=True):
            if again.record() != told:
                wrong.append(f"{found.folder}: fixture {again.cell.label} is not what its seed gives")
            outputs[again.cell] = _output(again, threads)
    for comparison in found.comparisons:
        if comparison["sha256"] != outputs.get(_cell(comparison)):
            cell = _cell(comparison).label
            wrong.append(f"{found.folder}: {comparison['campaign']} {cell} {comparison['arm']} has other output bits")
    return wrong


def write(
    out: Path,
    source: Path,
    lane: str,
    protocol: Protocol,
    *,
    contents: Path,
    threads: int,
    inputs: Sequence[Path],
) -> list[str]:
    """Write the record of `source` to `out` as lane `lane`, sealed by `recorded.manifest.json`.

    Times stay as they were recorded. Returns what `unsealed` and `disagreements` find; then nothing is written.
    """
    found = record.read(source)
    wrong = unsealed(source, contents) or disagreements(found, protocol, threads)
    if wrong:
        return wrong
    run = found.run | {
        "device": found.run["device"] | {"lane": lane},
        "reproved": {"fixtures": len(found.fixtures), "outputs": len(found.comparisons)},
    }
    with atomic_file(out / record.FILES[0]) as tmp:
        raw.write(tmp, (replace(b, lane=lane) for b in found.batches))
    rest = ([c | {"lane": lane} for c in found.comparisons], found.fixtures, run)
    for name, value in zip(record.FILES[1:], rest, strict=True):
        write_json(out / name, value)
    seal(
        out / "recorded.manifest.json",
        rule="recorded",
        outputs=[out / name for name in record.FILES],
        inputs=[contents, *inputs, *(source / name for name in record.FILES)],
        parameters={"lane": lane},
        modules=[__name__],
    )
    return []
