# SPDX-License-Identifier: Apache-2.0
"""Running stages on a device: outputs are compared first, then series are timed by the protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from routeblock.evidence.digest import sha256_array
from routeblock.grouped_schedule import fixture as fixtures
from routeblock.grouped_schedule.campaigns import KEY, Place, Setup
from routeblock.grouped_schedule.fixture import Fixture
from routeblock.grouped_schedule.protocol import Protocol as StudyProtocol
from routeblock.grouped_schedule.schedules import BY_NAME, Arm
from routeblock.moe import q6k_dot
from routeblock.timing.batches import Row
from routeblock.timing.loop import Clocked, Device, time_stage
from routeblock.timing.plan import Stage

POISON = np.uint32(0xFFFFFFFF)  # a NaN that no dot product here gives: shows what was not written
CONTROL = "job_major"


class Backend(Device, Clocked, Protocol):
    """A device that runs arms: the CPU or one GPU."""

    place: Place

    def load(self, fixture: Fixture, setup: Setup) -> None:
        """Make `fixture` the one that runs, in the setup's mode and with its warps."""

    def output(self, arm: Arm) -> NDArray[np.float32]:
        """Run `arm` once into a buffer filled with `POISON`: float32 [slots, rows]."""

    def identity(self) -> dict[str, Any]:
        """What the times belong to: lane, device, and whatever names the machine."""

    def memory_in_use(self) -> int | None:
        """Bytes in use on the device now, None for a CPU."""


@dataclass(frozen=True)
class OutputCheck:
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
    backend: Backend, setup: Setup, fixture: Fixture, arm: Arm, control: NDArray[np.float32], rows: CheckedRows
) -> OutputCheck:
    """Run `arm` and compare all of its output."""
    out, jobs, cell = backend.output(arm), fixture.active, setup.cell
    got = out[jobs[:, None], fixture.check_rows[jobs]]
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - rows.sums)
    fraction = np.where(error == 0, 0.0, error / np.where(rows.bounds > 0, rows.bounds, np.finfo(np.float64).tiny))
    return OutputCheck(
        backend.place.lane,
        backend.place.device,
        str(setup.campaign),
        str(cell.family),
        cell.slots,
        cell.pool,
        cell.rows,
        cell.cols,
        setup.warps,
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

    stage: Stage
    fixture: dict[str, Any]
    checks: list[OutputCheck]
    rows: list[Row]


def run_stage(backend: Backend, stage: Stage, fixture: Fixture, protocol: StudyProtocol) -> Measured:
    """Compare the outputs of a stage's arms, then time its series for all repetitions."""
    setup: Setup = stage.shape
    backend.load(fixture, setup)
    rows = checked_rows(fixture)
    control = backend.output(BY_NAME[CONTROL])
    checks = [compare(backend, setup, fixture, arm, control, rows) for arm in setup.compared]
    wrong = frozenset(c.arm for c in checks if not c.holds)
    timed = list(time_stage(backend, backend, stage, protocol.acceptance, KEY, wrong))
    return Measured(stage, fixture.record(), checks, timed)


def run_stages(backend: Backend, stages: Iterable[Stage], protocol: StudyProtocol) -> Iterator[Measured]:
    """Run stages one after another; a fixture shared by neighbouring stages is made once."""
    stages = list(stages)
    made: dict[tuple[int, int, int], NDArray[np.uint8]] = {}
    fixture: Fixture | None = None
    for stage in stages:
        setup: Setup = stage.shape
        cell, key = setup.cell, _weights_of(setup)
        if fixture is None or fixture.cell != cell or fixture.seed != setup.seed:
            if key not in made:
                made.clear()  # one weight matrix at a time in host memory
                pool = max(s.shape.cell.pool for s in stages if _weights_of(s.shape) == key)
                made[key] = fixtures.weights(setup.seed, pool, cell.rows, cell.cols)
            fixture = fixtures.make(
                cell,
                setup.seed,
                sentinels=protocol.sentinels,
                checked_rows=protocol.rows_checked_per_job,
                pool_weights=made[key],
            )
        yield run_stage(backend, stage, fixture, protocol)


def _weights_of(setup: Setup) -> tuple[int, int, int]:
    return setup.seed, setup.cell.rows, setup.cell.cols
