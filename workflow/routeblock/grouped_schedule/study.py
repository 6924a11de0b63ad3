# SPDX-License-Identifier: Apache-2.0
"""Study B as a timed experiment: stages, pairs, and what a record's documents have to say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from routeblock.grouped_schedule.batches import TABLE
from routeblock.grouped_schedule.campaigns import CAMPAIGNS, KEY, Campaign, Place, Planner, Setup
from routeblock.grouped_schedule.protocol import Expected, Protocol, load
from routeblock.timing.batches import Row
from routeblock.timing.plan import Checked, Key, Pair, Rule, Stage
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import Record, Study

FLOOR_OF = {
    Campaign.SWEEP: Campaign.SWEEP_FLOOR,
    Campaign.CONFIRMATION: Campaign.CONFIRMATION_FLOOR,
    Campaign.SERIAL_PROTOTYPE: Campaign.SWEEP_FLOOR,
}
CONTROL = "job_major"


def rule_of(record: Record) -> str | None:
    """The rule that made a record, by the campaigns of its output checks; None if they are not those of one rule."""
    names = {c["campaign"] for c in record.documents["comparisons"]}
    return next((rule for rule, mine in CAMPAIGNS.items() if names and names <= set(mine)), None)


def place_of(record: Record) -> Place:
    """The device of a record."""
    device = record.run["device"]
    return Place(device["lane"], device["device"], device.get("l2_bytes"))


def stages(protocol: Protocol, record: Record) -> list[Stage]:
    """What the rule that made the record runs on its device."""
    rule = rule_of(record)
    return [] if rule is None else list(Planner(protocol, place_of(record)).stages(rule))


def pairs(minimum_effect: float, protocol: Protocol, record: Record) -> list[Pair]:
    """Every series against the baseline of its stage, in both scopes."""
    every = stages(protocol, record)
    known = {stage.key: stage for stage in every}
    found = []
    for stage in every:
        setup: Setup = stage.shape
        for series in stage.series:
            if series.name != setup.baseline:
                floor = known.get(_floor_key(stage.key, setup) or ())
                ends = (floor.key, floor.series[1].name, floor.series[0].name) if floor else None
                for scope in protocol.scopes:
                    columns = dict(zip(KEY, stage.key, strict=True)) | {"mode": str(setup.mode), "scope": str(scope)}
                    columns |= {"baseline": setup.baseline, "series": series.name, "arm": series.side}
                    found.append(
                        Pair(
                            columns,
                            stage.key,
                            str(scope),
                            series.name,
                            setup.baseline,
                            protocol.repetitions,
                            rule=Rule.EFFECT,
                            threshold=minimum_effect,
                            estimate_from=protocol.repetitions,
                            verdict_from=protocol.repetitions,
                            floor=ends,
                        )
                    )
    return found


def _floor_key(key: Key, setup: Setup) -> Key | None:
    floor = FLOOR_OF.get(setup.campaign)
    return None if floor is None else (*key[:2], str(floor), *key[3:])


def checks(record: Record) -> list[Checked]:
    """The check of every arm's output."""
    return [
        Checked(
            tuple(c[name] for name in KEY),
            c["arm"],
            () if c["holds"] else (c["arm"],),
            f"output check {i} ({c['arm']})",
        )
        for i, c in enumerate(record.documents["comparisons"])
    ]


def documents_check(protocol: Protocol, record: Record) -> Iterator[Finding]:
    """What an output check says of itself follows from its numbers."""
    control: dict[Key, str] = {}
    for i, told in enumerate(record.documents["comparisons"]):
        key = tuple(told[name] for name in KEY)
        if told["arm"] == CONTROL:
            control.setdefault(key, told["sha256"])
        exact = told["rows_exact"] == told["rows_bounded"] == told["rows_checked"]
        due = {
            "rows_checked": protocol.rows_checked_per_job * (told["slots"] - protocol.sentinels),
            "holds": told["equals_control"] and told["sentinels_untouched"] and exact,
        }
        if key in control:
            due["equals_control"] = told["sha256"] == control[key]
        if told["slots"] in _slots(protocol):
            for name, value in due.items():
                if told[name] != value:
                    detail = f"{name} is {told[name]!r}, its numbers give {value!r}"
                    yield Finding(f"output check {i} ({told['arm']})", Reason.BITS, detail)


def _slots(protocol: Protocol) -> set[int]:
    return {slots for family in protocol.families for slots in family.slots}


def counted(row: Row) -> str:
    """The kind of a batch in run.json."""
    return f"{row['campaign']}, {row['reason'] or 'accepted'}"


def study(minimum_effect: float) -> Study:
    """The study with the smallest change that matters, a fraction: the user's to say, in config.yaml."""
    return Study(
        name="grouped_schedule",
        module=__name__,
        table=TABLE,
        documents=("comparisons", "fixtures", "run"),
        key=KEY,
        load=load,
        protocol=Protocol,
        stages=stages,
        pairs=partial(pairs, minimum_effect),
        checks=checks,
        documents_check=documents_check,
        counted=counted,
    )


STUDY = study(0.0)  # where no verdict is given


def missing_counts(found: Iterable[Record], expected: Expected) -> list[str]:
    """What each device lacks of the protocol's counts, one line each; none if all are reached exactly."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    devices: set[tuple[str, str]] = set()
    for record in found:
        place = place_of(record)
        device = (place.lane, place.device)
        devices.add(device)
        counts.update((*device, b.campaign, "accepted batches") for b in record.batches if b.accepted)
        told = record.documents["comparisons"]
        counts.update((*device, c["campaign"], "equal outputs") for c in told if c["holds"])
    wanted = (
        (Campaign.SWEEP, "equal outputs", expected.sweep_comparisons),
        (Campaign.SWEEP, "accepted batches", expected.sweep_batches),
        (Campaign.CONFIRMATION, "equal outputs", expected.confirmation_comparisons),
        (Campaign.CONFIRMATION, "accepted batches", expected.confirmation_batches),
    )
    return [
        f"{lane}/{device}: {campaign} has {counts[lane, device, campaign, what]} {what}, the protocol asks for {n}"
        for lane, device in sorted(devices)
        for campaign, what, n in wanted
        if counts[lane, device, campaign, what] != n
    ]
