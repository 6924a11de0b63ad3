# SPDX-License-Identifier: Apache-2.0
"""Are derived launches and predictions right on this machine's GPU? One command:

    ROUTEBLOCK_EXTENSION=FILE python tests/gpu/check_diagnosis.py RESULT.json [PLANS] [VERSION]

Launches: six shapes that the rule was not written from, at every block size, left to the operator's own selection,
beside what the rule derives for the vLLM release VERSION (default: that of the extension's wheel). Predictions: PLANS
random legal plans (default 2,000) of the study's layer shape against the canonical one, a third at each of three grids,
and a fifth of as many at each of five shapes drawn from a seed: rows whose bits change must be among the predicted.
Weights are random bits on the GPU. Prints one line a check; exits 1 if a launch or a row is wrong. Where the extension
has PTX alone for the GPU, each weight type and dtype is compiled once, for about a minute.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.cuda import operators as vllm_ops
from routeblock.cuda.device import open_device, split_grid
from routeblock.cuda.grid_probe import GridProbe, build
from routeblock.diagnose.gpu_check import PLANS, SEED, SHAPES, Case, cases
from routeblock.diagnose.routings import draw
from routeblock.errors import InputError
from routeblock.evidence.files import write_json
from routeblock.moe.automatic_launch import derived_launch
from routeblock.moe.devices import device as device_named
from routeblock.moe.marlin_launch import Gemm, Weights
from routeblock.moe.partition import BLOCK_SIZES
from routeblock.moe.routing import AlignedPlan, align
from routeblock.route_block.runs.cuda import PROBE, open_cuda_lane


class Checker:
    """The operators, the probe, and what was found."""

    def __init__(self) -> None:
        if not os.environ.get(PROBE):
            os.environ[PROBE] = str(build(Path(tempfile.mkdtemp()) / "grid_probe.so"))
        self.lane = open_cuda_lane()
        self.operators = vllm_ops.VllmOperators(self.lane.extension, self.lane.activation)
        self.probe = GridProbe(self.lane.extension)
        self.gpu = open_device(0)
        self.document: dict[str, Any] = {"gpu": self.gpu.name, "launches": [], "predictions": []}
        self.faults = 0

    def say(self, line: str, holds: bool) -> None:
        """Print a check."""
        self.faults += not holds
        print(f"{'ok   ' if holds else 'WRONG'} {line}", flush=True)

    def weights(self, n: int, k: int, weights: Weights, experts: int) -> vllm_ops.DeviceWeights:
        """Random bits in Marlin's form, on the GPU."""
        import torch

        made = torch.Generator(device="cuda").manual_seed(SEED)
        groups = 1 if weights.group_size in (-1, k) else k // weights.group_size

        def words(*shape: int) -> Any:
            return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device="cuda", generator=made).int()

        scales = torch.rand((experts, groups, n), device="cuda", generator=made) * 0.006 + 0.002
        return vllm_ops.DeviceWeights(
            words(experts, k // 16, 2 * n),
            words(experts, groups, n // 8) if weights.zero_points else None,
            scales.to(getattr(torch, weights.dtype)),
            n,
            k,
        )

    def run(self, a: Any, weights: vllm_ops.DeviceWeights, plan: AlignedPlan, experts: int, **options: Any) -> Any:
        """One GEMM; options as `VllmOperators.moe_gemm` has them."""
        import torch

        placed = self.operators.device_plan(plan, np.arange(experts, dtype=np.int32))
        given = options.pop("topk_weights", None)
        unused = torch.ones(plan.num_routes, device="cuda") if given is None else given
        return self.operators.moe_gemm(a, weights, placed, unused, **options)

    def launches(self, version: str) -> None:
        """The operator's own choice beside the derived one."""
        import torch

        gpu = device_named(self.gpu.name)
        for n, k, group, dtype, zero_points, experts, tokens, top_k in SHAPES:
            kind = Weights(dtype, zero_points, group)
            weights = self.weights(n, k, kind, experts)
            a = torch.randn((tokens, k), device="cuda").to(getattr(torch, dtype))
            ids = draw(tokens, top_k, experts, SEED)[0]
            for block in BLOCK_SIZES:
                derived = derived_launch(gpu, version, kind, block, Gemm(n, k, tokens * top_k))
                self.probe.take()
                self.run(
                    a, weights, align(ids, experts, block), experts, top_k=top_k, multiply_topk_weights=False,
                    lock_sms=self.gpu.sms,
                )  # fmt: skip
                torch.cuda.synchronize()
                seen = [(*x.thread_sizes, x.blocks) for x in self.probe.take() if x.thread_sizes]
                holds = seen == [derived.launch]
                line = f"N={n} K={k} group {group} {dtype} {kind.type} blocks of {block}, {tokens * top_k} routes"
                self.say(f"{line}: {seen}, derived {derived.launch}", holds)
                self.document["launches"].append(
                    {"shape": [n, k, group, dtype, zero_points], "routes": tokens * top_k, "block_size": block,
                     "seen": [list(x) for x in seen], "derived": derived.launch and list(derived.launch)}
                )  # fmt: skip

    def predictions(self, case: Case) -> None:
        """Random plans against the canonical one."""
        import torch

        layer, launch, tokens = case.layer, case.launch, case.tokens
        experts, top_k, kind = layer.experts, layer.top_k, layer.weights
        w13 = self.weights(*layer.gemm("w13", 1)[:2], kind, experts)
        w2 = self.weights(*layer.gemm("w2", 1)[:2], kind, experts)
        hidden = (torch.randn((tokens, layer.hidden), device="cuda") * 0.5).to(getattr(torch, kind.dtype))
        topk_weights = torch.rand((tokens * top_k,), device="cuda")
        sms, per_sm = split_grid(launch.grid, self.gpu.sms, vllm_ops.MAX_BLOCKS_PER_SM)
        options: dict[str, Any] = {
            "thread_k": launch.thread_k, "thread_n": launch.thread_n, "blocks_per_sm": per_sm,
            "lock_sms": max(sms, self.gpu.sms), "topk_weights": topk_weights,
        }  # fmt: skip

        def surfaces(plan: AlignedPlan) -> list[Any]:
            self.probe.answer(sms)
            first = self.run(hidden, w13, plan, experts, top_k=top_k, multiply_topk_weights=False, **options)
            second = self.run(
                self.operators.silu_and_mul(first), w2, plan, experts, top_k=1, multiply_topk_weights=True, **options
            )
            self.probe.answer(None)
            return [first.view(torch.int16), second.view(torch.int16)]

        base = case.base
        kept, home = surfaces(base), base.block_of()
        predicted, changed, outside = [0, 0], [0, 0], 0
        for plan in case.orders():
            rows = case.predicted(home, plan.block_of())
            for place, (one, two, may) in enumerate(zip(kept, surfaces(plan), rows, strict=True)):
                did = (one != two).any(dim=1).cpu().numpy()
                predicted[place] += int(may.sum())
                changed[place] += int((did & may).sum())
                outside += int((did & ~may).sum())
        shares = [f"{c} of {p}" for c, p in zip(changed, predicted, strict=True)]
        what = f"{layer.document()} at {tokens} tokens, {tuple(launch)}, {case.plans} plans"
        self.say(f"{what}: {outside} rows outside; changed of predicted: W13 {shares[0]}, W2 {shares[1]}", outside == 0)
        self.document["predictions"].append(
            {"layer": layer.document(), "tokens": tokens, "launch": list(launch), "plans": case.plans,
             "outside": outside, "predicted": predicted, "changed": changed}
        )  # fmt: skip


def main() -> int:
    """Run every check; 0 when all hold, 1 when one does not, 2 when the machine cannot."""
    out, plans = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else PLANS
    try:
        checker = Checker()
        version = sys.argv[3] if len(sys.argv) > 3 else vllm_ops.wheel_version(checker.lane.extension)
        if version is None:
            print("the extension is in no wheel: name its vLLM release as the third argument", file=sys.stderr)
            return 2
        checker.document["vllm"] = version
        checker.launches(version)
        for case in cases(plans):
            checker.predictions(case)
    except InputError as e:
        print(e, file=sys.stderr)
        return 2
    write_json(out, checker.document)
    print(f"{checker.faults} checks do not hold: {out}")
    return 1 if checker.faults else 0


if __name__ == "__main__":
    sys.exit(main())
