# SPDX-License-Identifier: Apache-2.0
"""What of a record of the fast paths can be computed again on this CPU: jobs, launch plans, bits of sampled outputs.

Times and counters cannot. Of the outputs the sampled slots are, whole rows of them, by the model in
moe/q6k_segments.py; digests of whole outputs are the record's word, but that the paths' agree is checked.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.cuda.q6k_plan import plan, tuned
from routeblock.evidence.digest import sha256_array
from routeblock.moe import q6k
from routeblock.moe.q6k_segments import dot
from routeblock.q6k_dispatch import batch_bits, fixture
from routeblock.q6k_dispatch.fixture import Jobs
from routeblock.q6k_dispatch.protocol import OURS, Protocol, Shape, shapes
from routeblock.q6k_dispatch.study import KEY, STUDY, key_of
from routeblock.timing import verification
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import Record


def output(jobs: Jobs, slot: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The rows of one active slot, float32 [rows], by the model."""
    shape = jobs.shape
    weights = fixture.expert_weights(seed, shape.rows, shape.cols, int(jobs.ids[slot]))
    return dot(weights, q6k.quantize_q8_1(jobs.x[slot // shape.top_k])[None])


@cache
def _facts(shape: Shape, seed: int, samples: int) -> dict[str, Any]:
    """What the check of a shape has to say of its jobs and sampled outputs."""
    jobs = fixture.make(shape, seed)
    digests = [{"slot": s, "sha256": sha256_array(output(jobs, s, seed))} for s in jobs.sampled(samples)]
    return {"jobs": jobs.facts(), "samples": digests}


def recompute(record: Record, protocol: Protocol) -> list[Finding]:
    """What of a record is not what the protocol's seed, our plans and our model give."""
    device = record.run["device"]
    told = {tuple(c[n] for n in KEY): c for c in record.run["checks"]}
    wrong = []
    for shape in shapes(protocol):
        check = told.get(key_of(shape))
        if check is None:  # the protocol check reports a shape that was timed and not checked
            continue
        facts = _facts(shape, protocol.seed, protocol.correctness.samples)
        tuning = tuned(shape.sizes, device["multiprocessors"])
        ours = asdict(plan(shape.sizes, tuning, architecture=device["architecture"]))
        if any(check[name] != value for name, value in facts["jobs"].items()):
            wrong.append(Finding(shape.label, Reason.PLANS, "the jobs are not those of the seed"))
        if check["plan"] != ours:
            detail = f"launched as {check['plan']}, where the table has {ours}"
            wrong.append(Finding(shape.label, Reason.VARIANT, detail))
        if check["samples"] != facts["samples"]:
            wrong.append(Finding(shape.label, Reason.PLANS, "sampled outputs are not the model's"))
    return wrong + _first_token(record, protocol)


def _first_token(record: Record, protocol: Protocol) -> list[Finding]:
    ours = {str(side) for side in OURS}
    told = [b for b in record.run["batch_bits"] if b["side"] in ours]
    if {b["tokens"] for b in told} != set(protocol.batch_bits.tokens):
        return [Finding("batch_bits", Reason.PLANS, "not the protocol's batches")]
    digest = _alone(protocol.digest(), protocol)
    wrong = [b for b in told if b["sha256"] != digest]
    return [
        Finding("batch_bits", Reason.PLANS, f"{b['side']} at {b['tokens']} tokens is not the model's") for b in wrong
    ]


_ALONE: dict[str, str] = {}


def _alone(digest: str, protocol: Protocol) -> str:
    """The digest of the first token's outputs, by the model."""
    if digest not in _ALONE:
        jobs = batch_bits.jobs(protocol, 1)
        rows = np.stack([output(jobs, slot, protocol.seed) for slot in range(protocol.top_k)])
        _ALONE[digest] = sha256_array(rows)
    return _ALONE[digest]


def write(out: Path, source: Path, protocol: Path) -> list[Finding]:
    """Copy the record in `source` to `out` if nothing is found; see `timing.verification`."""
    return verification.write(out, STUDY, source, protocol, recompute, rule="recorded_dispatch")
