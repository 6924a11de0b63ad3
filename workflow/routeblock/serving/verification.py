# SPDX-License-Identifier: Apache-2.0
"""What of a record of the engine can be held against its protocol on this CPU, without vLLM.

Completions: every planned one is there, once, whole, and possible. Checks before timing: the tokens of canonical order
that one process timed are those that the repeating processes recorded. That the engine gave them is the record's word.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.evidence.archive import CONTENTS, changed
from routeblock.evidence.digest import sha256_bytes, sha256_file
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal
from routeblock.serving import completions
from routeblock.serving.completions import Served
from routeblock.serving.kinds import Alignment, Clock, Kind
from routeblock.serving.layer_check import OBSERVED, TENSORS
from routeblock.serving.protocol import Protocol, load, order, processes
from routeblock.serving.study import STUDY
from routeblock.timing import check
from routeblock.timing.reasons import Finding, Reason
from routeblock.timing.record import Record, usable

FILES = (*STUDY.files, completions.TABLE, OBSERVED, TENSORS)
ROUNDING = 1e-3  # of a log probability, computed in float32
Place = tuple[str, str, int, bool, int, int, int]


def recompute(record: Record, protocol: Protocol) -> list[Finding]:
    """Where completions, checks and observed plans of a record leave its protocol; empty if nowhere."""
    table = record.folder / completions.TABLE
    observed = read_observed(record.folder)
    with usable(record.folder):
        served, wrong = _looked_at(table, sha256_file(table), protocol.model_dump_json())
        return [
            *wrong,
            *_checks(record, served, protocol),
            *_plans(observed, protocol),
        ]


@lru_cache(maxsize=2)
def _looked_at(table: Path, _: str, protocol: str) -> tuple[list[Served], list[Finding]]:
    """The completions of a file and what is wrong with them; the same bytes are looked at once."""
    served = completions.read(table)
    return served, list(_completions(served, Protocol.model_validate_json(protocol)))


def findings(record: Record, protocol: Protocol) -> list[Finding]:
    """The protocol check of the timed batches, then `recompute`."""
    with usable(record.folder):
        found = check.findings(STUDY, record, protocol)
    return found + recompute(record, protocol)


def read_observed(folder: Path) -> dict[str, Any]:
    """observed.json of a record's folder. Raises InputError if it cannot be read."""
    with usable(folder / OBSERVED):
        found: dict[str, Any] = json.loads((folder / OBSERVED).read_bytes())
        return found


def planned(protocol: Protocol) -> Iterator[Place]:
    """Every completion that the protocol orders."""
    for process in processes(protocol):
        if process.kind is not Kind.REPEAT:
            continue
        condition = str(process.mode), str(process.alignment), process.number
        for batch, repeat in order(protocol, process):
            for prompt in range(batch):
                yield (*condition, False, batch, repeat, prompt)
        if process.alone:
            for prompt in range(max(protocol.alone)):
                yield (*condition, True, max(protocol.alone), 0, prompt)


def place_of(s: Served) -> Place:
    """Where a completion stands in the protocol."""
    return s.mode, s.alignment, s.process, s.alone, s.batch, s.repeat, s.prompt


def _completions(served: list[Served], protocol: Protocol) -> Iterator[Finding]:
    where = completions.TABLE
    due, there = Counter(planned(protocol)), Counter(map(place_of, served))
    for place in due - there:
        yield Finding(where, Reason.BATCH_MISSING, f"no completion {place}")
    for place in there - due:
        yield Finding(where, Reason.BATCH_TWICE, f"completion {place} is not planned, or is there twice")
    length, least = protocol.completion_tokens, -math.log(protocol.model.vocabulary) - ROUNDING
    for tokens, logprobs in {(s.tokens, s.logprobs) for s in served}:
        if len(tokens) != 4 * length or len(logprobs) != 4 * length:
            yield Finding(where, Reason.COUNTS, f"a completion of {len(tokens) / 4:g} tokens, {length} are asked for")
            continue
        ids, values = np.frombuffer(tokens, "<i4"), np.frombuffer(logprobs, "<f4")
        if ids.min() < 0 or ids.max() >= protocol.model.vocabulary:
            yield Finding(where, Reason.BITS, f"token {ids.min()} or {ids.max()} is not in the vocabulary")
        # A greedy token is the most likely one, so no less likely than all alike.
        if not (np.isfinite(values).all() and values.max() <= 0 and values.min() >= least):
            yield Finding(where, Reason.BITS, "a log probability that no greedy token can have")


def _checks(record: Record, served: list[Served], protocol: Protocol) -> Iterator[Finding]:
    """The canonical tokens of the process that timed are those of the repeating processes' first repeat."""
    for stated in record.run["checks"]:
        if stated["batch"] not in protocol.batches:  # the protocol check reports it
            continue
        ours = [
            s
            for s in served
            if (s.mode, s.alignment, s.process, s.alone) == (stated["mode"], Alignment.CANONICAL, 1, False)
            and (s.batch, s.repeat) == (stated["batch"], 0)
        ]
        digest = sha256_bytes(b"".join(s.tokens for s in sorted(ours, key=lambda s: s.prompt)))
        if set(stated["canonical_sha256"]) != {digest}:
            detail = "the canonical completions that were timed are not those of the repeating processes"
            yield Finding(f"check of {stated['mode']}, batch of {stated['batch']}", Reason.BITS, detail)


def _plans(observed: dict[str, Any], protocol: Protocol) -> Iterator[Finding]:
    due = Counter(
        (batch, repeat, str(clock))
        for batch in protocol.batches
        for repeat in range(protocol.observed.repeats)
        for clock in Clock
    )
    there = Counter((p["batch"], p["repeat"], p["clock"]) for p in observed["plans"])
    if due != there:
        yield Finding(OBSERVED, Reason.COUNTS, f"{sum(there.values())} plans, {sum(due.values())} are asked for")
    for p in observed["plans"]:
        tokens = p["batch"] * (protocol.prompts.tokens if p["clock"] == Clock.PREFILL else 1)
        if p["tokens"] != tokens:
            yield Finding(OBSERVED, Reason.COUNTS, f"{p['clock']} of {p['batch']}: {p['tokens']} tokens, not {tokens}")
    if not {*observed["captured_tokens"]} >= {*protocol.captured_batches}:
        yield Finding(OBSERVED, Reason.COUNTS, f"graphs of {observed['captured_tokens']} tokens were captured")


def write(out: Path, source: Path, protocol_path: Path) -> list[Finding]:
    """Copy the record in `source` to `out`, sealed, if nothing is found: digests first, then everything else."""
    protocol, record = load(protocol_path), STUDY.read(source)
    files = changed((source / name for name in FILES), source / CONTENTS)
    wrong = [Finding(str(path), Reason.SEAL, "not the bytes that were recorded") for path in files]
    wrong = wrong or findings(record, protocol)
    if wrong:
        return wrong
    for name in FILES:
        with atomic_file(out / name) as tmp:
            shutil.copyfile(source / name, tmp)
    seal(
        out / "recorded_serving.manifest.json",
        rule="recorded_serving",
        outputs=[out / name for name in FILES],
        inputs=[protocol_path, source / CONTENTS, *(source / name for name in FILES)],
        parameters={},
        modules=[__name__],
    )
    return []
