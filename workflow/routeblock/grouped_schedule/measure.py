# SPDX-License-Identifier: Apache-2.0
"""Running stages on a device: correctness first, then timed batches with retries by the protocol's rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from routeblock.evidence.digest import sha256_array
from routeblock.grouped_schedule import fixture as fixtures
from routeblock.grouped_schedule.arms import BY_NAME, Arm, Scope
from routeblock.grouped_schedule.batches import Batch
from routeblock.grouped_schedule.campaigns import Stage
from routeblock.grouped_schedule.fixture import Fixture
from routeblock.grouped_schedule.protocol import Protocol as StudyProtocol
from routeblock.moe import q6k_dot

POISON = np.uint32(0xFFFFFFFF)  # a NaN that no dot product here gives: shows what was not written
CONTROL = "job_major"


@dataclass(frozen=True)
class Sample:
    """One clocked batch of one scope, with what was seen of the device; `reason` is set if a rule rejects it."""

    scope: Scope
    time_us: float
    launches: int
    warmups: int
    reason: str = ""
    clock_events: int = -1
    compute_processes: int = -1
    sm_clock_mhz: int = -1
    temperature_c: int = -1


class Backend(Protocol):
    """A device that runs arms: the CPU or one GPU."""

    lane: str
    device: str

    def load(self, fixture: Fixture, stage: Stage) -> None:
        """Make `fixture` the one that runs, in the stage's mode and with its warps."""

    def output(self, arm: Arm) -> NDArray[np.float32]:
        """Run `arm` once into a buffer filled with `POISON`: float32 [slots, rows]."""

    def identity(self) -> dict[str, Any]:
        """What the times belong to: lane, device, and whatever names the machine."""

    def measure(self, arm: Arm, scopes: tuple[Scope, ...]) -> list[Sample]:
        """One batch for each scope, in that order."""

    def rest(self, seconds: float) -> None:
        """Leave the device idle for so long."""

    def memory_in_use(self) -> int | None:
        """Bytes in use on the device now, None for a CPU."""


@dataclass(frozen=True)
class Comparison:
    """One arm's output at one shape: bits against the control, and rows against two CPU references.

    `rows_exact` counts checked rows with the bits of `moe.q6k_dot.dot`; `rows_bounded` those within the rounding bound
    of the dequantised float64 sum; `worst_bound_fraction` is the largest error divided by its bound.
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
    arm: str
    equals_control: bool
    sentinels_untouched: bool
    rows_checked: int
    rows_exact: int
    rows_bounded: int
    worst_bound_fraction: float
    sha256: str

    @property
    def holds(self) -> bool:
        exact = self.rows_exact == self.rows_bounded == self.rows_checked
        return self.equals_control and self.sentinels_untouched and exact

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}


@dataclass(frozen=True)
class CheckedRows:
    """The references of a fixture's checked rows: exact bits, float64 sums and bounds, each [active, n]."""

    exact: NDArray[np.float32]
    sums: NDArray[np.float64]
    bounds: NDArray[np.float64]


def checked_rows(fixture: Fixture) -> CheckedRows:
    """Both CPU references for the rows that the fixture names."""
    jobs = fixture.active
    weights = fixture.weights[fixture.ids[jobs][:, None], fixture.check_rows[jobs]]
    activations = np.broadcast_to(
        fixture.activations[jobs][:, None], (*weights.shape[:2], *fixture.activations.shape[1:])
    )
    sums, bounds = q6k_dot.dequantized_dot(weights, activations)
    return CheckedRows(q6k_dot.dot(weights, activations), sums, bounds)


def output_digest(fixture: Fixture, out: NDArray[np.float32]) -> str:
    """SHA-256 of the rows of the active jobs, in job order: what a CPU can recompute."""
    return sha256_array(out[fixture.active])


