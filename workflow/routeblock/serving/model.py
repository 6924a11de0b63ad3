# SPDX-License-Identifier: Apache-2.0
"""The model that is served: Qwen3-MoE in the form that vLLM loads, random weights, experts in AutoAWQ form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.checkpoint.families import FAMILIES, PROJECTIONS
from routeblock.checkpoint.generator import Spec, drawn_weights
from routeblock.errors import InputError
from routeblock.evidence.files import atomic_folder
from routeblock.evidence.tensor_stream import LazyTensor, stream_tensors
from routeblock.serving.protocol import Model

FAMILY = FAMILIES["qwen3_moe"]
# Standard deviation of the plain matrices, as such models are initialised.
SPREAD = 0.02


def config(model: Model) -> dict[str, Any]:
    """config.json, as vLLM 0.24.0 reads it: attention, router and head stay unquantised."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "bos_token_id": 1,
        "decoder_sparse_step": 1,
        "eos_token_id": 2,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": 4 * model.intermediate,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "moe_intermediate_size": model.intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": model.heads,
        "num_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": model.dtype,
        "vocab_size": model.vocabulary,
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": model.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["self_attn", "mlp.gate", "lm_head"],
        },
    }


def spec_of(model: Model) -> Spec:
    """What the generator of checkpoints draws the experts from."""
    return Spec(
        layers=model.layers, hidden=model.hidden, intermediate=model.intermediate, experts=model.experts,
        top_k=model.top_k, group_size=model.group_size, dtype=model.dtype, seed=model.seed,
    )  # fmt: skip


def write(path: Path, model: Model) -> dict[str, str]:
    """Write the model's folder, one shard a layer, and return the SHA-256 of each weight file by name.

    Every tensor is drawn from a stream of its own, so any machine gives the same bytes. 1.3 GB at 4 layers of 128
    experts. Raises InputError for sizes that the kernels do not take.
    """
    for name, size in (("hidden", model.hidden), ("intermediate", model.intermediate)):
        if size % max(128, model.group_size):
            raise InputError(
                f"{name} {size}",
                where="the served model",
                limit=f"a multiple of {max(128, model.group_size)}",
                way_out="choose another",
            )
    digests: dict[str, str] = {}
    with atomic_folder(path) as tmp:
        parts = {"plain": list(_plain(model))} | {f"layer-{i}": list(_layer(model, i)) for i in range(model.layers)}
        names: dict[str, str] = {}
        for part, tensors in parts.items():
            file = f"{part}.safetensors"
            digests[file] = stream_tensors(tmp / file, tensors, {"format": "pt"})
            names |= {t.name: file for t in tensors}
        total = sum(t.nbytes for tensors in parts.values() for t in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        _json(tmp / "model.safetensors.index.json", index)
        _json(tmp / "config.json", config(model))
    return digests


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _matrix(model: Model, name: str, shape: tuple[int, ...], stream: tuple[int, ...], spread: float) -> LazyTensor:
    def make() -> Any:
        rng = np.random.Generator(np.random.PCG64([model.seed, 1 << 20, *stream]))
        return (rng.standard_normal(shape, np.float32) * np.float32(spread)).astype(model.dtype)

    return LazyTensor(name, model.dtype, shape, make)


def _norm(model: Model, name: str, size: int) -> LazyTensor:
    return LazyTensor(name, model.dtype, (size,), lambda: np.ones(size, model.dtype))


def _plain(model: Model) -> Iterator[LazyTensor]:
    # Embeddings of unit size, so that what attention and experts add is of the size of what it is added to.
    yield _matrix(model, "model.embed_tokens.weight", (model.vocabulary, model.hidden), (0,), 1.0)
    yield _matrix(model, "lm_head.weight", (model.vocabulary, model.hidden), (1,), SPREAD)
    yield _norm(model, "model.norm.weight", model.hidden)


def _layer(model: Model, layer: int) -> Iterator[LazyTensor]:
    base = f"model.layers.{layer}."
    yield _norm(model, f"{base}input_layernorm.weight", model.hidden)
    yield _norm(model, f"{base}{FAMILY.norm}.weight", model.hidden)
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = {
        "q_proj": (wide, model.hidden),
        "k_proj": (narrow, model.hidden),
        "v_proj": (narrow, model.hidden),
        "o_proj": (model.hidden, wide),
    }
    for place, (name, shape) in enumerate(shapes.items()):
        yield _matrix(model, f"{base}self_attn.{name}.weight", shape, (2, layer, place), SPREAD)
    yield _norm(model, f"{base}self_attn.q_norm.weight", model.head_dim)
    yield _norm(model, f"{base}self_attn.k_norm.weight", model.head_dim)
    router = f"{base}{FAMILY.block}.{FAMILY.router}.weight"
    yield _matrix(model, router, (model.experts, model.hidden), (3, layer), SPREAD)
    spec = spec_of(model)
    draw = drawn_weights(spec)
    for expert in range(model.experts):
        for projection, own in zip(PROJECTIONS, FAMILY.projections, strict=True):
            k, n = spec.shape(projection)
            groups = k // model.group_size
            module = f"{base}{FAMILY.block}.experts.{expert}.{own}"
            for suffix, dtype, shape in (
                ("qweight", "int32", (k, n // 8)),
                ("qzeros", "int32", (groups, n // 8)),
                ("scales", model.dtype, (groups, n)),
            ):
                yield LazyTensor(
                    f"{module}.{suffix}",
                    dtype,
                    shape,
                    lambda e=expert, p=projection, s=suffix: getattr(draw(layer, e, p), s),  # type: ignore[misc]
                )
