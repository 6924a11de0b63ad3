# SPDX-License-Identifier: Apache-2.0
"""The model families that are read: what each names things, and what it does where config.json says nothing.

Facts: the configuration and modelling files of transformers for each family; for MiMo-V2-Flash and Kimi-K2 those that
their publishers ship with the weights. Adding a family is one entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Mixtral's names for the same three. Tools rename one set to the other, so both are recognised in every family.
MIXTRAL_PROJECTIONS = ("w1", "w3", "w2")


class Renormalise(StrEnum):
    """Whether the top-k weights of the softmax are divided by their sum."""

    ALWAYS = "always"
    NEVER = "never"
    TRUE = "as norm_topk_prob says; absent, they are"
    FALSE = "as norm_topk_prob says; absent, they are not"
    STATED = "as norm_topk_prob says; the family's default is not known"


class Schedule(StrEnum):
    """Which decoder layers have experts."""

    ALL = "all"
    SPARSE_STEP = "every decoder_sparse_step-th that is not in mlp_only_layers"
    FIRST_DENSE = "from first_k_dense_replace, every moe_layer_freq-th or those that its list marks"
    PERIOD = "every expert_layer_period-th from expert_layer_offset"
    INTERVAL = "every moe_layer_interval-th from moe_layer_start_index to moe_layer_end_index"


@dataclass(frozen=True)
class Family:
    """A model family: the names it gives to things, and its defaults.

    `renormalise` None: its router is not a plain softmax and top-k. `norm_eps` is what its RMS norm uses if
    rms_norm_eps is absent, `norm_offset` is added to the weights of that norm.
    """

    model_type: str
    experts_key: str = "num_experts"
    top_k_key: str = "num_experts_per_tok"
    intermediate_key: str = "moe_intermediate_size"
    block: str = "mlp"
    router: str = "gate"
    norm: str = "post_attention_layernorm"
    projections: tuple[str, str, str] = PROJECTIONS
    schedule: Schedule = Schedule.SPARSE_STEP
    renormalise: Renormalise | None = Renormalise.STATED
    norm_eps: float = 1e-6
    norm_offset: float = 0.0


def _deepseek(model_type: str, norm_eps: float = 1e-6) -> Family:
    """A family with DeepSeek's keys, whose router groups, biases or scales."""
    return Family(model_type, "n_routed_experts", schedule=Schedule.FIRST_DENSE, renormalise=None, norm_eps=norm_eps)


def _mixtral(model_type: str, renormalise: Renormalise | None, norm_eps: float) -> Family:
    return Family(
        model_type,
        "num_local_experts",
        intermediate_key="intermediate_size",
        block="block_sparse_moe",
        projections=MIXTRAL_PROJECTIONS,
        schedule=Schedule.ALL,
        renormalise=renormalise,
        norm_eps=norm_eps,
    )


FAMILIES = {
    f.model_type: f
    for f in (
        Family("qwen2_moe", renormalise=Renormalise.FALSE),
        Family("qwen3_moe", renormalise=Renormalise.FALSE),
        Family("qwen3_vl_moe", renormalise=Renormalise.ALWAYS),
        Family("qwen3_vl_moe_text", renormalise=Renormalise.ALWAYS),
        Family("qwen3_omni_moe", renormalise=Renormalise.TRUE),
        Family("qwen3_omni_moe_text", renormalise=Renormalise.TRUE),
        Family("qwen3_next", renormalise=Renormalise.TRUE, norm_offset=1.0),
        Family("qwen3_5_moe", schedule=Schedule.ALL, renormalise=Renormalise.ALWAYS, norm_offset=1.0),
        Family("qwen3_5_moe_text", schedule=Schedule.ALL, renormalise=Renormalise.ALWAYS, norm_offset=1.0),
        Family(
            "olmoe",
            intermediate_key="intermediate_size",
            schedule=Schedule.ALL,
            renormalise=Renormalise.FALSE,
            norm_eps=1e-5,
        ),
        Family(
            "jamba",
            intermediate_key="intermediate_size",
            block="feed_forward",
            router="router",
            norm="pre_ff_layernorm",
            schedule=Schedule.PERIOD,
            renormalise=Renormalise.NEVER,
        ),
        _mixtral("mixtral", Renormalise.ALWAYS, 1e-5),
        _mixtral("minimax_m2", None, 1e-6),
        _deepseek("deepseek_v2"),
        _deepseek("deepseek_v3"),
        _deepseek("kimi_k2"),
        _deepseek("mimo_v2_flash"),
        _deepseek("glm4_moe", 1e-5),
        Family("hunyuan_v1_moe", top_k_key="moe_topk", schedule=Schedule.ALL, renormalise=None, norm_eps=1e-5),
        Family("ernie4_5_moe", "moe_num_experts", "moe_k", schedule=Schedule.INTERVAL, renormalise=None, norm_eps=1e-5),
    )
}
