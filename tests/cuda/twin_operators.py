# SPDX-License-Identifier: Apache-2.0
"""vLLM's operators, computed by the twin on the CPU behind the schemas that vLLM 0.24 registers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm_schemas import ALIGN, GEMM_024, SILU

from routeblock.cuda import operators as vllm_ops
from routeblock.cuda.grid_probe import KernelLaunch
from routeblock.moe.awq import marlin_unpack_weights, marlin_unpack_zeros, marlin_unpermute_scales
from routeblock.moe.routing import AlignedPlan, align
from routeblock.twin.gemm import moe_gemm
from routeblock.twin.layer import silu_and_mul


def marlin(thread_k: int, thread_n: int, grid: int) -> KernelLaunch:
    """A launch of a Marlin kernel, as the probe records it."""
    threads = thread_k * thread_n // 64
    name = f"_ZN16marlin_moe_wna166MarlinILl1ELi{threads}ELi1ELi{thread_n // 16}ELi{thread_k // 16}ELb1EEvv"
    return KernelLaunch((grid, 1, 1), (threads, 1, 1), 0, name)


class TwinOperators:
    """Operators of a GPU with `sms` SMs; `launches` records GEMMs, `answered` is what a probe answers for the SMs."""

    def __init__(self, sms: int) -> None:
        self.sms = sms
        self.answered: int | None = None
        self.launches: list[KernelLaunch] = []
        self._libraries: list[Any] = []

    def register(self) -> None:
        """Register the operators with torch."""
        for namespace, schema, function in (
            ("_moe_C", GEMM_024, self.gemm),
            ("_moe_C", ALIGN, self.align),
            ("_C", SILU, self.silu),
        ):
            library = torch.library.Library(namespace, "FRAGMENT")
            library.define(schema)
            library.impl(schema.split("(")[0], function, "CPU")
            self._libraries.append(library)

    def unregister(self) -> None:
        """Take the operators back."""
        for library in self._libraries:
            library._destroy()

    def gemm(
        self, a, c_or_none, b_q_weight, b_bias_or_none, b_scales, a_scales, global_scale, b_zeros_or_none,
        g_idx_or_none, perm_or_none, workspace, sorted_token_ids, expert_ids, num_tokens_past_padded, topk_weights,
        moe_block_size, top_k, mul_topk_weights, b_type_id, size_m, size_n, size_k, is_full_k, use_atomic_add,
        use_fp32_reduce, is_zp_float, thread_k, thread_n, blocks_per_sm,
    ):  # fmt: skip # type: ignore[no-untyped-def]
        """What the real operator computes, from Marlin-packed weights."""
        host = vllm_ops.to_host
        assert b_type_id == (1125899907892224 if b_zeros_or_none is None else 1125899906843648)
        assert (size_m, size_k) == tuple(a.shape) and is_full_k and not use_atomic_add and not is_zp_float
        assert workspace.numel() >= min(
            size_n // 64 * (sorted_token_ids.numel() // moe_block_size), (self.answered or self.sms) * 4
        )
        assert not workspace.any() and torch.isnan(c_or_none.float()).all()
        used = int(num_tokens_past_padded[0])
        blocks = used // moe_block_size
        plan = AlignedPlan(
            host(sorted_token_ids)[:used], host(expert_ids)[:blocks], used, moe_block_size, topk_weights.numel()
        )
        assert (host(expert_ids)[blocks:] == -1).all() and (host(sorted_token_ids)[used:] == topk_weights.numel()).all()
        grid = (self.answered or self.sms) * blocks_per_sm
        self.launches.append(marlin(thread_k, thread_n, grid))
        out = moe_gemm(
            host(a),
            np.stack([marlin_unpack_weights(x) for x in host(b_q_weight)]),
            None if b_zeros_or_none is None else np.stack([marlin_unpack_zeros(x) for x in host(b_zeros_or_none)]),
            np.stack([marlin_unpermute_scales(x) for x in host(b_scales)]),
            plan,
            top_k=top_k,
            architecture="hopper",
            thread_k=thread_k,
            thread_n=thread_n,
            grid=grid,
            group_size=size_k // b_scales.shape[1],
            topk_weights=host(topk_weights) if mul_topk_weights else None,
            fp32_reduce=use_fp32_reduce,
        )
        c_or_none.copy_(vllm_ops.to_device(out, "cpu"))
        return c_or_none

    def align(
        self, topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad, maybe_expert_map
    ):  # type: ignore[no-untyped-def]
        """An alignment in which the routes arrive backwards."""
        ids = vllm_ops.to_host(topk_ids)
        plan = align(ids, num_experts, block_size, np.arange(ids.size)[::-1])
        sorted_token_ids.fill_(ids.size)
        experts_ids.fill_(-1)
        sorted_token_ids[: plan.num_tokens_post_padded] = torch.from_numpy(plan.sorted_token_ids)
        experts_ids[: plan.num_blocks] = torch.from_numpy(plan.expert_ids)
        num_tokens_post_pad.fill_(plan.num_tokens_post_padded)

    def silu(self, result, input):  # type: ignore[no-untyped-def]
        """vLLM's silu_and_mul."""
        result.copy_(vllm_ops.to_device(silu_and_mul(vllm_ops.to_host(input)), "cpu"))
