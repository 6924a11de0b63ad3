# SPDX-License-Identifier: Apache-2.0
"""The committed protocol of study B: what is timed, in which order, and by which rules a batch is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_json
from routeblock.grouped_schedule.schedules import BY_NAME, Family, Scope
from routeblock.timing import protocol as timing
from routeblock.timing.protocol import Bootstrap, Seed, Strict, Whole, read

T = TypeVar("T")


class FamilyPlan(Strict):
    """One family of fixtures and the arms compared in it; changes are against `baseline`."""

    name: Family
    slots: tuple[int, ...]
    pools: tuple[int, ...]
    baseline: str
    arms: tuple[str, ...]


class Shape(Strict):
    slots: int
    pool: int


class SweepPlan(Strict):
    seed: Seed
    order: str


class ConfirmationPlan(SweepPlan):
    family: Family
    candidate: str
    control: str
    shapes: tuple[Shape, ...]


class PrototypePlan(Strict):
    candidate: str
    control: str
    shapes: tuple[Shape, ...]


class CudaTiming(Strict):
    launches: int
    warmups: int
    warps_per_block: int
    mode: Literal["graph", "stream"]


class CpuTiming(Strict):
    launches: int
    warmups_per_shape: int


class Timing(Strict):
    cuda: CudaTiming
    cpu: CpuTiming


class Acceptance(timing.Acceptance):
    """`retry_rest_ms`: how long a device rests before a rejected batch is timed again; none where it is left out."""

    retry_rest_ms: int | None = None

    @property
    def rest_s(self) -> float:
        return (self.retry_rest_ms or 0) / 1000


class Expected(Strict):
    """The counts of one device; a run that does not reach them is not a sweep or a confirmation."""

    sweep_comparisons: int
    sweep_batches: int
    confirmation_comparisons: int
    confirmation_batches: int


class Protocol(Whole):
    """The whole protocol. `minimum_effect` points at the setting: the size that matters is the user's to say."""

    name: Literal["grouped_schedule"]
    version: int
    rows: int
    cols: int
    sentinels: int
    rows_checked_per_job: int
    families: tuple[FamilyPlan, ...]
    scopes: tuple[Scope, ...]
    repetitions: int
    sweep: SweepPlan
    confirmation: ConfirmationPlan
    serial_prototype: PrototypePlan
    timing: Timing
    acceptance: Acceptance
    bootstrap: Bootstrap
    minimum_effect: str
    expected_per_device: Expected

    def digest(self) -> str:
        """SHA-256 of the canonical JSON of what the file says: what a record carries."""
        return sha256_json(self.model_dump(mode="json", exclude_unset=True))

    def family(self, name: Family) -> FamilyPlan:
        return next(f for f in self.families if f.name is name)


@dataclass(frozen=True)
class Cell:
    """One fixture's shape: family, job slots, pool bound, and the weight matrix of an expert."""

    family: Family
    slots: int
    pool: int
    rows: int
    cols: int

    @property
    def label(self) -> str:
        return f"{self.family} {self.slots}/{self.pool}, {self.rows} x {self.cols}"


def load(path: Path) -> Protocol:
    """Read a protocol. Raises InputError if it cannot be read, has unknown keys, or names an unknown arm."""
    protocol = read(path, Protocol, "grouped_schedule")
    named = {protocol.confirmation.candidate, protocol.confirmation.control, protocol.serial_prototype.candidate}
    for arm in sorted(named.union(*(f.arms for f in protocol.families))):
        if arm not in BY_NAME:
            raise InputError(
                f"no arm is called {arm!r}",
                where=str(path),
                limit=f"known arms are {', '.join(BY_NAME)}",
                way_out="name one of them",
            )
    return protocol


def cells(protocol: Protocol) -> Iterator[Cell]:
    """The shapes of the sweep, family by family."""
    for family in protocol.families:
        for slots in family.slots:
            for pool in family.pools:
                yield Cell(family.name, slots, pool, protocol.rows, protocol.cols)


def rotated(arms: tuple[T, ...], repetition: int) -> tuple[T, ...]:
    """The order of arms in one repetition of the sweep: rotated by it, and reversed if it is odd.

    Not balanced over positions (with six arms an arm sees only half of them); the source's was not either, so batches
    keep their position and a table shows it.
    """
    start = repetition % len(arms)
    order = arms[start:] + arms[:start]
    return order[::-1] if repetition % 2 else order
