# SPDX-License-Identifier: Apache-2.0
"""What the real operator does with launches, with one group over K, and with a block that has no expert: recorded.

`write` starts a process for each kind of kernel, because the first launch of each compiles it, and one for each
placement of the weights before which a missing expert reads, because that can end in an illegal address.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.cuda.device import open_device
from routeblock.cuda.operators import (
    EXTENSION_VARIABLE,
    DevicePlan,
    DeviceWeights,
    VllmOperators,
    find_extension,
    load_weights,
    to_device,
    to_host,
    wheel_version,
)
from routeblock.errors import InputError
from routeblock.evidence.digest import code_digest, sha256_array, sha256_file, sha256_json
from routeblock.evidence.files import write_json
from routeblock.evidence.gpu_record import GpuRecord, plain
from routeblock.route_block.gpu import operator_cases as cases

FORMAT = "routeblock.operator.v1"
RUN = "operator.json"
FOLDER = GpuRecord("operator", (RUN,), "operator.tar.gz")
LIMIT_S = 240.0
BEHIND, OWN = "behind_other_weights", "own_allocation"
DEVICE = "cuda"


def parts() -> list[str]:
    """What one process each records, in the order in which they may begin: the first group side by side."""
    kinds = [f"one_group-{'u4' if zero_points else 'u4b8'}-{dtype}" for zero_points, dtype in cases.KINDS]
    return [*kinds, "launches", "expert_map", f"missing-{BEHIND}", f"missing-{OWN}"]


class _Rig:
    """The operators and what was put on the device for a case."""

    def __init__(self) -> None:
        named = os.environ.get(EXTENSION_VARIABLE)
        self.extension = find_extension(Path(named) if named else None)
        self.operators = VllmOperators(self.extension, None, DEVICE)
        self.device = open_device(0)

    def weights(self, drawn: cases.Inputs) -> DeviceWeights:
        zeros = drawn.zeros
        experts = ((drawn.q[e], None if zeros is None else zeros[e], drawn.scales[e]) for e in range(len(drawn.q)))
        return load_weights(experts, len(drawn.q), DEVICE)

    def placed(self, case: cases.Case, drawn: cases.Inputs, order: str) -> DevicePlan:
        return self.operators.device_plan(drawn.plan(case, order), np.arange(case.experts, dtype=np.int32))

    def gemm(self, case: cases.Case, drawn: cases.Inputs, weights: DeviceWeights, plan: DevicePlan) -> Any:
        """The output, on the host; raises InputError where the operator refuses."""
        import torch

        out = self.operators.moe_gemm(
            to_device(drawn.x, DEVICE),
            weights,
            plan,
            to_device(drawn.topk_weights, DEVICE),
            top_k=case.top_k,
            multiply_topk_weights=case.multiply,
            thread_k=case.thread_k,
            thread_n=case.thread_n,
            blocks_per_sm=case.blocks_per_sm,
            lock_sms=self.device.sms,
        )
        torch.cuda.synchronize()
        return to_host(out)

    def identity(self) -> dict[str, Any]:
        import torch

        return {
            "gpu": self.device.name,
            "sms": self.device.sms,
            "extension": self.extension.name,
            "extension_sha256": sha256_file(self.extension),
            "vllm": wheel_version(self.extension) or "unknown",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "schemas": sha256_json(self.operators.schemas),
        }


def record_part(part: str, out: Path) -> None:
    """Record one of `parts` into the file `out`."""
    name, _, rest = part.partition("-")
    work: dict[str, Callable[[_Rig, str], Any]] = {
        "one_group": _one_group,
        "launches": lambda rig, _: _launches(rig),
        "expert_map": lambda rig, _: _expert_map(rig),
        "missing": _missing,
    }
    rig = _Rig()
    write_json(out, {"part": part, "identity": rig.identity(), "found": work[name](rig, rest)})


def _outputs(rig: _Rig, case: cases.Case) -> dict[str, Any]:
    drawn = cases.draw(case)
    weights = rig.weights(drawn)
    found: dict[str, Any] = {"name": case.name}
    for order in cases.ORDERS:
        try:
            found[order] = sha256_array(rig.gemm(case, drawn, weights, rig.placed(case, drawn, order)))
        except InputError as e:
            return {"name": case.name, "refused": e.what}
    return found


def _one_group(rig: _Rig, kind: str) -> list[dict[str, Any]]:
    zero_points, dtype = next(k for k in cases.KINDS if f"{'u4' if k[0] else 'u4b8'}-{k[1]}" == kind)
    return [_outputs(rig, case) for case in cases.one_group() if case.kind == (zero_points, dtype)]


def _launches(rig: _Rig) -> list[dict[str, Any]]:
    return [_outputs(rig, case) for case in cases.launches()]


def _expert_map(rig: _Rig) -> dict[str, Any]:
    """What the alignment makes of a routing whose experts are not all here, with the map, as the fused path does."""
    case = cases.MISSING
    ids = to_device(cases.draw(case).ids, DEVICE)
    here = rig.operators.native_align(ids, case.experts, case.block_size, to_device(cases.expert_map(), DEVICE))
    return {"expert_ids": here.expert_ids.tolist(), "blocks": here.blocks()}


def _missing(rig: _Rig, placement: str) -> dict[str, Any]:
    """Expert id -1 in one block, before weights that stand behind others, or at the beginning of an allocation."""
    import torch

    case = cases.MISSING
    drawn = cases.draw(case)
    whole = rig.weights(drawn)
    if placement == BEHIND:  # the first expert's weights are what stands before those of the others
        q, zeros, scales = (x[1:] for x in (whole.q, whole.zeros, whole.scales))
        weights = DeviceWeights(q, zeros, scales, whole.n, whole.k)
    else:
        weights = whole
    plan = drawn.plan(case, "stable")
    shift = 1 if placement == BEHIND else 0
    rows = np.arange(-shift, case.experts - shift, dtype=np.int32)
    placed = rig.operators.device_plan(plan, np.arange(case.experts, dtype=np.int32))
    blocks = plan.num_blocks
    experts = rows[plan.expert_ids]
    if placement == OWN:
        experts[cases.MISSING_BLOCK] = -1
    full = np.full(placed.expert_rows.shape[0], -1, np.int32)
    full[:blocks] = experts
    placed = DevicePlan(
        placed.sorted_token_ids, to_device(full, DEVICE), placed.num_tokens_post_padded, placed.block_size
    )
    missing = [int(r) for b in range(blocks) if experts[b] == -1 for r in plan.members(b)]
    try:
        out = rig.gemm(case, drawn, weights, placed)
    except (InputError, RuntimeError) as e:
        return {"placement": placement, "outcome": "error", "error": str(e).splitlines()[0], "routes": missing}
    del torch
    mine = out[missing].astype(np.float32)
    others = np.delete(out, missing, axis=0)
    return {
        "placement": placement,
        "outcome": "returned",
        "routes": missing,
        "written": int((~np.isnan(mine).all(axis=1)).sum()),
        "not_finite": int((~np.isfinite(mine)).sum()),
        "sha256": sha256_array(np.ascontiguousarray(out[missing])),
        "others_sha256": sha256_array(np.ascontiguousarray(others)),
    }


def write(out: Path, *, progress: Callable[[str], None] = print) -> None:
    """Record every part into `out`/operator.json, sealed and packed. Raises InputError when a part fails that should
    not: the process of a missing expert may end as it likes, and that is what is recorded of it.
    """
    out.mkdir(parents=True, exist_ok=True)
    kinds = [part for part in parts() if part.startswith("one_group")]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        found |= _run(kinds, Path(folder))
        progress("one group")
        for part in parts():
            if part not in found:
                found |= _run([part], Path(folder))
                progress(part)
    identities = [document["identity"] for document in found.values() if "identity" in document]
    if any(i != identities[0] for i in identities):
        raise InputError(
            "parts of several identities",
            where="study-a record-operator",
            limit="one GPU and extension for all",
            way_out="record again while nothing changes",
        )
    document = {
        "format": FORMAT,
        "seed": cases.SEED,
        "identity": {"source": code_digest(__name__), **identities[0]},
        "parts": {part: document["found"] for part, document in found.items()},
    }
    write_json(out / RUN, document)
    FOLDER.seal(out, Path(cases.__file__), sha256_json({"seed": cases.SEED}), __name__)


def _run(names: Sequence[str], folder: Path) -> dict[str, Any]:
    """The documents of parts that run side by side."""
    started = {}
    for part in names:
        options = ["--out", str(folder / f"{part}.json")]
        command = [sys.executable, "-m", "routeblock", "study-a", "operator-part", part, *options]
        started[part] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    found: dict[str, Any] = {}
    for part, child in started.items():
        try:
            _, errors = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            _, errors = child.communicate()
        path = folder / f"{part}.json"
        if path.is_file():
            found[part] = plain(path)
        elif part.startswith("missing"):
            last = (errors.strip().splitlines() or [""])[-1]
            found[part] = {"found": {"placement": part.partition("-")[2], "outcome": "process ended", "error": last}}
        else:
            raise InputError(
                (errors.strip().splitlines() or [f"exit {child.returncode}"])[-1],
                where=f"record-operator, {part}",
                limit=f"every part ends well within {LIMIT_S:g} s",
                way_out="mend its cause, and record again",
            )
    return found
