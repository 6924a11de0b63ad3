# SPDX-License-Identifier: Apache-2.0
"""The expected identity: what is going to compute the runs of a lane, written down and sealed before the first one."""

from __future__ import annotations

from pathlib import Path

from routeblock.evidence.digest import code_digest
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.route_block.runs.lane import Lane

FORMAT = "routeblock.expected_identity.v1"
RUN = "routeblock.route_block.runs.run"
BEFORE = "before the first run, as its input"


def code_of(lane: Lane) -> tuple[str, ...]:
    """The modules whose code makes a run on this lane, this one among what they import: one digest is the source of a
    record, the code of its seals and that of the identity's own.
    """
    return (RUN, *lane.modules)


def freeze(lane_name: str, lane: Lane, out: Path) -> None:
    """Write what `lane` would compute with now, and the digest of the code that runs a cell there, to `out`.

    Sealed. Raises InputError where this machine cannot run the lane.
    """
    computer = lane.computer()
    document = {
        "format": FORMAT,
        "lane": lane_name,
        "source": code_digest(*code_of(lane)),
        "binary": computer.binary,
        "environment": dict(computer.environment),
        "frozen": BEFORE,
    }
    write_json(out, document)
    seal(
        out.with_suffix(SUFFIX),
        rule="identity",
        outputs=[out],
        inputs=[],
        parameters={"lane": lane_name},
        modules=code_of(lane),
    )
