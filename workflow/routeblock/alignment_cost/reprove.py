# SPDX-License-Identifier: Apache-2.0
"""A committed record of the cost, proved again on this CPU: its files, every batch, its plans, the variants that ran.

Times cannot be computed again. Nor can what the GPU wrote: that every arm's plan was the reference's is the record's
word, but the reference's plans are ours, from the protocol's seed.
"""

from __future__ import annotations

import json
from pathlib import Path

from routeblock.alignment_cost import conform, record, routings
from routeblock.alignment_cost.measure import planned
from routeblock.alignment_cost.protocol import Protocol, load
from routeblock.alignment_cost.reasons import Finding, Reason
from routeblock.cuda.align_variants import Gpu, Problem, serving
from routeblock.errors import InputError

# Shared memory that a block can ask for, bytes: CUDA programming guide, technical specifications by capability.
SHARED_BYTES = {"sm_90": 227 * 1024}
_KEY = ("campaign", "experts", "top_k", "tokens")


def unsealed(source: Path) -> list[Finding]:
    """The files of a record that are not what the recording machine listed in `contents.json`.

    Raises InputError if that cannot be read.
    """
    files = record.FOLDER.changed(source)
    return [Finding(str(path), Reason.SEAL, "not the bytes that were recorded") for path in files]


def deviations(found: record.Recorded, protocol_path: Path) -> list[Finding]:
    """Where a record leaves its protocol, walked batch by batch."""
    rules = json.loads(protocol_path.read_text(encoding="utf-8"))
    rows = [vars(batch) for batch in found.batches]
    return conform.deviations(rows, found.run, found.exactness, found.sanitizer, rules)


def disagreements(found: record.Recorded, protocol: Protocol) -> list[Finding]:
    """What of a record is not what the protocol's seed and our own table of variants give.

    Raises InputError for a GPU whose shared memory is not known here.
    """
    architecture = found.run["device"]["architecture"]
    if architecture not in SHARED_BYTES:
        raise InputError(
            f"a record of {architecture}",
            where=str(found.folder),
            limit=f"shared memory is known of {', '.join(SHARED_BYTES)}",
            way_out="add the architecture to alignment_cost/reprove.py",
        )
    number = int(architecture.removeprefix("sm_"))
    gpu = Gpu((number // 10, number % 10), SHARED_BYTES[architecture])
    told = {tuple(c[n] for n in _KEY): c for c in found.run["checks"]}
    wrong = []
    for point in planned(protocol):
        check = told.get((str(point.campaign), point.experts, point.top_k, point.tokens))
        if check is None:  # a point that was timed and not checked is no concern of this function
            continue
        if check["canonical_sha256"] != list(routings.digests(point, protocol.seed)):
            wrong.append(Finding(point.label, Reason.PLANS, "the plans are not those of the protocol's seed"))
        ours = serving(Problem(point.tokens * point.top_k, point.experts, point.block_size), gpu).name
        if check["variant"] != ours:
            told_variant = f"variant {check['variant']}, where the table has {ours}"
            wrong.append(Finding(point.label, Reason.VARIANT, told_variant))
    return wrong


def write(out: Path, source: Path, protocol_path: Path) -> list[Finding]:
    """Copy the record in `source` to `out`, sealed by `recorded_alignment.manifest.json`.

    Returns what `unsealed`, `deviations` and `disagreements` find; then nothing is written.
    """
    protocol, found = load(protocol_path), record.read(source)
    wrong = unsealed(source) or deviations(found, protocol_path) + disagreements(found, protocol)
    if wrong:
        return wrong
    record.FOLDER.copy(source, out, protocol_path, [__name__])
    return []
