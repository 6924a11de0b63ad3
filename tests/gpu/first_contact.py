# SPDX-License-Identifier: Apache-2.0
"""Does this machine's GPU, with this extension, give the recorded bits? One command:

    ROUTEBLOCK_EXTENSION=FILE python tests/gpu/first_contact.py [GOLDEN_FOLDER] [RESULT.json] [layer]

Runs the recorded layer through the lane `cuda` (recorded grids, both arrival orders) and the recorded single GEMMs
through the operator, reads off the automatic launch, counts native plans, and compares a grid with and without the
probe. With `layer` the single GEMMs are left out: their kernels are other modules, and where the extension has PTX
alone for a GPU, each is compiled for about a minute, once. Prints one line a check; exits 1 if a bit differs. The
result names digests and launches, so that versions can be compared.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from routeblock.cuda import operators as vllm_ops
from routeblock.cuda.device import open_device, split_grid
from routeblock.cuda.grid_probe import GridProbe, build
from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, sha256_array
from routeblock.moe.awq import pack_awq
from routeblock.moe.launches import Launch
from routeblock.moe.routing import align
from routeblock.route_block.fixtures.fixture import PackedExpert
from routeblock.route_block.runs.cuda import PROBE, CudaLane, open_cuda_lane
from routeblock.route_block.runs.lane import Request
from routeblock.twin import self_test_inputs as inputs

SURFACES = {"w13": "w13", "activation": "act", "w2": "w2", "final": "fin"}
LAUNCHES = {"g246": Launch(64, 128, 246), "g200": Launch(64, 128, 200), "auto": Launch(128, 64, 528)}
CENSUS_CALLS = 200


class GoldenLayer(SimpleNamespace):
    """The recorded layer, as the lane sees a fixture."""

    def shape(self, gemm: str) -> tuple[int, int]:
        """(N, K)."""
        pair = (2 * inputs.INTERMEDIATE, inputs.HIDDEN)
        return pair if gemm == "w13" else (inputs.HIDDEN, inputs.INTERMEDIATE)

    def packed(self, gemm: str) -> Iterator[list[PackedExpert]]:
        """The experts in use in AutoAWQ form, W13 already side by side."""
        if gemm not in self.kept:
            drawn = (inputs.layer_expert(gemm, expert) for expert in self.experts)
            self.kept[gemm] = [[PackedExpert(pack_awq(q), pack_awq(z), s)] for q, z, s in drawn]
        yield from self.kept[gemm]


def golden_layer() -> GoldenLayer:
    """Experts in use, routing and hidden states of the recorded layer."""
    ids, weights = inputs.layer_routing()
    experts = sorted(set(ids.reshape(-1).tolist()))
    rows = np.full(inputs.EXPERTS, -1, np.int32)
    rows[experts] = np.arange(len(experts), dtype=np.int32)
    spec = {"num_experts": inputs.EXPERTS, "block_size": inputs.BLOCK, "group_size": inputs.GROUP}
    return GoldenLayer(
        spec=spec,
        experts=experts,
        expert_rows=rows,
        hidden=inputs.layer_hidden(),
        topk_ids=ids,
        topk_weights=weights,
        kept={},
    )


class Report:
    """Lines as they come, and everything as JSON at the end."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = {"format": "routeblock.first_contact.v1", "checks": {}, "seconds": {}}
        self._started = self._last = time.perf_counter()

    def say(self, name: str, value: Any) -> None:
        self.document[name] = value
        print(f"{name}: {value if isinstance(value, str) else json.dumps(value)}", flush=True)

    def check(self, name: str, holds: bool) -> None:
        self.document["checks"][name] = holds
        print(f"{'same' if holds else 'DIFFERS'}  {name}", flush=True)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.document["seconds"][name], self._last = round(now - self._last, 3), now
        print(f"{now - self._started:7.2f} s  {name}", flush=True)

    @property
    def failed(self) -> list[str]:
        return [name for name, holds in self.document["checks"].items() if not holds]


