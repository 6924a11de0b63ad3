# SPDX-License-Identifier: Apache-2.0
"""A cell through vLLM's `fused_marlin_moe`: plan injected at its alignment call, surfaces captured at its operators.

The operators are the twin on the CPU, so this shows which arguments vLLM's Python passes on and that the lane `cuda`
passes the same ones: every surface and the final output must have the lane's bytes. Not observed on a GPU. Run in an
environment with vllm 0.24.0 by `make test-vllm`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cuda"))

import numpy as np
import torch
from twin_operators import TwinOperators

from routeblock.cuda import operators as vllm_ops
from routeblock.moe.routing import AlignedPlan, align, block_size_for

# Few blocks over few stripes of work: a route's place decides where its sum over K is cut.
SMS, BLOCKS_PER_SM, THREAD_K, THREAD_N = 7, 1, 64, 128
USED = (2, 3, 9, 14)
EXPERTS, TOKENS, TOP_K, HIDDEN, INTERMEDIATE, GROUP = 16, 19, 2, 1024, 512, 64
LAUNCH = {"thread_k": THREAD_K, "thread_n": THREAD_N, "blocks_per_sm": BLOCKS_PER_SM}


class Operators(TwinOperators):
    """The twin's operators at one launch, whatever launch they are asked for; they keep what each wrote."""

    def __init__(self) -> None:
        super().__init__(SMS)
        self.surfaces: list[torch.Tensor] = []

    def gemm(self, *arguments: Any) -> Any:
        """As the twin's; rows that are not written stay NaN."""
        arguments[1].fill_(float("nan"))
        out = super().gemm(*arguments[:-3], *LAUNCH.values())
        self.surfaces.append(out.clone())
        return out

    def silu(self, result: Any, input: Any) -> None:
        """As the twin's."""
        super().silu(result, input)
        self.surfaces.append(result.clone())


def weights(rng: np.random.Generator, k: int, n: int) -> vllm_ops.DeviceWeights:
    """Random experts, packed."""

    def expert() -> tuple[Any, Any, Any]:
        q, z = (rng.integers(0, 16, shape, np.uint8) for shape in ((k, n), (k // GROUP, n)))
        return q, z, (rng.random((k // GROUP, n)) * 0.01).astype(np.float16)

    return vllm_ops.load_weights((expert() for _ in range(EXPERTS)), EXPERTS, "cpu")


def main() -> int:
    """Exit code 1 if a surface of a plan has other bytes than the lane's."""
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    from vllm.scalar_type import scalar_types

    if hasattr(torch.ops._moe_C, "moe_align_block_size"):
        print("fused_marlin_moe: not run, vLLM's own operators are registered on this machine")
        return 0
    twin = Operators()
    twin.register()
    vllm_ops._load = lambda path: None  # type: ignore[assignment]
    lane = vllm_ops.VllmOperators(Path("twin"), Path("twin"), device="cpu")

    rng = np.random.default_rng(11)
    ids = np.stack([rng.choice(USED, TOP_K, replace=False) for _ in range(TOKENS)]).astype(np.int32)
    hidden = torch.from_numpy(rng.standard_normal((TOKENS, HIDDEN)).astype(np.float16))
    topk_weights = torch.from_numpy(rng.random((TOKENS, TOP_K)).astype(np.float32))
    w13, w2 = weights(rng, HIDDEN, 2 * INTERMEDIATE), weights(rng, INTERMEDIATE, HIDDEN)
    block = block_size_for(TOKENS, TOP_K, EXPERTS)

    def through_lane(placed: vllm_ops.DevicePlan) -> torch.Tensor:
        options: dict[str, Any] = LAUNCH | {"lock_sms": SMS}
        gate_up = lane.moe_gemm(hidden, w13, placed, topk_weights, top_k=TOP_K, multiply_topk_weights=False, **options)
        act = lane.silu_and_mul(gate_up)
        routed = lane.moe_gemm(act, w2, placed, topk_weights, top_k=1, multiply_topk_weights=True, **options)
        return lane.combine(routed, TOKENS)

    def through_vllm(placed: vllm_ops.DevicePlan) -> torch.Tensor:
        def injected(given: Any, size: int, experts: int, expert_map: Any = None, **named: Any) -> Any:
            assert (size, experts, expert_map) == (block, EXPERTS, None) and torch.equal(given, torch.from_numpy(ids))
            return placed.sorted_token_ids, placed.expert_rows, placed.num_tokens_post_padded

        marlin_moe.moe_align_block_size = injected
        return marlin_moe.fused_marlin_moe(
            hidden,
            w13.q,
            w2.q,
            None,
            None,
            w13.scales,
            w2.scales,
            topk_weights,
            torch.from_numpy(ids),
            quant_type_id=scalar_types.uint4.id,
            w1_zeros=w13.zeros,
            w2_zeros=w2.zeros,
            workspace=torch.zeros(SMS * vllm_ops.MAX_BLOCKS_PER_SM, dtype=torch.int32),
        )

    def bits(run: Any, plan: AlignedPlan) -> list[Any]:
        twin.surfaces.clear()
        final = run(lane.device_plan(plan, np.arange(EXPERTS, dtype=np.int32)))
        return [x.numpy().view(np.uint16) for x in (*twin.surfaces, final)]

    failed, outputs = False, []
    for name, order in (("canonical", None), ("reversed", np.arange(ids.size)[::-1])):
        plan = align(ids, EXPERTS, block, *(() if order is None else (order,)))
        ours, theirs = bits(through_lane, plan), bits(through_vllm, plan)
        outputs.append(theirs)
        for surface, a, b in zip(("gate_up", "activation", "routed", "final"), ours, theirs, strict=True):
            same = np.array_equal(a, b)
            failed |= not same
            print(f"fused_marlin_moe, {name} plan, {surface} {a.shape}: {'same bytes' if same else 'OTHER BYTES'}")
    if all(np.array_equal(a, b) for a, b in zip(*outputs, strict=True)):
        print("fused_marlin_moe: the two plans give the same bytes, so nothing was told apart")
        failed = True
    print("not observed on a GPU: the operators are the twin")
    twin.unregister()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
