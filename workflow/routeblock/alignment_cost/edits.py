# SPDX-License-Identifier: Apache-2.0
"""Where the declared edits of a record of the cost are made, and those of its own documents."""

from __future__ import annotations

from collections.abc import Mapping

from routeblock.alignment_cost.study import place
from routeblock.timing import edits
from routeblock.timing.batches import Row
from routeblock.timing.edits import Copy, Edit, Room, change, first, other_digest, where

_OTHER_VARIANT = "tiles_512x4"


def _check(copy: Copy) -> Row:
    return edits.checks(copy)[0]


def _not_measured(copy: Copy) -> None:
    copy.run["not_measured"].append(place(copy.rows[0]))
    edits.GENERAL["point_deleted"](copy)
    copy.count()


def _host_for_layer(copy: Copy) -> None:
    rows = where(copy.rows, campaign="layer", clock="stream")[:8]
    at = next(i for i, row in enumerate(copy.rows) if row is rows[-1]) + 1
    copy.rows[at:at] = [row | {"clock": "host"} for row in rows]
    copy.count()


def _reported(copy: Copy) -> None:
    row = where(copy.rows, role="reported")[0]
    change(where(copy.rows, **{name: row[name] for name in copy.study.key}), role="bound")


def _seed(copy: Copy) -> None:
    copy.rules["seed"] += 1
    copy.carry()


def _plans(copy: Copy) -> None:
    plans = _check(copy)["canonical_sha256"]
    plans[1] = other_digest(plans[1])


def _tool(copy: Copy) -> None:
    copy.documents["sanitizer"]["tools"][0].update(outcome="found", lines=["ERROR SUMMARY: 3 errors"])


def _extension(copy: Copy) -> Row:
    found: Row = copy.run["extension"]
    return found


def _exactness(copy: Copy) -> Row:
    found: Row = copy.documents["exactness"]
    return found


def _bound(copy: Copy) -> Row:
    return next(row for row in copy.statistics["comparisons"] if row["target"] is not None)


FURTHER: Mapping[str, Edit] = {
    "point_not_measured": _not_measured,
    "clock_unknown": _host_for_layer,
    "role": _reported,
    "block_size": lambda c: change(first(c), block_size=16),
    "variant": lambda c: where(c.rows, series="canonical")[0].update(variant=_OTHER_VARIANT),
    "protocol_margin": lambda c: c.rules["margins"].update(layer=c.rules["margins"]["operator"]),
    "protocol_target": lambda c: c.rules["targets"][0].update(ratio=0.9),
    "protocol_seed": _seed,
    "build": lambda c: _extension(c).update(sha256=other_digest(_extension(c)["sha256"])),
    "build_version": lambda c: _extension(c).update(vllm="0.23.0"),
    "kernels": lambda c: _exactness(c).update(cubin_sha256=other_digest(_exactness(c)["cubin_sha256"])),
    "device": lambda c: _exactness(c).update(gpu="NVIDIA H100 80GB HBM3"),
    "bits": lambda c: _exactness(c).update(differs="random: 168 routes int32, 128 experts, block 8"),
    "sanitizer": _tool,
    "check_wrong": lambda c: _check(c).update(wrong=["sort"]),
    "check_plans": _plans,
    "check_variant": lambda c: change([_check(c), *first(c, side="canonical")], variant=_OTHER_VARIANT),
    "check_block_size": lambda c: _check(c).update(block_size=16),
    "statistics_variant": lambda c: _bound(c).update(variant=_OTHER_VARIANT),
    "statistics_block_size": lambda c: _bound(c).update(block_size=16),
    "statistics_floor_labels": lambda c: edits.swap_compared(c, "canonical", "native_again", "variant"),
}

ROOM = Room(
    module=__name__,
    soft=("stream", "host"),
    hard=("graph",),
    soft_reason="late",
    candidate="canonical",
    baseline="native",
    other="sort",
    floor_names={"native": "native_again", "native_again": "native"},
    moved="tokens",
    shown="canonical",
    itself="native",
    judged={"verdict": "inferior"},
    opposite="non-inferior",
    checks=lambda documents: documents["run"]["checks"],
    further=FURTHER,
)