def bits(array: Any) -> Any:
    """16-bit elements as integers."""
    return np.ascontiguousarray(array).view(np.uint16)


def layers(report: Report, lane: CudaLane, layer: GoldenLayer, golden: Path) -> None:
    """The layer at every recorded launch, then natively under both histories."""
    digests = json.loads((golden / "h200_sha256.json").read_bytes())
    stored = np.load(golden / "h200_grid246.npz", allow_pickle=False)
    for point, launch in LAUNCHES.items():
        for order in inputs.ORDERS:
            plan = align(layer.topk_ids, inputs.EXPERTS, inputs.BLOCK, inputs.arrival(order, layer.topk_ids.size))
            outcome = lane.run(layer, Request(plan, {"w13": launch, "w2": launch}, "H0", 1))  # type: ignore[arg-type]
            for name, theirs in SURFACES.items():
                got = outcome.surfaces[name]
                same = sha256_array(got) == digests[f"{point}.{order}.{theirs}"]
                if point == "g246":
                    same = same and bool((bits(got) == bits(stored[f"{order}.{theirs}"])).all())
                report.check(f"layer {point} {order} {name}", same)
            report.document[f"layer {point} {order}"] = {n: sha256_array(x) for n, x in outcome.surfaces.items()}
        report.lap(f"layer {point}, grids {dict(outcome.grids)}")
    report.say("environment", dict(outcome.environment))
    report.say("telemetry", dict(outcome.telemetry))
    for history in ("H0", "H1"):
        native = lane.run(layer, Request(None, dict.fromkeys(("w13", "w2"), LAUNCHES["g246"]), history, 1))  # type: ignore[arg-type]
        report.say(f"native plan after {history}", native.plan.fingerprint())
        report.check(f"prelude consumed under {history}", native.prelude == (history == "H1"))
    report.lap("native alignment, two histories in one process")
    grid = 3 * int(outcome.environment["sms"])
    request = Request(plan, dict.fromkeys(("w13", "w2"), Launch(64, 128, grid)), "H0", 1)
    assisted = lane.run(layer, request)  # type: ignore[arg-type]
    alone = CudaLane(lane.extension, lane.activation, probed=False).run(layer, request)  # type: ignore[arg-type]
    for name in SURFACES:
        same = bool((bits(assisted.surfaces[name]) == bits(alone.surfaces[name])).all())
        report.check(f"grid {grid} with and without the probe: {name}", same)
    report.lap("unassisted control")


def gemms(report: Report, operators: vllm_ops.VllmOperators, probe: GridProbe, golden: Path) -> None:
    """Every recorded single GEMM: other block sizes, dtypes, groups, fixed zero points, reduction in the dtype."""
    device = open_device(0)
    for file, cases, draw in (
        ("h200_cases.npz", inputs.CASES, inputs.case_inputs),
        ("h200_corners.npz", inputs.CORNERS, inputs.corner_inputs),
    ):
        stored = np.load(golden / file, allow_pickle=False)
        for name, case in cases.items():
            drawn, dtype = draw(name), inputs.DTYPES[case.dtype]
            experts = (
                (drawn.q[e], drawn.z[e] if case.has_zero_points else None, drawn.s[e].astype(dtype))
                for e in range(case.experts)
            )
            weights = vllm_ops.load_weights(experts, case.experts, "cuda")
            rows = np.arange(case.experts, dtype=np.int32)
            a = vllm_ops.to_device(drawn.x.astype(dtype), "cuda")
            unused = vllm_ops.to_device(np.ones(drawn.ids.shape, np.float32), "cuda")
            launch = Launch(*case.launch)
            sms, blocks_per_sm = split_grid(launch.grid, device.sms, vllm_ops.MAX_BLOCKS_PER_SM)
            for order, short in inputs.ORDERS.items():
                plan = align(drawn.ids, case.experts, case.block_size, inputs.arrival(order, drawn.ids.size))
                probe.take()
                probe.answer(sms)
                out = operators.moe_gemm(
                    a,
                    weights,
                    operators.device_plan(plan, rows),
                    unused,
                    top_k=case.top_k,
                    multiply_topk_weights=False,
                    thread_k=launch.thread_k,
                    thread_n=launch.thread_n,
                    blocks_per_sm=blocks_per_sm,
                    lock_sms=max(sms, device.sms),
                    fp32_reduce=case.fp32_reduce,
                )
                probe.answer(None)
                grids = [x.blocks for x in probe.take() if x.thread_sizes]
                same = bool((bits(vllm_ops.to_host(out)) == stored[f"{name}.{short}"].view(np.uint16)).all())
                report.check(f"gemm {name} {order} on {grids}", same and grids == [launch.grid])
    report.lap("single GEMMs")


