# SPDX-License-Identifier: Apache-2.0
"""A committed record of the fast paths, proved again on this CPU: files, jobs, launch plans, bits of sampled outputs.

Times and counters cannot be computed again. Of the outputs the sampled slots are, whole rows of them, by the model in
moe/q6k_segments.py; digests of whole outputs are the record's word, but that the paths' agree is checked.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.cuda.q6k_plan import plan, tuned
from routeblock.evidence.digest import sha256_array
from routeblock.moe import q6k
from routeblock.moe.q6k_segments import dot
from routeblock.protocols import ordered
from routeblock.q6k_dispatch import batch_bits, fixture, record
from routeblock.q6k_dispatch.fixture import Jobs
from routeblock.q6k_dispatch.measure import accepted_by
from routeblock.q6k_dispatch.protocol import OURS, Protocol, load, shapes


def unsealed(source: Path) -> list[str]:
    """The files of a record that are not what the recording machine listed in `contents.json`.

    Raises InputError if that cannot be read.
    """
    return [f"{path}: not the bytes that were recorded" for path in record.FOLDER.changed(source)]


def output(jobs: Jobs, slot: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The rows of one active slot, float32 [rows], by the model."""
    shape = jobs.shape
    weights = fixture.expert_weights(seed, shape.rows, shape.cols, int(jobs.ids[slot]))
    return dot(weights, q6k.quantize_q8_1(jobs.x[slot // shape.top_k])[None])


def disagreements(found: record.Recorded, protocol: Protocol) -> list[str]:
    """What of a record is not what the protocol's seed, our plans and our model give, one line each."""
    device = found.run["device"]
    told = {_place(c): c for c in found.run["checks"]}
    wrong = [] if len(told) == len(found.run["checks"]) else ["a shape was checked twice"]
    for shape in shapes(protocol):
        check = told.pop((str(shape.role), shape.slots, shape.pool, shape.rows, shape.cols), None)
        if check is None:
            wrong.append(f"{shape.label}: not checked")
            continue
        jobs = fixture.make(shape, protocol.seed)
        ours = asdict(
            plan(shape.sizes, tuned(shape.sizes, device["multiprocessors"]), architecture=device["architecture"])
        )
        if any(check[name] != value for name, value in jobs.facts().items()):
            wrong.append(f"{shape.label}: the jobs are not those of the seed")
        if check["plan"] != ours:
            wrong.append(f"{shape.label}: launched as {check['plan']}, where the table has {ours}")
        samples = [
            {"slot": s, "sha256": sha256_array(output(jobs, s, protocol.seed))}
            for s in jobs.sampled(protocol.correctness.samples)
        ]
        if check["samples"] != samples:
            wrong.append(f"{shape.label}: sampled outputs are not the model's")
    wrong += [f"{' '.join(map(str, key))}: no shape of the protocol" for key in told]
    return wrong + _first_token(found, protocol) + _batches(found, protocol)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[n] for n in ("role", "slots", "pool", "rows", "cols"))


def _first_token(found: record.Recorded, protocol: Protocol) -> list[str]:
    jobs = batch_bits.jobs(protocol, 1)
    rows = np.stack([output(jobs, slot, protocol.seed) for slot in range(protocol.top_k)])
    ours = {str(side) for side in OURS}
    told = [b for b in found.run["batch_bits"] if b["side"] in ours]
    wrong = [b for b in told if b["sha256"] != sha256_array(rows)]
    if {b["tokens"] for b in told} != set(protocol.batch_bits.tokens):
        return ["batch_bits: not the protocol's batches"]
    return [f"batch_bits: {b['side']} at {b['tokens']} tokens is not the model's" for b in wrong]


def _batches(found: record.Recorded, protocol: Protocol) -> list[str]:
    """Batches that the protocol does not ask for, or accepts otherwise than they were."""
    there = {b.side for b in found.batches}
    series = tuple(s for s in protocol.series if s.side in there)
    wrong = []
    for b in found.batches:
        order = ordered(series, b.repetition)
        where = f"{b.role} {b.slots}/{b.pool} {b.rows}x{b.cols} {b.series} repetition {b.repetition}"
        if not (
            0 <= b.position < len(order) and order[b.position].name == b.series and order[b.position].side == b.side
        ):
            wrong.append(f"{where}: not at position {b.position}")
        if b.reason != "incorrect" and (b.reason, b.accepted) != accepted_by(b, protocol):
            wrong.append(f"{where}: accepted {b.accepted}, reason {b.reason!r}")
        if not b.time_us > 0 or b.launches != protocol.launches:
            wrong.append(f"{where}: {b.time_us} us a call of {b.launches}")
    return wrong


def write(out: Path, source: Path, protocol_path: Path) -> list[str]:
    """Copy the record in `source` to `out`, sealed by `recorded_dispatch.manifest.json`.

    Returns what `unsealed`, `record.problems` and `disagreements` find; then nothing is written.
    """
    protocol, found = load(protocol_path), record.read(source)
    wrong = unsealed(source) or record.problems(found, protocol) + disagreements(found, protocol)
    if wrong:
        return wrong
    record.FOLDER.copy(source, out, protocol_path, [__name__])
    return []
