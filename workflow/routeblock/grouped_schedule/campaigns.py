# SPDX-License-Identifier: Apache-2.0
"""What is timed: campaigns of stages. A stage is one fixture, the series compared on it, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from routeblock.grouped_schedule.arms import BY_NAME, Arm, Family
from routeblock.grouped_schedule.protocol import Cell, Protocol, Shape, cells, rotated
from routeblock.moe.q6k import Q6K_BYTES, Q6K_WEIGHTS

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


@dataclass(frozen=True)
class Series:
    """One side of a comparison: a name that is unique in its stage, and the arm that runs."""

    name: str
    arm: Arm


@dataclass(frozen=True)
class Stage:
    """Series timed together on one fixture. `order(repetition)` gives their order; `seed` makes the fixture."""

    campaign: Campaign
    cell: Cell
    series: tuple[Series, ...]
    baseline: str
    order: Callable[[int], tuple[Series, ...]]
    seed: int
    compared: tuple[Arm, ...]  # arms whose output is compared before timing
    mode: Mode
    warps: int


def _alternating(a: Series, b: Series) -> Callable[[int], tuple[Series, ...]]:
    return lambda repetition: (b, a) if repetition % 2 else (a, b)


def _rotating(series: tuple[Series, ...]) -> Callable[[int], tuple[Series, ...]]:
    return lambda repetition: rotated(series, repetition)


def _pair(
    campaign: Campaign,
    cell: Cell,
    control: Series,
    other: Series,
    seed: int,
    compared: tuple[Arm, ...],
    mode: Mode,
    w: int,
) -> Stage:
    order = _alternating(control, other)
    return Stage(campaign, cell, (control, other), control.name, order, seed, compared, mode, w)


def _floor(campaign: Campaign, cell: Cell, arm: Arm, seed: int, mode: Mode, warps: int) -> Stage:
    a, b = Series(f"{arm.name}/A", arm), Series(f"{arm.name}/B", arm)
    return _pair(campaign, cell, a, b, seed, (arm,), mode, warps)


def _arms(protocol: Protocol, family: Family) -> tuple[Arm, ...]:
    return tuple(BY_NAME[name] for name in protocol.family(family).arms)


def _independent(protocol: Protocol, shape: Shape) -> Cell:
    return Cell(Family.INDEPENDENT, shape.slots, shape.pool, protocol.rows, protocol.cols)


def _full(protocol: Protocol, campaign: Campaign, cell: Cell, mode: Mode, warps: int) -> Stage:
    arms = _arms(protocol, cell.family)
    series = tuple(Series(arm.name, arm) for arm in arms)
    baseline = protocol.family(cell.family).baseline
    return Stage(campaign, cell, series, baseline, _rotating(series), protocol.sweep.seed, arms, mode, warps)


def sweep(protocol: Protocol, mode: Mode, warps: int) -> Iterator[Stage]:
    """The sweep of one device, each shape followed by its A/A floor, and the serial prototype."""
    for cell in cells(protocol):
        yield _full(protocol, Campaign.SWEEP, cell, mode, warps)
        baseline = BY_NAME[protocol.family(cell.family).baseline]
        yield _floor(Campaign.SWEEP_FLOOR, cell, baseline, protocol.sweep.seed, mode, warps)
    plan = protocol.serial_prototype
    control, candidate = (Series(name, BY_NAME[name]) for name in (plan.control, plan.candidate))
    for shape in plan.shapes:
        cell, compared = _independent(protocol, shape), (control.arm, candidate.arm)
        yield _pair(Campaign.SERIAL_PROTOTYPE, cell, control, candidate, protocol.sweep.seed, compared, mode, warps)


def confirmation(protocol: Protocol, mode: Mode, warps: int) -> Iterator[Stage]:
    """The confirmation of one device on fresh data, each shape followed by its A/A floor."""
    plan = protocol.confirmation
    control, candidate = (Series(name, BY_NAME[name]) for name in (plan.control, plan.candidate))
    for shape in plan.shapes:
        cell = _independent(protocol, shape)
        compared = _arms(protocol, plan.family)
        yield _pair(Campaign.CONFIRMATION, cell, control, candidate, plan.seed, compared, mode, warps)
        yield _floor(Campaign.CONFIRMATION_FLOOR, cell, control.arm, plan.seed, mode, warps)


def ratio_cols(protocol: Protocol, l2_bytes: int) -> int:
    """Columns, a multiple of 256, at which pool 32 exceeds an L2 of `l2_bytes` as often as it did a V100's."""
    blocks = protocol.cols // Q6K_WEIGHTS * l2_bytes / V100_L2_BYTES
    return max(1, round(blocks)) * Q6K_WEIGHTS


def pool_bytes(cell: Cell) -> int:
    """Bytes of the weights of a cell's pool."""
    return cell.pool * cell.rows * cell.cols // Q6K_WEIGHTS * Q6K_BYTES


def beyond(protocol: Protocol, l2_bytes: int, mode: Mode, warps: int) -> Iterator[Stage]:
    """What the source did not measure, at pool 32: L2 ratio, cold L2, warps in a block, launches one by one."""
    shapes = [c for c in cells(protocol) if c.family is Family.INDEPENDENT and c.pool == 32]
    wide = [replace(c, cols=ratio_cols(protocol, l2_bytes)) for c in shapes]
    yield from (_full(protocol, Campaign.L2_RATIO, c, mode, warps) for c in wide)
    yield from (_full(protocol, Campaign.COLD_L2, c, Mode.COLD, warps) for c in shapes)
    for other in WARPS:
        if other != warps:
            yield from (_full(protocol, Campaign.WARPS, c, mode, other) for c in shapes)
    yield from (_full(protocol, Campaign.STREAM, c, Mode.STREAM, warps) for c in shapes)