def compare(
    backend: Backend, stage: Stage, fixture: Fixture, arm: Arm, control: NDArray[np.float32], rows: CheckedRows
) -> Comparison:
    """Run `arm` and compare all of its output."""
    out, jobs, cell = backend.output(arm), fixture.active, stage.cell
    got = out[jobs[:, None], fixture.check_rows[jobs]]
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - rows.sums)
    fraction = np.where(error == 0, 0.0, error / np.where(rows.bounds > 0, rows.bounds, np.finfo(np.float64).tiny))
    return Comparison(
        backend.lane,
        backend.device,
        str(stage.campaign),
        str(cell.family),
        cell.slots,
        cell.pool,
        cell.rows,
        cell.cols,
        stage.warps,
        arm.name,
        equals_control=bool(np.array_equal(out.view(np.uint32), control.view(np.uint32))),
        sentinels_untouched=bool((np.delete(out, jobs, axis=0).view(np.uint32) == POISON).all()),
        rows_checked=int(got.size),
        rows_exact=int((got.view(np.uint32) == rows.exact.view(np.uint32)).sum()),
        rows_bounded=int((error <= rows.bounds).sum()),
        worst_bound_fraction=float(np.max(fraction, initial=0.0)),
        sha256=output_digest(fixture, out),
    )


@dataclass(frozen=True)
class Measured:
    """What a stage leaves behind."""

    fixture: dict[str, Any]
    comparisons: list[Comparison]
    batches: list[Batch]


def run_stage(backend: Backend, stage: Stage, fixture: Fixture, protocol: StudyProtocol) -> Measured:
    """Compare the outputs of a stage's arms, then time its series for all repetitions."""
    backend.load(fixture, stage)
    rows = checked_rows(fixture)
    control = backend.output(BY_NAME[CONTROL])
    comparisons = [compare(backend, stage, fixture, arm, control, rows) for arm in stage.compared]
    wrong = {c.arm for c in comparisons if not c.holds}
    batches = [
        batch
        for repetition in range(protocol.repetitions)
        for batch in _repetition(backend, stage, protocol, repetition, wrong)
    ]
    return Measured(fixture.record(), comparisons, batches)


def _repetition(
    backend: Backend, stage: Stage, protocol: StudyProtocol, repetition: int, wrong: set[str]
) -> Iterator[Batch]:
    reverse = bool(repetition % 2)
    for position, series in enumerate(stage.order(repetition)):
        pending = protocol.scopes[::-1] if reverse else protocol.scopes
        for attempt in range(protocol.acceptance.attempts):
            if attempt and protocol.acceptance.retry_rest_ms:
                backend.rest(protocol.acceptance.retry_rest_ms / 1000)
            again: list[Scope] = []
            for sample in backend.measure(series.arm, pending):
                incorrect = series.arm.name in wrong
                reason = "incorrect" if incorrect else sample.reason
                if sample.reason and not incorrect:
                    again.append(sample.scope)
                cell = stage.cell
                yield Batch(
                    backend.lane,
                    backend.device,
                    str(stage.campaign),
                    str(cell.family),
                    cell.slots,
                    cell.pool,
                    cell.rows,
                    cell.cols,
                    stage.warps,
                    str(stage.mode),
                    stage.baseline,
                    series.name,
                    series.arm.name,
                    str(sample.scope),
                    repetition,
                    position,
                    "reversed" if reverse else "forward",
                    attempt,
                    sample.time_us,
                    sample.launches,
                    sample.warmups,
                    not reason,
                    reason,
                    sample.clock_events,
                    sample.compute_processes,
                    sample.sm_clock_mhz,
                    sample.temperature_c,
                )
            pending = tuple(again)
            if not pending:
                break


def run_stages(backend: Backend, stages: Iterable[Stage], protocol: StudyProtocol) -> Iterator[Measured]:
    """Run stages one after another; a fixture shared by neighbouring stages is made once."""
    stages = list(stages)
    made: dict[tuple[int, int, int], NDArray[np.uint8]] = {}
    fixture: Fixture | None = None
    for stage in stages:
        cell, key = stage.cell, (stage.seed, stage.cell.rows, stage.cell.cols)
        if fixture is None or fixture.cell != cell or fixture.seed != stage.seed:
            if key not in made:
                made.clear()  # one weight matrix at a time in host memory
                pool = max(s.cell.pool for s in stages if (s.seed, s.cell.rows, s.cell.cols) == key)
                made[key] = fixtures.weights(stage.seed, pool, cell.rows, cell.cols)
            fixture = fixtures.make(
                cell,
                stage.seed,
                sentinels=protocol.sentinels,
                checked_rows=protocol.rows_checked_per_job,
                pool_weights=made[key],
            )
        yield run_stage(backend, stage, fixture, protocol)
