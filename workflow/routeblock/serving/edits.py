# SPDX-License-Identifier: Apache-2.0
"""Where the declared edits of the engine's record are made, and those of its own documents."""

from __future__ import annotations

from collections.abc import Mapping

from routeblock.timing import edits
from routeblock.timing.edits import Copy, Edit, Room, change, other_digest, where


def _clock(copy: Copy) -> None:
    change(where(copy.rows, clock="prefill")[:1], clock="whole")
    copy.count()


def _checks(copy: Copy) -> None:
    check = edits.checks(copy)[0]
    check["canonical_sha256"] = [other_digest(d) for d in check["canonical_sha256"]]


def _wrong(copy: Copy) -> None:
    edits.checks(copy)[0].update(wrong=["canonical"])


FURTHER: Mapping[str, Edit] = {
    "clock_unknown": _clock,
    "build": lambda c: c.run["extension"].update(sha256=other_digest(c.run["extension"]["sha256"])),
    "build_version": lambda c: c.run["engine"].update(vllm="0.23.0"),
    "device": lambda c: c.run["device"].update(name="NVIDIA H100 80GB HBM3"),
    "bits": _checks,
    "check_wrong": _wrong,
    "protocol_margin": lambda c: c.rules["margins"].update(eager=0.05),
}

ROOM = Room(
    module=__name__,
    soft=("prefill", "decode"),
    hard=("prefill", "decode"),
    soft_reason="throttled",
    candidate="canonical",
    baseline="native",
    other="canonical",
    floor_names={"native": "native_again", "native_again": "native"},
    moved="batch",
    shown="native_again",
    itself="native",
    judged={"verdict": "inferior"},
    opposite="non-inferior",
    checks=lambda documents: documents["run"]["checks"],
    further=FURTHER,
)
