# SPDX-License-Identifier: Apache-2.0
"""Step times of the engine as a timed experiment: its stages, its pairs, what its documents have to say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from routeblock.serving.kinds import Clock, Mode
from routeblock.serving.protocol import Protocol, load
from routeblock.timing.batches import BatchTable, Row
from routeblock.timing.plan import Checked, Key, Pair, Rule, Series, Stage
from routeblock.timing.protocol import balanced
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import Record, Study

KEY = ("mode", "batch")


@dataclass(frozen=True)
class Batch:
    """Steps of one batch of prompts: `elapsed_us` for all of its `calls`, `time_us` a step. `position` counts from 0.

    `clock_events` is NVML's mask of clock event reasons seen before or after the repetition, `compute_processes` the
    most processes it listed; -1 stands for what could not be read. `reason` is empty when the batch was accepted.
    """

    mode: str
    batch: int
    clock: str
    series: str
    alignment: str
    repetition: int
    attempt: int
    position: int
    direction: str
    elapsed_us: float
    calls: int
    time_us: float
    warmups: int
    accepted: bool
    reason: str
    clock_events: int
    compute_processes: int
    sm_clock_mhz: int
    temperature_c: int


TABLE = BatchTable(Batch, {"side": "alignment", "clock": "clock"}, "record again: routeblock serving record")


def stage(protocol: Protocol, mode: Mode, batch: int) -> Stage:
    """A batch size in a mode."""
    steps = protocol.steps
    series = tuple(Series(s.name, str(s.arm)) for s in steps.series)
    return Stage(
        key=(str(mode), batch),
        label=f"{mode}, batch of {batch}",
        series=series,
        families=(((Clock.PREFILL, Clock.DECODE),),),
        repetitions=steps.repetitions,
        order=partial(balanced, series),
        calls={Clock.PREFILL: 1, Clock.DECODE: protocol.completion_tokens - 1},
        labels={"warmups": steps.warmups},
        shape=(mode, batch),
    )


def planned(protocol: Protocol) -> list[Stage]:
    """Every stage, in the order of timing."""
    return [stage(protocol, mode, batch) for mode in protocol.modes for batch in protocol.batches]


def pairs(protocol: Protocol, _: Record) -> list[Pair]:
    """Every series against the baseline, batch by batch and clock by clock."""
    steps = protocol.steps
    found = []
    for timed in planned(protocol):
        mode, batch = timed.shape
        for clock in timed.clocks:
            for series in steps.series:
                if series.name == steps.baseline:
                    continue
                columns = {"mode": str(mode), "batch": batch, "clock": str(clock), "series": series.name}
                found.append(
                    Pair(
                        columns | {"alignment": str(series.arm)},
                        timed.key,
                        str(clock),
                        series.name,
                        steps.baseline,
                        steps.repetitions,
                        rule=Rule.MARGIN,
                        threshold=protocol.margin(mode),
                        verdict_from=math.ceil(protocol.minimum_pairs * steps.repetitions),
                        floor=(timed.key, steps.floor, steps.baseline),
                    )
                )
    return found


def place(row: Row) -> str:
    """A stage by name, of a batch or a check."""
    return f"{row['mode']}, batch of {row['batch']}"


def checks(record: Record) -> list[Checked]:
    """The check of every stage."""
    return [
        Checked(tuple(c[name] for name in KEY), "", tuple(c["wrong"]), f"check of {place(c)}")
        for c in record.run["checks"]
    ]


def documents_check(protocol: Protocol, record: Record) -> Iterator[Finding]:
    """The build and the model are those that the protocol names, and every process was of it."""
    run = record.run
    versions = {build.extension_sha256: build.vllm for build in protocol.builds}
    extension = run["extension"]
    if extension["sha256"] not in versions:
        yield Finding(
            "run.json", Reason.BUILD, f"extension {extension['sha256'][:12]} is none of the protocol's builds"
        )
    elif run["engine"]["vllm"] != versions[extension["sha256"]]:
        detail = f"vLLM {run['engine']['vllm']}, the protocol's build is of {versions[extension['sha256']]}"
        yield Finding("run.json", Reason.BUILD, detail)
    devices = {process["device"]["name"] for process in run["processes"]}
    if devices != {run["device"]["name"]}:
        yield Finding("run.json", Reason.DEVICE, f"processes ran on {', '.join(sorted(devices))}")
    models = {process["model_sha256"] for process in run["processes"]}
    if models != {run["model_sha256"]}:
        yield Finding("run.json", Reason.BITS, f"processes served {len(models)} models")


def counted(row: Row) -> str:
    """The kind of a batch in run.json."""
    return f"{row['mode']} {row['clock']} {row['reason'] or 'accepted'}"


def check_of(timed: Stage, facts: dict[str, Any], wrong: frozenset[str]) -> dict[str, Any]:
    """The check of a stage as the record has it."""
    shape: Key = timed.key
    return dict(zip(KEY, shape, strict=True)) | facts | {"wrong": sorted(wrong)}


def stages(protocol: Protocol, _: Record) -> list[Stage]:
    """Every stage of a record."""
    return planned(protocol)


STUDY: Study = Study(
    name="serving",
    module=__name__,
    table=TABLE,
    documents=("run",),
    key=KEY,
    load=load,
    protocol=Protocol,
    stages=stages,
    pairs=pairs,
    checks=checks,
    documents_check=documents_check,
    counted=counted,
)
