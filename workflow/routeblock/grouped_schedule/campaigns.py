# SPDX-License-Identifier: Apache-2.0
"""What is timed: campaigns of stages. A stage is one fixture, the series compared on it, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from routeblock.grouped_schedule.protocol import Cell, Protocol, Shape, cells, rotated
from routeblock.grouped_schedule.schedules import BY_NAME, Arm, Family
from routeblock.moe.q6k import Q6K_WEIGHTS
from routeblock.timing.plan import Key, Series, Stage

V100_L2_BYTES = 6 * 2**20  # Volta tuning guide: 6,144 KB
WARPS = (1, 2, 4, 8)


class Campaign(StrEnum):
    """A set of batches with one purpose; only the first two have counts in the protocol."""

    SWEEP = "sweep"
    CONFIRMATION = "confirmation"
    SWEEP_FLOOR = "sweep_floor"  # A/A: the baseline against itself at every shape of the sweep
    CONFIRMATION_FLOOR = "confirmation_floor"  # A/A beside the confirmation, same data and order
    SERIAL_PROTOTYPE = "serial_prototype"
    L2_RATIO = "l2_ratio"  # columns chosen so that the pool's weights exceed L2 as they did on a V100
    COLD_L2 = "cold_l2"  # L2 overwritten before every launch
    WARPS = "warps"  # other numbers of warps in a block
    STREAM = "stream"  # launched one by one instead of replayed from a graph


class Mode(StrEnum):
    """How a batch's launches reach the device."""

    GRAPH = "graph"  # all launches of the batch captured in one graph
    STREAM = "stream"  # launched one by one
    COLD = "cold"  # one by one, L2 overwritten before each, each clocked alone
    CALL = "call"  # a call on the CPU


# By the rule that records them.
CAMPAIGNS = {
    "sweep": (Campaign.SWEEP, Campaign.SWEEP_FLOOR, Campaign.SERIAL_PROTOTYPE),
    "confirmation": (Campaign.CONFIRMATION, Campaign.CONFIRMATION_FLOOR),
    "beyond": (Campaign.L2_RATIO, Campaign.COLD_L2, Campaign.WARPS, Campaign.STREAM),
}
KEY = ("lane", "device", "campaign", "family", "slots", "pool", "rows", "cols", "warps")


@dataclass(frozen=True)
class Place:
    """A device of a lane; `l2_bytes` is None for a CPU."""

    lane: str
    device: str
    l2_bytes: int | None


@dataclass(frozen=True)
class Setup:
    """What a stage runs: `seed` makes the fixture; the output of every arm in `compared` is compared before timing."""

    campaign: Campaign
    cell: Cell
    baseline: str
    seed: int
    compared: tuple[Arm, ...]
    mode: Mode
    warps: int


