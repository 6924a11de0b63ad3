# SPDX-License-Identifier: Apache-2.0
"""What of a record of the cost can be computed again on this CPU: its plans and the variants that ran.

Times cannot, nor can what the GPU wrote: that every side's plan was the reference's is the record's word, but the
reference's plans are ours, from the protocol's seed.
"""

from __future__ import annotations

from pathlib import Path

from routeblock.alignment_cost import routings
from routeblock.alignment_cost.protocol import Protocol, planned
from routeblock.alignment_cost.study import KEY, STUDY, key_of
from routeblock.cuda.align_variants import Gpu, Problem, serving
from routeblock.errors import InputError
from routeblock.timing import verification
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import Record

# Shared memory that a block can ask for, bytes: CUDA programming guide, technical specifications by capability.
SHARED_BYTES = {"sm_90": 227 * 1024}


def recompute(record: Record, protocol: Protocol) -> list[Finding]:
    """What of a record is not what the protocol's seed and our own table of variants give.

    Raises InputError for a GPU whose shared memory is not known here.
    """
    architecture = record.run["device"]["architecture"]
    if architecture not in SHARED_BYTES:
        raise InputError(
            f"a record of {architecture}",
            where=str(record.folder),
            limit=f"shared memory is known of {', '.join(SHARED_BYTES)}",
            way_out="add the architecture to alignment_cost/verification.py",
        )
    number = int(architecture.removeprefix("sm_"))
    gpu = Gpu((number // 10, number % 10), SHARED_BYTES[architecture])
    told = {tuple(c[n] for n in KEY): c for c in record.run["checks"]}
    wrong = []
    for point in planned(protocol):
        check = told.get(key_of(point))
        if check is None:  # the protocol check reports a point that was timed and not checked
            continue
        if check["canonical_sha256"] != list(routings.digests(point, protocol.seed)):
            wrong.append(Finding(point.label, Reason.PLANS, "the plans are not those of the protocol's seed"))
        ours = serving(Problem(point.tokens * point.top_k, point.experts, point.block_size), gpu).name
        if check["variant"] != ours:
            detail = f"variant {check['variant']}, where the table has {ours}"
            wrong.append(Finding(point.label, Reason.VARIANT, detail))
    return wrong


def write(out: Path, source: Path, protocol: Path) -> list[Finding]:
    """Copy the record in `source` to `out` if nothing is found; see `timing.verification`."""
    return verification.write(out, STUDY, source, protocol, recompute, rule="recorded_alignment")
