# SPDX-License-Identifier: Apache-2.0
"""Where the declared edits of a record of the fast paths are made, and those of its own documents."""

from __future__ import annotations

from collections.abc import Mapping

from routeblock.q6k_dispatch.protocol import OURS
from routeblock.timing import edits
from routeblock.timing.batches import Row
from routeblock.timing.edits import Copy, Edit, Room, other_digest, where
from routeblock.timing.protocol import balanced


def _check(copy: Copy) -> Row:
    return edits.checks(copy)[0]


def _seed(copy: Copy) -> None:
    copy.rules["seed"] += 1
    copy.carry()


def _paths(copy: Copy) -> None:
    digests = _check(copy)["output_sha256"]
    digests["tensor"] = other_digest(digests["tensor"])


def _left_out(copy: Copy) -> None:
    """No batch of llama.cpp, places as without it, and the record says that it was left out."""
    copy.rows[:] = [row for row in copy.rows if row["side"] != "llama_cpp"]
    copy.run["peers"]["llama_cpp"] = {}
    names = [s["name"] for s in copy.rules["series"] if s["side"] != "llama_cpp"]
    for row in copy.rows:
        row["position"] = balanced(names, row["repetition"]).index(row["series"])
    stages = list(dict.fromkeys(tuple(row[n] for n in copy.study.key) for row in copy.rows))
    turn = ("repetition", "attempt", "position")
    copy.rows.sort(key=lambda r: (stages.index(tuple(r[n] for n in copy.study.key)), *(r[n] for n in turn)))
    copy.count()


def _sample(copy: Copy) -> None:
    sample = _check(copy)["samples"][1]
    sample["sha256"] = other_digest(sample["sha256"])


def _batch_bits(copy: Copy) -> None:
    for side in OURS:
        for row in where(copy.run["batch_bits"], side=str(side)):
            row["sha256"] = "1" * 64


def _tool(copy: Copy) -> None:
    copy.documents["sanitizer"]["tools"][0].update(outcome="found", lines=["ERROR SUMMARY: 3 errors"])


FURTHER: Mapping[str, Edit] = {
    "peer_left_out": _left_out,
    "protocol_target": lambda c: c.rules["threshold"].update(ratio=1.1),
    "protocol_seed": _seed,
    "build": lambda c: c.run["peers"]["plugin"].update(dict.fromkeys(c.run["peers"]["plugin"], "0" * 64)),
    "bits": _paths,
    "bound": lambda c: _check(c).update(furthest_of_bound=1.5),
    "batch_bits": _batch_bits,
    "sanitizer": _tool,
    "check_wrong": lambda c: _check(c).update(wrong=["band32"]),
    "check_plans": _sample,
    "check_jobs": lambda c: _check(c).update(ids_sha256=other_digest(_check(c)["ids_sha256"])),
    "check_variant": lambda c: _check(c)["plan"].update(tiles=_check(c)["plan"]["tiles"] + 1),
}

ROOM = Room(
    module=__name__,
    soft=("",),
    hard=("",),
    soft_reason="throttled",
    candidate="ours",
    baseline="vllm_batched",
    other="band32",
    floor_names={"ours": "ours_again", "ours_again": "ours"},
    moved="slots",
    shown="vllm_batched",
    itself="ours",
    judged={"best": True},
    opposite="undecided",
    checks=lambda documents: documents["run"]["checks"],
    further=FURTHER,
)
