# SPDX-License-Identifier: Apache-2.0
"""A committed record of the cost, proved again on this CPU: its files, its routings and plans, the variants that ran.

Times cannot be computed again. Nor can what the GPU wrote: that every arm's plan was the reference's is the record's
word, but the reference's plans are ours, from the protocol's seed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from routeblock.alignment_cost import record, routings
from routeblock.alignment_cost.batches import Batch
from routeblock.alignment_cost.measure import planned
from routeblock.alignment_cost.protocol import Arm, Point, Protocol, load
from routeblock.cuda.align_variants import Gpu, Problem, serving
from routeblock.errors import InputError
from routeblock.evidence.archive import CONTENTS
from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import seal

MANIFEST = "recorded_alignment.manifest.json"
# Shared memory that a block can ask for, bytes: CUDA programming guide, technical specifications by capability.
SHARED_BYTES = {"sm_90": 227 * 1024}
_KEY = ("campaign", "experts", "top_k", "tokens")


def unsealed(source: Path) -> list[str]:
    """The files of a record that are not what the recording machine listed in `contents.json`.

    Raises InputError if that cannot be read.
    """
    try:
        listed = json.loads((source / CONTENTS).read_text(encoding="utf-8"))
        digests = {name: entry["sha256"] for name, entry in listed.items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as e:
        raise InputError(
            f"no list of contents: {e}",
            where=str(source / CONTENTS),
            limit="the contents.json of a recorded archive is needed",
            way_out="unpack the archive again",
        ) from e
    return [
        f"{source / name}: not the bytes that were recorded"
        for name in record.FILES
        if digests.get(name) != sha256_file(source / name)
    ]


def disagreements(found: record.Recorded, protocol: Protocol) -> list[str]:
    """What of a record is not what the protocol's seed and our own table of variants give, one line each.

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
    wrong = [] if len(told) == len(found.run["checks"]) else ["a point was checked twice"]
    for point in planned(protocol):
        check = told.pop((str(point.campaign), point.experts, point.top_k, point.tokens), None)
        if check is not None:
            wrong += [f"{point.label}: {line}" for line in _other(check, point, protocol.seed, gpu)]
    wrong += [f"{' '.join(map(str, key))}: no point of the protocol" for key in told]
    return wrong + _batches(found, gpu)


def _other(check: dict[str, Any], point: Point, seed: int, gpu: Gpu) -> list[str]:
    wrong = []
    if check["canonical_sha256"] != routings.digests(point, seed):
        wrong.append("the plans are not those of its seed")
    if check["block_size"] != point.block_size:
        wrong.append(f"block size {check['block_size']}, where vLLM takes {point.block_size}")
    ours = _variant(point.tokens * point.top_k, point.experts, point.block_size, gpu)
    if check["variant"] != ours:
        wrong.append(f"variant {check['variant']}, where the table has {ours}")
    return wrong


def _variant(routes: int, experts: int, block_size: int, gpu: Gpu) -> str:
    return serving(Problem(routes, experts, block_size), gpu).name


def _batches(found: record.Recorded, gpu: Gpu) -> list[str]:
    """Batches of the canonical arm that name another variant, and points that were timed and not checked."""
    checked = {tuple(c[n] for n in _KEY) for c in found.run["checks"]}
    wrong = []
    for b in {(*_place(b), b.variant): b for b in found.batches if b.arm == Arm.CANONICAL}.values():
        label = f"{b.campaign} E={b.experts} k={b.top_k} M={b.tokens}"
        if _place(b) not in checked:
            wrong.append(f"{label}: timed, not checked")
        if b.variant != _variant(b.tokens * b.top_k, b.experts, b.block_size, gpu):
            wrong.append(f"{label}: batches of variant {b.variant or 'none'}")
    return wrong


def _place(b: Batch) -> tuple[Any, ...]:
    return tuple(getattr(b, n) for n in _KEY)


def write(out: Path, source: Path, protocol_path: Path, *, code: str) -> list[str]:
    """Copy the record in `source` to `out`, sealed by `recorded_alignment.manifest.json`.

    Returns what `unsealed`, `record.problems` and `disagreements` find; then nothing is written.
    """
    protocol, found = load(protocol_path), record.read(source)
    wrong = unsealed(source) or record.problems(found, protocol) + disagreements(found, protocol)
    if wrong:
        return wrong
    for name in record.FILES:
        with atomic_file(out / name) as tmp:
            shutil.copyfile(source / name, tmp)
    seal(
        out / MANIFEST,
        rule="recorded_alignment",
        outputs=[out / name for name in record.FILES],
        inputs=[protocol_path, source / CONTENTS, *(source / name for name in record.FILES)],
        parameters={},
        code=code,
    )
    return []
