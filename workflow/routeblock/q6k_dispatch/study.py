# SPDX-License-Identifier: Apache-2.0
"""The fast paths as a timed experiment: stages, pairs, and what a record's documents have to say."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from routeblock.cuda import sanitizer
from routeblock.q6k_dispatch.batches import TABLE
from routeblock.q6k_dispatch.protocol import OURS, Protocol, Shape, Side, load, shapes
from routeblock.timing.batches import Row
from routeblock.timing.plan import Checked, Key, Pair, Rule, Series, Stage
from routeblock.timing.protocol import balanced
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import Record, Study

KEY = ("role", "slots", "pool", "rows", "cols")
# Who may be left out of a record, by what run.json names under `peers`.
PEERS = {"plugin": (Side.VLLM_VEC, Side.VLLM_BATCHED), "llama_cpp": (Side.LLAMA_CPP,)}


def key_of(shape: Shape) -> Key:
    """The values of `KEY`."""
    return str(shape.role), shape.slots, shape.pool, shape.rows, shape.cols


def left_out(record: Record) -> set[Side]:
    """The sides that the record says it left out."""
    return {side for name, sides in PEERS.items() if not record.run["peers"][name] for side in sides}


def planned(protocol: Protocol, absent: Collection[Side]) -> list[Stage]:
    """Every shape, those of one matrix together: its weights are made once."""
    series = tuple(Series(s.name, str(s.side)) for s in protocol.series if s.side not in absent)
    every = sorted(shapes(protocol), key=lambda s: (s.rows, s.cols, -s.pool))
    return [
        Stage(
            key=key_of(shape),
            label=shape.label,
            series=series,
            families=((("",),),),
            repetitions=protocol.repetitions,
            order=partial(balanced, series),
            calls={"": protocol.launches},
            shape=shape,
        )
        for shape in every
    ]


def stages(protocol: Protocol, record: Record) -> list[Stage]:
    """Every shape, with the series that the record did not leave out."""
    return planned(protocol, left_out(record))


def pairs(protocol: Protocol, record: Record) -> list[Pair]:
    """The candidate against every other series; among the peers of a shape, the fastest is the one to beat."""
    found = []
    for shape in shapes(protocol):
        bound = protocol.threshold.ratio if shape.role in protocol.threshold.roles else None
        for series in protocol.series:
            if series.name != protocol.candidate:
                peer = series.name in protocol.peers
                columns = dict(zip(KEY, key_of(shape), strict=True)) | {"series": series.name, "side": str(series.side)}
                found.append(
                    Pair(
                        columns,
                        key_of(shape),
                        "",
                        protocol.candidate,
                        series.name,
                        protocol.repetitions,
                        rule=Rule.BEST,
                        target=bound if peer else None,
                        estimate_from=protocol.repetitions,
                        verdict_from=protocol.repetitions,
                        contest=key_of(shape) if peer else None,
                    )
                )
    return found


def _named(row: Row) -> str:
    return f"{row['role']} {row['slots']}/{row['pool']} {row['rows']}x{row['cols']}"


def checks(record: Record) -> list[Checked]:
    """The check of every shape."""
    return [
        Checked(tuple(c[name] for name in KEY), "", tuple(c["wrong"]), f"check of {_named(c)}")
        for c in record.run["checks"]
    ]


def documents_check(protocol: Protocol, record: Record) -> Iterator[Finding]:
    """Peers are the protocol's; paths and batches do not change bits; nothing exceeds its bound. Refused counters and
    tools are in the table of checks, and no finding."""
    run = record.run
    plugin = set(run["peers"]["plugin"].values())
    if plugin and plugin != {protocol.plugin.sha256}:
        yield Finding("run.json", Reason.BUILD, "the plug-in is not the protocol's")
    for side in sorted(left_out(record)):
        yield Finding("run.json", Reason.SERIES_MISSING, f"{side} was left out")
    for check in run["checks"]:
        where = f"check of {_named(check)}"
        if len({check["output_sha256"][str(side)] for side in OURS}) != 1:
            yield Finding(where, Reason.BITS, "the paths' bits differ")
        if not check["furthest_of_bound"] <= 1:
            yield Finding(where, Reason.BITS, f"{check['furthest_of_bound']} of the bound")
    ours = {b["sha256"] for b in run["batch_bits"] if b["side"] in set(map(str, OURS))}
    if len(ours) != 1:
        yield Finding("run.json", Reason.BITS, f"one job has {len(ours)} outputs in different batches")
    for line in sanitizer.findings(record.documents["sanitizer"]):
        yield Finding("sanitizer.json", Reason.SANITIZER, line)


def counted(row: Row) -> str:
    """The kind of a batch in run.json."""
    return f"{row['series']} {row['reason'] or 'accepted'}"


STUDY: Study = Study(
    name="q6k_dispatch",
    module=__name__,
    table=TABLE,
    documents=("run", "counters", "sanitizer"),
    key=KEY,
    load=load,
    protocol=Protocol,
    stages=stages,
    pairs=pairs,
    checks=checks,
    documents_check=documents_check,
    counted=counted,
)
