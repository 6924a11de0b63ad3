# SPDX-License-Identifier: Apache-2.0
"""Committed GPU evidence, verified on this CPU: fixtures from their seeds, output bits from our own arithmetic."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.evidence.archive import listed
from routeblock.evidence.manifest import seal
from routeblock.grouped_schedule import cpu, fixture
from routeblock.grouped_schedule.fixture import Fixture
from routeblock.grouped_schedule.measure import POISON, output_digest
from routeblock.grouped_schedule.protocol import Cell, Protocol
from routeblock.grouped_schedule.schedules import BY_NAME, Family
from routeblock.grouped_schedule.study import CONTROL, STUDY, stages
from routeblock.timing import verification
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import Record


def _cell(told: dict[str, Any]) -> Cell:
    numbers = [int(str(told[name])) for name in ("slots", "pool", "rows", "cols")]
    return Cell(Family(str(told["family"])), *numbers)


def _output(made: Fixture, threads: int) -> str:
    out = np.full((made.cell.slots, made.cell.rows), POISON, np.uint32).view(np.float32)
    cpu.launch(BY_NAME[CONTROL], made, out, threads)
    return output_digest(made, out)


@cache
def _made(
    cells: tuple[Cell, ...], seed: int, sentinels: int, checked_rows: int, threads: int
) -> dict[Cell, tuple[dict[str, Any], str]]:
    """The facts of each fixture and the digest of its outputs."""
    every = fixture.make_all(list(cells), seed, sentinels=sentinels, checked_rows=checked_rows)
    return {made.cell: (made.record(), _output(made, threads)) for made in every}


def recompute(record: Record, protocol: Protocol, *, threads: int) -> list[Finding]:
    """What of a record this CPU does not reproduce: fixtures from the protocol's seeds, and output bits."""
    seeds = {stage.shape.cell: stage.shape.seed for stage in stages(protocol, record)}
    told = {_cell(f): f for f in record.documents["fixtures"]}
    wrong, outputs = [], dict[Cell, str]()
    for seed in sorted(set(seeds.values())):
        mine = tuple(cell for cell, its in seeds.items() if its == seed and told.get(cell, {}).get("seed") == seed)
        made = _made(mine, seed, protocol.sentinels, protocol.rows_checked_per_job, threads)
        outputs |= {cell: output for cell, (_, output) in made.items()}
        wrong += [cell for cell in mine if made[cell][0] != told[cell]]
    wrong += [cell for cell in seeds if cell not in outputs]
    wrong += [cell for cell in told if cell not in seeds]
    found = [Finding("fixtures.json", Reason.PLANS, f"{c.label} is not what the protocol's seed gives") for c in wrong]
    for i, check in enumerate(record.documents["comparisons"]):
        cell = _cell(check)
        if cell in outputs and check["sha256"] != outputs[cell]:
            detail = f"{check['campaign']} {cell.label} has other output bits"
            found.append(Finding(f"output check {i} ({check['arm']})", Reason.PLANS, detail))
    return found


def other_cubin(record: Record, contents: Path) -> list[Finding]:
    """Whether the kernels that ran are not those that the archive of the recording machine lists in `contents`."""
    device = record.run["device"]
    cubin = f"build/{device['architecture']}/q6k_schedules.cubin"
    if device["cubin_sha256"] == listed(contents).get(cubin):
        return []
    return [Finding(str(record.folder), Reason.KERNELS, f"ran a cubin that is not the recorded {cubin}")]


def write(out: Path, source: Path, lane: str, protocol: Path, *, contents: Path, threads: int) -> list[Finding]:
    """Write the record of `source` to `out` as lane `lane`, sealed by `recorded.manifest.json`.

    Times stay as they were recorded. If anything is found, it is returned and nothing is written.
    """
    again = partial(recompute, threads=threads)
    record, wrong = verification.verify(STUDY, source, protocol, again, contents)
    wrong = wrong or other_cubin(record, contents)
    if wrong:
        return wrong
    told = record.documents
    run = record.run | {
        "device": record.run["device"] | {"lane": lane},
        "reproved": {"fixtures": len(told["fixtures"]), "outputs": len(told["comparisons"])},
    }
    comparisons = [c | {"lane": lane} for c in told["comparisons"]]
    batches = [replace(b, lane=lane) for b in record.batches]
    STUDY.write(out, batches, {"comparisons": comparisons, "fixtures": told["fixtures"], "run": run})
    seal(
        out / "recorded.manifest.json",
        rule="recorded",
        outputs=[out / name for name in STUDY.files],
        inputs=[contents, protocol, *(source / name for name in STUDY.files)],
        parameters={"lane": lane},
        modules=[__name__],
    )
    return []
