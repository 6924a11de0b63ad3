# SPDX-License-Identifier: Apache-2.0
"""Schemas that versions of vLLM register, as their sources and binaries have them."""

from __future__ import annotations

ALIGN = (
    "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, "
    "Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? maybe_expert_map) -> ()"
)
ALIGN_WITHOUT_MAP = ALIGN.replace(", Tensor? maybe_expert_map", "")
SILU = "silu_and_mul(Tensor! result, Tensor input) -> ()"

GEMM_024 = (  # 0.20 to 0.32
    "moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor? b_bias_or_none, Tensor! b_scales, "
    "Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, Tensor? perm_or_none, "
    "Tensor! workspace, Tensor sorted_token_ids, Tensor! expert_ids, Tensor! num_tokens_past_padded, "
    "Tensor! topk_weights, int moe_block_size, int top_k, bool mul_topk_weights, int b_type_id, int size_m, "
    "int size_n, int size_k, bool is_full_k, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float, "
    "int thread_k, int thread_n, int blocks_per_sm) -> Tensor"
)
GEMM_033 = GEMM_024.replace("Tensor? g_idx_or_none, Tensor? perm_or_none, ", "").replace("bool is_full_k, ", "")
GEMM_OLD = (  # before thread sizes could be asked for
    GEMM_024.replace("Tensor? a_scales, ", "")
    .replace("bool mul_topk_weights, int b_type_id", "bool mul_topk_weights, bool is_ep, int b_q_type_id")
    .replace(", int thread_k, int thread_n, int blocks_per_sm", "")
)