def automatic(report: Report, operators: vllm_ops.VllmOperators, probe: GridProbe, layer: GoldenLayer) -> None:
    """What the selector chooses for the recorded layer on this GPU, and the bits it gives."""
    import torch

    plan = align(layer.topk_ids, inputs.EXPERTS, inputs.BLOCK)
    placed = operators.device_plan(plan, layer.expert_rows)
    a = vllm_ops.to_device(layer.hidden, "cuda")
    topk_weights = vllm_ops.to_device(layer.topk_weights, "cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    found: dict[str, Any] = {}
    for gemm, top_k in (("w13", inputs.TOP_K), ("w2", 1)):
        weights = vllm_ops.load_weights(
            (inputs.layer_expert(gemm, e) for e in layer.experts), len(layer.experts), "cuda"
        )
        probe.take()
        out = operators.moe_gemm(
            a, weights, placed, topk_weights, top_k=top_k, multiply_topk_weights=gemm == "w2", lock_sms=sms
        )
        launched = [x for x in probe.take() if x.thread_sizes]
        found[gemm] = [{"launch": [*(x.thread_sizes or ()), x.blocks], "kernel": x.kernel} for x in launched]
        found[f"{gemm} bits"] = sha256_array(vllm_ops.to_host(out))
        if gemm == "w13":
            a = operators.silu_and_mul(out)
    report.say("automatic launch", found)
    report.lap("automatic launch")


def census(report: Report, operators: vllm_ops.VllmOperators, layer: GoldenLayer) -> None:
    """How many plans the native alignment gives in one process."""
    ids = vllm_ops.to_device(layer.topk_ids, "cuda")
    prints = [operators.native_align(ids, inputs.EXPERTS, inputs.BLOCK).fingerprint() for _ in range(CENSUS_CALLS)]
    canonical = align(layer.topk_ids, inputs.EXPERTS, inputs.BLOCK).fingerprint()
    report.say("native plans", {"calls": CENSUS_CALLS, "distinct": len(set(prints)), "stable": prints.count(canonical)})
    report.lap("census")


def main() -> int:
    """Run every check; 0 when all bits are the recorded ones, 1 when one differs, 2 when the machine cannot."""
    golden = Path(sys.argv[1] if len(sys.argv) > 1 else "fixtures/golden")
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    try:
        if not os.environ.get(PROBE):
            os.environ[PROBE] = str(build(Path(tempfile.mkdtemp()) / "grid_probe.so"))
        lane = open_cuda_lane()
        report = Report()
        report.say("extension", lane.extension.name)
        layer = golden_layer()
        layers(report, lane, layer, golden)
        operators = vllm_ops.VllmOperators(lane.extension, lane.activation)
        report.say("schemas", operators.schemas)
        probe = GridProbe(lane.extension)
        if "layer" not in sys.argv[3:]:
            gemms(report, operators, probe, golden)
        automatic(report, operators, probe, layer)
        census(report, operators, layer)
    except InputError as e:
        print(e, file=sys.stderr)
        return 2
    if out is not None:
        out.write_bytes(canonical_json(report.document))
    print(f"{len(report.document['checks'])} checks, {len(report.failed)} differ")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
