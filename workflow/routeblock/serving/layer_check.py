# SPDX-License-Identifier: Apache-2.0
"""The engine's first MoE layer against the twin: same inputs, same plan, every bit of four surfaces.

Weights are not in the record: they are drawn again from the protocol's seed, as `model` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.checkpoint.families import PROJECTIONS
from routeblock.checkpoint.generator import drawn_weights
from routeblock.evidence.digest import sha256_array
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import seal
from routeblock.evidence.tensor_store import read_store, write_store
from routeblock.moe.automatic_launch import automatic_launch
from routeblock.moe.awq import unpack_awq
from routeblock.moe.devices import device
from routeblock.moe.launches import Launch
from routeblock.moe.marlin_launch import Gemm, Weights
from routeblock.moe.routing import AlignedPlan, align, block_size_for
from routeblock.serving.layer_capture import INPUTS, PLAN, SURFACES
from routeblock.serving.model import spec_of
from routeblock.serving.protocol import Model, Protocol, load
from routeblock.timing.record import usable
from routeblock.twin.layer import GemmWeights, moe_layer
from routeblock.vllm_plugin.injection import arrivals

TENSORS = "captured.xz"
DOCUMENT = "layer.json"
OBSERVED = "observed.json"


@dataclass(frozen=True)
class Checked:
    """One captured call: its injected order, whether its plan is that order's, and how many elements differ."""

    arrivals: str
    batch: int
    plan: str
    plan_as_injected: bool
    launches: Mapping[str, Launch]
    elements: Mapping[str, int]
    differ: Mapping[str, int]


def write(path: Path, captures: Mapping[str, Mapping[str, NDArray[Any]]]) -> dict[str, dict[str, str]]:
    """Write captured calls to one store, which keeps what two have alike once; returns the digests, by call and name.

    A call is an order of arrival and a batch: `reversed/21`.
    """
    digests = {call: {name: sha256_array(x) for name, x in one.items()} for call, one in captures.items()}
    write_store(path, {digests[call][name]: x for call, one in captures.items() for name, x in one.items()})
    return digests


def check(
    path: Path, digests: Mapping[str, Mapping[str, str]], protocol: Protocol, gpu: str, version: str
) -> list[Checked]:
    """Every captured call of the protocol, computed again on this CPU. Raises InputError for a store without one."""
    stored = read_store(path)
    names = [f"{word}/{batch}" for word in protocol.captured.arrivals for batch in protocol.captured.batches]
    with usable(path):
        calls = {call: {name: stored[digests[call][name]] for name in (*INPUTS, *PLAN, *SURFACES)} for call in names}
    used = sorted({int(e) for one in calls.values() for e in one["topk_ids"].reshape(-1)})
    w13, w2 = layer_weights(protocol.model, used)
    return [_check(call, one, protocol, gpu, version, used, w13, w2) for call, one in calls.items()]


def layer_weights(model: Model, experts: list[int]) -> tuple[GemmWeights, GemmWeights]:
    """W13 (gate first) and W2 of these experts of the first layer, one row each."""
    draw = drawn_weights(spec_of(model))

    def stacked(*projections: str) -> GemmWeights:
        found = []
        for expert in experts:
            parts = [draw(0, expert, p) for p in projections]
            q, z = (np.concatenate([unpack_awq(x) for x in xs], axis=1) for xs in (
                [p.qweight for p in parts], [p.qzeros for p in parts if p.qzeros is not None]
            ))  # fmt: skip
            found.append((q, z, np.concatenate([p.scales for p in parts], axis=1)))
        q, z, s = (np.stack(x) for x in zip(*found, strict=True))
        return GemmWeights(q, z, s)

    return stacked(*PROJECTIONS[:2]), stacked(PROJECTIONS[2])


def _check(
    call: str,
    one: Mapping[str, NDArray[Any]],
    protocol: Protocol,
    gpu: str,
    version: str,
    used: list[int],
    w13: GemmWeights,
    w2: GemmWeights,
) -> Checked:
    word, _, batch = call.partition("/")
    model, ids = protocol.model, one["topk_ids"]
    tokens, top_k = ids.shape
    block = block_size_for(tokens, top_k, model.experts)
    due = align(ids, model.experts, block, arrivals(word, ids.size))
    plan = AlignedPlan(
        one["sorted_token_ids"].astype(np.int32), one["expert_ids"].astype(np.int32),
        int(one["num_tokens_post_padded"].reshape(-1)[0]), int(one["block_size"].reshape(-1)[0]), ids.size,
    )  # fmt: skip
    rows = np.full(model.experts, -1, np.int32)
    rows[used] = np.arange(len(used))
    on_rows = AlignedPlan(
        plan.sorted_token_ids, rows[plan.expert_ids], plan.num_tokens_post_padded, plan.block_size, plan.num_routes
    )
    weights = Weights(model.dtype, True, model.group_size)
    launches = {}
    for name, n, k in (("w13", 2 * model.intermediate, model.hidden), ("w2", model.hidden, model.intermediate)):
        found = automatic_launch(device(gpu), version, weights, block, Gemm(n, k, ids.size)).launch
        assert found is not None, (gpu, version, block)
        launches[name] = found
    surfaces = moe_layer(
        one["hidden"].view(model.dtype), ids, one["topk_weights"], w13, w2, on_rows, architecture="hopper",
        w13_launch=launches["w13"], w2_launch=launches["w2"], group_size=model.group_size, expert_map=rows,
    )  # fmt: skip
    seen = {name: one[name].view(np.uint16) for name in SURFACES}
    ours = {name: surfaces[name].view(np.uint16) for name in SURFACES}
    return Checked(
        word,
        int(batch),
        plan.fingerprint(),
        plan.fingerprint() == due.fingerprint() and np.array_equal(plan.sorted_token_ids, due.sorted_token_ids),
        launches,
        {name: seen[name].size for name in SURFACES},
        {name: int((seen[name].reshape(ours[name].shape) != ours[name]).sum()) for name in SURFACES},
    )


def write_document(out: Path, record: Path, protocol_path: Path) -> list[str]:
    """Write `layer.json` with every captured call's result, sealed; returns what differs, one line each.

    Raises InputError for a record that lacks what is needed.
    """
    protocol = load(protocol_path)
    with usable(record / OBSERVED):
        digests = json.loads((record / OBSERVED).read_bytes())["captured"]
        run = json.loads((record / "run.json").read_bytes())
        gpu, version = str(run["device"]["name"]), str(run["engine"]["vllm"])
    found = check(record / TENSORS, digests, protocol, gpu, version)
    calls = [asdict(one) | {"launches": {k: list(v) for k, v in one.launches.items()}} for one in found]
    write_json(out / DOCUMENT, {"gpu": gpu, "vllm": version, "calls": calls})
    seal(
        out / "layer.manifest.json",
        rule="serving_layer",
        outputs=[out / DOCUMENT],
        inputs=[protocol_path, *(record / name for name in (TENSORS, OBSERVED, "run.json"))],
        parameters={},
        modules=[__name__],
    )
    wrong = [
        f"{c.arrivals}, batch of {c.batch}: another plan than was injected" for c in found if not c.plan_as_injected
    ]
    wrong += [
        f"{c.arrivals}, batch of {c.batch}: {n} of {c.elements[name]} elements of {name} differ from the twin"
        for c in found
        for name, n in c.differ.items()
        if n
    ]
    return wrong
