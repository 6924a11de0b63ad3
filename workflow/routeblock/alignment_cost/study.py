# SPDX-License-Identifier: Apache-2.0
"""The cost of canonical alignment as a timed experiment: its stages, its pairs, what its documents have to say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from routeblock.alignment_cost.batches import TABLE
from routeblock.alignment_cost.protocol import Arm, Campaign, Mode, Point, Protocol, load, planned
from routeblock.cuda import sanitizer
from routeblock.timing.batches import Row
from routeblock.timing.plan import Checked, Key, Pair, Rule, Series, Stage
from routeblock.timing.protocol import balanced
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import Record, Study

KEY = ("campaign", "experts", "top_k", "tokens")
# Clocks that are read together: queued calls are clocked on the device and on the host at once.
FAMILIES = {
    Campaign.OPERATOR: (((Mode.GRAPH,),), ((Mode.STREAM, Mode.HOST),)),
    Campaign.LAYER: (((Mode.GRAPH,),), ((Mode.STREAM,),)),
}


def key_of(point: Point) -> Key:
    """The values of `KEY`."""
    return str(point.campaign), point.experts, point.top_k, point.tokens


def of_side(variant: str) -> dict[str, dict[str, str]]:
    """Only canonical alignment has a kernel variant."""
    return {str(arm): {"variant": variant if arm is Arm.CANONICAL else ""} for arm in Arm}


def stage(point: Point, protocol: Protocol, variant: str | None) -> Stage:
    """A point as a stage; variant None: not known, so not asked for."""
    series = tuple(Series(s.name, str(s.arm)) for s in protocol.series)
    return Stage(
        key=key_of(point),
        label=point.label,
        series=series,
        families=FAMILIES[point.campaign],
        repetitions=point.repetitions,
        order=partial(balanced, series),
        calls={Mode.GRAPH: point.graph_calls, Mode.STREAM: point.stream_calls, Mode.HOST: point.stream_calls},
        labels={"role": str(point.role), "block_size": point.block_size, "warmups": protocol.warmups},
        of_side={} if variant is None else of_side(variant),
        pause_s=point.pause_ms / 1000,
        shape=point,
    )


def _variants(record: Record) -> dict[Key, str]:
    return {tuple(check[name] for name in KEY): check["variant"] for check in record.run["checks"]}


def stages(protocol: Protocol, record: Record) -> list[Stage]:
    """Every point, in the order of timing, with the variant that its check names."""
    variants = _variants(record)
    return [stage(point, protocol, variants.get(key_of(point))) for point in planned(protocol)]


def pairs(protocol: Protocol, record: Record) -> list[Pair]:
    """Every series against the baseline, point by point and clock by clock."""
    variants = _variants(record)
    found = []
    for point in planned(protocol):
        for clock in stage(point, protocol, None).clocks:
            for series in protocol.series:
                if series.name != protocol.baseline:
                    variant = variants.get(key_of(point), "") if series.arm is Arm.CANONICAL else ""
                    found.append(_pair(protocol, point, Mode(clock), series.name, series.arm, variant))
    return found


def _pair(protocol: Protocol, point: Point, clock: Mode, name: str, arm: Arm, variant: str) -> Pair:
    columns = {
        "campaign": str(point.campaign),
        "role": str(point.role),
        "experts": point.experts,
        "top_k": point.top_k,
        "tokens": point.tokens,
        "block_size": point.block_size,
        "mode": str(clock),
        "series": name,
        "arm": str(arm),
        "variant": variant,
    }
    margins = protocol.margins
    return Pair(
        columns,
        key_of(point),
        str(clock),
        name,
        protocol.baseline,
        point.repetitions,
        rule=Rule.NONE if clock is Mode.HOST else Rule.MARGIN,
        threshold=margins.layer if point.campaign is Campaign.LAYER else margins.operator,
        target=_target(protocol, point, clock, name),
        verdict_from=math.ceil(protocol.minimum_pairs * point.repetitions),
        floor=(key_of(point), protocol.floor, protocol.baseline),
    )


def _target(protocol: Protocol, point: Point, clock: Mode, series: str) -> float | None:
    for t in protocol.targets:
        fits = (t.campaign, t.role, t.mode, t.series) == (point.campaign, point.role, clock, series)
        if fits and point.tokens <= t.up_to_tokens:
            return t.ratio
    return None


def place(row: Row) -> str:
    """A point by name, of a batch or a check."""
    return f"{row['campaign']} E={row['experts']} k={row['top_k']} M={row['tokens']}"


def checks(record: Record) -> list[Checked]:
    """The check of every point."""
    return [
        Checked(tuple(c[name] for name in KEY), "", tuple(c["wrong"]), f"check of {place(c)}")
        for c in record.run["checks"]
    ]


def documents_check(protocol: Protocol, record: Record) -> Iterator[Finding]:
    """The build, the kernels, the device and the bits are those that the protocol and the record name."""
    run, exactness = record.run, record.documents["exactness"]
    versions = {build.extension_sha256: build.vllm for build in protocol.builds}
    extension = run["extension"]
    if extension["sha256"] not in versions:
        detail = f"extension {extension['sha256'][:12]} is none of the protocol's builds"
        yield Finding("run.json", Reason.BUILD, detail)
    elif extension["vllm"] not in (None, versions[extension["sha256"]]):  # None: a file without its wheel
        detail = f"vLLM {extension['vllm']}, the protocol's build is of {versions[extension['sha256']]}"
        yield Finding("run.json", Reason.BUILD, detail)
    if exactness["cubin_sha256"] != run["cubin_sha256"]:
        detail = f"checked {exactness['cubin_sha256'][:12]}, timed {run['cubin_sha256'][:12]}"
        yield Finding("exactness.json", Reason.KERNELS, detail)
    if exactness["gpu"] != run["device"]["name"]:
        detail = f"checked on {exactness['gpu']}, timed on {run['device']['name']}"
        yield Finding("exactness.json", Reason.DEVICE, detail)
    if exactness["differs"]:
        yield Finding("exactness.json", Reason.BITS, exactness["differs"])
    for tokens, told in exactness["repeated"].items():
        if told["different"] != 0:
            detail = f"{told['different']!r} of {told['calls']} repeated calls at {tokens} tokens differ"
            yield Finding("exactness.json", Reason.BITS, detail)
    compared, variants = exactness["random"]["routings"], sum(exactness["random"]["variants"].values())
    if compared != variants:
        detail = f"{compared} random routings compared, by all variants {variants}"
        yield Finding("exactness.json", Reason.BITS, detail)
    for line in sanitizer.findings(record.documents["sanitizer"]):
        yield Finding("sanitizer.json", Reason.SANITIZER, line)
    sizes = {key_of(point): point.block_size for point in planned(protocol)}
    for check in run["checks"]:
        key = tuple(check[name] for name in KEY)
        if key in sizes and check["block_size"] != sizes[key]:
            detail = f"block size {check['block_size']}, vLLM takes {sizes[key]}"
            yield Finding(f"check of {place(check)}", Reason.BLOCK_SIZE, detail)


def check_of(point: Point, variant: str, wrong: frozenset[str]) -> dict[str, Any]:
    """The check of a point as the record has it, but for its facts."""
    shape = dict(zip(KEY, key_of(point), strict=True))
    return shape | {"block_size": point.block_size, "variant": variant, "wrong": sorted(wrong)}


def counted(row: Row) -> str:
    """The kind of a batch in run.json."""
    return f"{row['campaign']} {row['clock']} {row['reason'] or 'accepted'}"


STUDY: Study = Study(
    name="alignment_cost",
    module=__name__,
    table=TABLE,
    documents=("run", "exactness", "sanitizer"),
    key=KEY,
    load=load,
    protocol=Protocol,
    stages=stages,
    pairs=pairs,
    checks=checks,
    documents_check=documents_check,
    counted=counted,
)
