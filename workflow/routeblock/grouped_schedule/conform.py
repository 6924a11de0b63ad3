# SPDX-License-Identifier: Apache-2.0
"""Does a record hold what its protocol asks for, batch by batch? Labels, order, retries and rejections all follow.

Nothing here looks at how long a batch took, beyond that it took some time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from routeblock.cuda import telemetry
from routeblock.grouped_schedule import campaigns
from routeblock.grouped_schedule.arms import Scope
from routeblock.grouped_schedule.batches import Batch
from routeblock.grouped_schedule.campaigns import Campaign, Mode, Stage
from routeblock.grouped_schedule.measure import CONTROL
from routeblock.grouped_schedule.protocol import Protocol
from routeblock.grouped_schedule.record import Recorded

CAMPAIGNS = {
    "sweep": (Campaign.SWEEP, Campaign.SWEEP_FLOOR, Campaign.SERIAL_PROTOTYPE),
    "confirmation": (Campaign.CONFIRMATION, Campaign.CONFIRMATION_FLOOR),
    "beyond": (Campaign.L2_RATIO, Campaign.COLD_L2, Campaign.WARPS, Campaign.STREAM),
}


class _DeviationError(Exception):
    """The first thing that is not as planned."""


def stages(rule: str, plan: Protocol, l2_bytes: int | None) -> Iterable[Stage]:
    """What `rule` runs on a GPU with an L2 of `l2_bytes`, or on a CPU (None), which has no `beyond`."""
    mode = Mode.CALL if l2_bytes is None else Mode(plan.timing.cuda.mode)
    warps = 0 if l2_bytes is None else plan.timing.cuda.warps_per_block
    if rule == "beyond":
        return campaigns.beyond(plan, l2_bytes or 0, mode, warps)
    return {"sweep": campaigns.sweep, "confirmation": campaigns.confirmation}[rule](plan, mode, warps)


def deviations(found: Recorded, plan: Protocol) -> list[str]:
    """Where a record leaves its protocol, one line each for comparisons and batches; none if it does not."""
    names = {b.campaign for b in found.batches}
    rule = next((r for r, mine in CAMPAIGNS.items() if names and names <= set(mine)), None)
    if rule is None:
        return [f"{found.folder}: campaigns {', '.join(sorted(names)) or 'none'} are not those of one rule"]
    planned = list(stages(rule, plan, found.run["device"].get("l2_bytes")))
    wrong = []
    for check in (_comparisons, _batches):
        try:
            check(found, planned, plan)
        except _DeviationError as e:
            wrong.append(f"{found.folder}: {e}")
    return wrong


def _expect(what: str, got: dict[str, Any], want: dict[str, Any]) -> None:
    for name, value in want.items():
        if got[name] != value:
            raise _DeviationError(f"{what}: {name} is {got[name]!r}, the protocol gives {value!r}")


def _shape(stage: Stage) -> dict[str, Any]:
    shape = {name: getattr(stage.cell, name) for name in ("slots", "pool", "rows", "cols")}
    return shape | {"campaign": str(stage.campaign), "family": str(stage.cell.family), "warps": stage.warps}


def _comparisons(found: Recorded, planned: list[Stage], plan: Protocol) -> None:
    device = {name: found.run["device"][name] for name in ("lane", "device")}
    wanted = [(stage, arm) for stage in planned for arm in stage.compared]
    if len(found.comparisons) != len(wanted):
        raise _DeviationError(f"{len(found.comparisons)} comparisons, the protocol gives {len(wanted)}")
    control: dict[str, Any] = {}
    for index, (told, (stage, arm)) in enumerate(zip(found.comparisons, wanted, strict=True)):
        shape = _shape(stage)
        rows_checked = plan.rows_checked_per_job * (stage.cell.slots - plan.sentinels)
        _expect(f"comparison {index}", told, {**device, **shape, "arm": arm.name, "rows_checked": rows_checked})
        if arm.name == CONTROL:
            control = {"shape": shape, "sha256": told["sha256"]}
        if control.get("shape") == shape and told["equals_control"] != (told["sha256"] == control["sha256"]):
            raise _DeviationError(f"comparison {index}: equals_control does not fit the outputs' digests")
        exact = told["rows_exact"] == told["rows_bounded"] == rows_checked
        _expect(
            f"comparison {index}", told, {"holds": told["equals_control"] and told["sentinels_untouched"] and exact}
        )


@dataclass
class _Reader:
    batches: Iterator[tuple[int, Batch]]

    def take(self, what: dict[str, Any]) -> Batch:
        """The next batch, which must have these values."""
        index, batch = next(self.batches, (-1, None))
        if batch is None:
            raise _DeviationError(f"no batch for {_named(what)}")
        _expect(f"batch {index}", asdict(batch), what)
        if not (math.isfinite(batch.time_us) and batch.time_us > 0):
            raise _DeviationError(f"batch {index}: time_us is {batch.time_us!r}, no time")
        return batch


def _named(what: dict[str, Any]) -> str:
    keys = ("campaign", "family", "slots", "pool", "series", "scope", "repetition", "attempt")
    return ", ".join(f"{key} {what[key]}" for key in keys)


def _batches(found: Recorded, planned: list[Stage], plan: Protocol) -> None:
    reader = _Reader(iter(enumerate(found.batches)))
    wrong = {
        (c["campaign"], c["family"], c["slots"], c["pool"], c["cols"], c["warps"], c["arm"])
        for c in found.comparisons
        if not c["holds"]
    }
    on_gpu = "l2_bytes" in found.run["device"]
    cuda, cpu = plan.timing.cuda, plan.timing.cpu
    counts = (cuda.launches, cuda.warmups) if on_gpu else (cpu.launches, cpu.warmups_per_shape)
    device = {name: found.run["device"][name] for name in ("lane", "device")}
    device |= dict(zip(("launches", "warmups"), counts, strict=True))
    for stage in planned:
        shape = device | _shape(stage) | {"mode": str(stage.mode), "baseline": stage.baseline}
        cell = stage.cell
        for repetition in range(plan.repetitions):
            direction = "reversed" if repetition % 2 else "forward"
            for position, series in enumerate(stage.order(repetition)):
                key = (stage.campaign, cell.family, cell.slots, cell.pool, cell.cols, stage.warps, series.arm.name)
                who = {"series": series.name, "arm": series.arm.name, "repetition": repetition, "position": position}
                _attempts(reader, plan, shape | who | {"direction": direction}, key in wrong)
    if (extra := next(reader.batches, None)) is not None:
        raise _DeviationError(f"batch {extra[0]}: the protocol ends before it")


def _attempts(reader: _Reader, plan: Protocol, who: dict[str, Any], incorrect: bool) -> None:
    pending: tuple[Scope, ...] = plan.scopes[::-1] if who["direction"] == "reversed" else plan.scopes
    for attempt in range(plan.acceptance.attempts):
        again = []
        for scope in pending:
            batch = reader.take(who | {"scope": str(scope), "attempt": attempt})
            reason = "incorrect" if incorrect else rejection(batch, plan)
            told = {"reason": reason, "accepted": not reason}
            _expect(_named(who | {"scope": scope, "attempt": attempt}), asdict(batch), told)
            if reason and not incorrect:
                again.append(scope)
        pending = tuple(again)
        if not pending:
            break


def rejection(batch: Batch, plan: Protocol) -> str:
    """The protocol's rules, applied to what was seen of the device during `batch`: a reason, or nothing."""
    seen = telemetry.State(batch.clock_events, batch.compute_processes, batch.sm_clock_mhz, batch.temperature_c)
    return telemetry.rejection(seen, plan.acceptance.throttle_reasons)
