# SPDX-License-Identifier: Apache-2.0
"""Timing by the protocol: correctness first, then repetitions in its order, accepted or rejected by its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from routeblock.cuda.telemetry import State, rejection, seen
from routeblock.protocols import ordered
from routeblock.q6k_dispatch.batches import Batch
from routeblock.q6k_dispatch.protocol import Protocol, Reason, Series, Shape, Side, shapes


@dataclass
class Measured:
    """What is there so far."""

    batches: list[Batch] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)


def run(rig: Any, protocol: Protocol, measured: Measured, progress: Callable[[str], None] = lambda _: None) -> None:
    """Measure every shape on `rig` (see `rig.Rig`) into `measured`."""
    # Shapes of one matrix together: its weights are made once.
    every = sorted(shapes(protocol), key=lambda s: (s.rows, s.cols, -s.pool))
    for shape in every:
        session = rig.open(shape)
        checked = session.check()
        measured.checks.append(
            {
                "role": str(shape.role),
                "slots": shape.slots,
                "pool": shape.pool,
                "rows": shape.rows,
                "cols": shape.cols,
                "plan": asdict(session.plans[Side.AUTO]),
                "wrong": sorted(checked.wrong),
                **session.jobs.facts(),
                **checked.facts,
            }
        )
        measured.batches += _shape(rig, session, shape, protocol, checked.wrong)
        session.close()
        progress(shape.label)


def _shape(rig: Any, session: Any, shape: Shape, protocol: Protocol, wrong: frozenset[Side]) -> Iterator[Batch]:
    rules, there = protocol.acceptance, rig.sides()
    series = tuple(s for s in protocol.series if s.side in there)
    for each in series:
        session.warm_up(each)
    before = rig.nvml.state()
    for repetition in range(protocol.repetitions):
        order = ordered(series, repetition)
        for attempt in range(rules.attempts):
            times = [session.measure(each) for each in order]
            after = rig.nvml.state()
            state, before = seen(before, after), after
            reason = Reason.INCORRECT if wrong else rejection(state, rules.throttle_reasons)
            yield from _batches(shape, protocol, order, times, repetition, attempt, state, reason)
            if reason in ("", Reason.INCORRECT):
                break
            rig.pause(rules.pause_ms / 1000)
            before = rig.nvml.state()


def _batches(
    shape: Shape,
    protocol: Protocol,
    order: tuple[Series, ...],
    times: list[float],
    repetition: int,
    attempt: int,
    state: State,
    reason: str,
) -> Iterator[Batch]:
    for position, (series, time_us) in enumerate(zip(order, times, strict=True)):
        yield Batch(
            str(shape.role),
            shape.slots,
            shape.pool,
            shape.rows,
            shape.cols,
            series.name,
            str(series.side),
            repetition,
            attempt,
            position,
            "reversed" if repetition % 2 else "forward",
            time_us,
            protocol.launches,
            not reason,
            str(reason),
            state.clock_events,
            state.compute_processes,
            state.sm_clock_mhz,
            state.temperature_c,
        )


def accepted_by(batch: Batch, protocol: Protocol) -> tuple[str, bool]:
    """The reason that the protocol gives a batch by what was seen of its device, and whether it is accepted."""
    state = State(batch.clock_events, batch.compute_processes, batch.sm_clock_mhz, batch.temperature_c)
    reason = rejection(state, protocol.acceptance.throttle_reasons)
    return str(reason), not reason