class Planner:
    """The stages of a protocol on one device."""

    def __init__(self, protocol: Protocol, place: Place) -> None:
        self.protocol, self.place = protocol, place
        cuda, cpu = protocol.timing.cuda, protocol.timing.cpu
        on_gpu = place.l2_bytes is not None
        self.mode, self.warps = (Mode(cuda.mode), cuda.warps_per_block) if on_gpu else (Mode.CALL, 0)
        self._launches, self._warmups = (
            (cuda.launches, cuda.warmups) if on_gpu else (cpu.launches, cpu.warmups_per_shape)
        )
        # A launch on the CPU clocks all scopes.
        scopes = protocol.scopes
        self._groups = tuple((scope,) for scope in scopes) if on_gpu else (scopes,)

    def stages(self, rule: str) -> Iterator[Stage]:
        """What `rule` runs; only a GPU has `beyond`."""
        return {"sweep": self.sweep, "confirmation": self.confirmation, "beyond": self.beyond}[rule]()

    def _stage(self, setup: Setup, series: tuple[Series, ...], order: Callable[[int], tuple[Series, ...]]) -> Stage:
        cell = setup.cell
        return Stage(
            key=key_of(self.place, setup),
            label=f"{setup.campaign} {cell.label}, {setup.warps} warps",
            series=series,
            families=(self._groups,),
            repetitions=self.protocol.repetitions,
            order=order,
            calls=dict.fromkeys(self.protocol.scopes, self._launches),
            labels={"mode": str(setup.mode), "baseline": setup.baseline, "warmups": self._warmups},
            whole=False,
            checked=tuple(arm.name for arm in setup.compared),
            shape=setup,
        )

    def _pair(self, setup: Setup, a: Series, b: Series) -> Stage:
        return self._stage(setup, (a, b), partial(_alternating, (a, b)))

    def _floor(self, campaign: Campaign, cell: Cell, arm: Arm, seed: int) -> Stage:
        a, b = Series(f"{arm.name}/A", arm.name), Series(f"{arm.name}/B", arm.name)
        return self._pair(Setup(campaign, cell, a.name, seed, (arm,), self.mode, self.warps), a, b)

    def _arms(self, family: Family) -> tuple[Arm, ...]:
        return tuple(BY_NAME[name] for name in self.protocol.family(family).arms)

    def _independent(self, shape: Shape) -> Cell:
        return Cell(Family.INDEPENDENT, shape.slots, shape.pool, self.protocol.rows, self.protocol.cols)

    def _full(self, campaign: Campaign, cell: Cell, mode: Mode, warps: int) -> Stage:
        arms, baseline = self._arms(cell.family), self.protocol.family(cell.family).baseline
        series = tuple(Series(arm.name, arm.name) for arm in arms)
        setup = Setup(campaign, cell, baseline, self.protocol.sweep.seed, arms, mode, warps)
        return self._stage(setup, series, partial(rotated, series))

    def sweep(self) -> Iterator[Stage]:
        """Each shape followed by its A/A floor, and the serial prototype."""
        seed = self.protocol.sweep.seed
        for cell in cells(self.protocol):
            yield self._full(Campaign.SWEEP, cell, self.mode, self.warps)
            yield self._floor(Campaign.SWEEP_FLOOR, cell, BY_NAME[self.protocol.family(cell.family).baseline], seed)
        plan = self.protocol.serial_prototype
        control, candidate = (Series(name, name) for name in (plan.control, plan.candidate))
        for shape in plan.shapes:
            cell, compared = self._independent(shape), (BY_NAME[plan.control], BY_NAME[plan.candidate])
            setup = Setup(Campaign.SERIAL_PROTOTYPE, cell, control.name, seed, compared, self.mode, self.warps)
            yield self._pair(setup, control, candidate)

    def confirmation(self) -> Iterator[Stage]:
        """Fresh data, each shape followed by its A/A floor."""
        plan = self.protocol.confirmation
        control, candidate = (Series(name, name) for name in (plan.control, plan.candidate))
        for shape in plan.shapes:
            cell, compared = self._independent(shape), self._arms(plan.family)
            setup = Setup(Campaign.CONFIRMATION, cell, control.name, plan.seed, compared, self.mode, self.warps)
            yield self._pair(setup, control, candidate)
            yield self._floor(Campaign.CONFIRMATION_FLOOR, cell, BY_NAME[plan.control], plan.seed)

    def beyond(self) -> Iterator[Stage]:
        """What the source did not measure, at pool 32: L2 ratio, cold L2, warps in a block, launches one by one."""
        shapes = [c for c in cells(self.protocol) if c.family is Family.INDEPENDENT and c.pool == 32]
        wide = [replace(c, cols=ratio_cols(self.protocol, self.place.l2_bytes or 0)) for c in shapes]
        yield from (self._full(Campaign.L2_RATIO, c, self.mode, self.warps) for c in wide)
        yield from (self._full(Campaign.COLD_L2, c, Mode.COLD, self.warps) for c in shapes)
        for other in WARPS:
            if other != self.warps:
                yield from (self._full(Campaign.WARPS, c, self.mode, other) for c in shapes)
        yield from (self._full(Campaign.STREAM, c, Mode.STREAM, self.warps) for c in shapes)


def key_of(place: Place, setup: Setup) -> Key:
    """The values of `KEY`."""
    cell = setup.cell
    shape = (str(cell.family), cell.slots, cell.pool, cell.rows, cell.cols, setup.warps)
    return (place.lane, place.device, str(setup.campaign), *shape)


def _alternating(series: tuple[Series, ...], repetition: int) -> tuple[Series, ...]:
    return series[::-1] if repetition % 2 else series


def ratio_cols(protocol: Protocol, l2_bytes: int) -> int:
    """Columns, a multiple of 256, at which pool 32 exceeds an L2 of `l2_bytes` as often as it did a V100's."""
    blocks = protocol.cols // Q6K_WEIGHTS * l2_bytes / V100_L2_BYTES
    return max(1, round(blocks)) * Q6K_WEIGHTS
