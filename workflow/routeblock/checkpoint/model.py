# SPDX-License-Identifier: Apache-2.0
"""What config.json says: which layers have experts, their sizes, how they are routed and how they are quantised.

Facts: the configuration and modelling files of transformers for each family; the AutoAWQ and compressed-tensors
formats. Adding a family is one entry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from routeblock.checkpoint.folder import Folder
from routeblock.errors import InputError

CONFIG = "config.json"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Far above any model, and small enough that what is missing is listed at once.
LAYERS_LIMIT = EXPERTS_LIMIT = 10_000
SIZE_LIMIT = 1 << 20


class Renormalise(StrEnum):
    """Whether the top-k weights of the softmax are divided by their sum."""

    ALWAYS = "always"
    BY_KEY = "as norm_topk_prob says"


class Schedule(StrEnum):
    """Which decoder layers have experts."""

    ALL = "all"
    SPARSE_STEP = "every decoder_sparse_step-th that is not in mlp_only_layers"
    FIRST_DENSE = "from first_k_dense_replace, every moe_layer_freq-th"


@dataclass(frozen=True)
class Family:
    """The names that a model family gives to things; `renormalise` None: its router is no plain softmax and top-k."""

    model_type: str
    experts_key: str = "num_experts"
    intermediate_key: str = "moe_intermediate_size"
    block: str = "mlp"
    projections: tuple[str, str, str] = PROJECTIONS
    schedule: Schedule = Schedule.SPARSE_STEP
    renormalise: Renormalise | None = Renormalise.BY_KEY
    norm_offset: float = 0.0  # added to the weights of the layer's RMS norm


FAMILIES = {
    f.model_type: f
    for f in (
        Family("qwen2_moe"),
        Family("qwen3_moe"),
        Family("qwen3_vl_moe"),
        Family("qwen3_vl_moe_text"),
        Family("qwen3_next", norm_offset=1.0),
        Family("qwen3_5_moe", schedule=Schedule.ALL, renormalise=Renormalise.ALWAYS, norm_offset=1.0),
        Family("qwen3_5_moe_text", schedule=Schedule.ALL, renormalise=Renormalise.ALWAYS, norm_offset=1.0),
        Family("olmoe", intermediate_key="intermediate_size", schedule=Schedule.ALL),
        Family(
            "mixtral",
            experts_key="num_local_experts",
            intermediate_key="intermediate_size",
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
            schedule=Schedule.ALL,
            renormalise=Renormalise.ALWAYS,
        ),
        Family("deepseek_v2", "n_routed_experts", schedule=Schedule.FIRST_DENSE, renormalise=None),
        Family("deepseek_v3", "n_routed_experts", schedule=Schedule.FIRST_DENSE, renormalise=None),
        Family("glm4_moe", "n_routed_experts", schedule=Schedule.FIRST_DENSE, renormalise=None),
    )
}


class Container(StrEnum):
    """How packed tensors are stored."""

    AWQ = "awq"
    COMPRESSED = "compressed-tensors"


@dataclass(frozen=True)
class Quantization:
    """4-bit weights in groups of `group_size` rows of K (-1: one scale per column), with zero points or the fixed 8."""

    container: Container
    group_size: int
    zero_points: bool
    skipped: tuple[str, ...]

    def skip_entry(self, module: str) -> str | None:
        """The entry of modules_to_not_convert (`ignore`) that names this module or one it lies in, or None.

        An entry counts by whole path components: `model.layers.1` is not `model.layers.10`, `gate` is not `gate_proj`.
        A pattern (`re:`) of compressed-tensors must match from the start.
        """
        dotted = f".{module}."
        for entry in self.skipped:
            if entry.startswith("re:") and self.container is Container.COMPRESSED:
                if re.match(entry.removeprefix("re:"), module):
                    return entry
            elif entry and f".{entry}." in dotted:
                return entry
        return None


@dataclass(frozen=True)
class Model:
    """Sizes of the decoder and of its experts; `moe_layers` are the layers that the configuration gives experts."""

    family: Family
    model_type: str
    num_layers: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]
    renormalise: bool | None
    norm_eps: float
    dtype: str
    quantization: Quantization


def read_json(folder: Folder, name: str) -> dict[str, Any]:
    """A JSON mapping among the checkpoint's files. Raises InputError if it is missing or no mapping."""
    path = folder.path(name)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as e:
        raise _refuse(folder, name, f"no JSON: {e}", "a JSON file is needed", f"download {name} again") from e
    if not isinstance(value, dict):
        raise _refuse(folder, name, "no mapping", "a mapping of keys to values is needed", f"download {name} again")
    return value


def _refuse(folder: Folder, name: str, what: str, limit: str, way_out: str) -> InputError:
    return InputError(what, where=str(folder.root / name), limit=limit, way_out=way_out)


class _Config:
    """Typed access to the part of config.json that describes the text decoder."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.whole = read_json(folder, CONFIG)
        text = self.whole.get("text_config")
        self.text = text if isinstance(text, dict) and "num_hidden_layers" in text else self.whole

    def refuse(self, what: str, limit: str, way_out: str = "check config.json") -> InputError:
        return _refuse(self.folder, CONFIG, what, limit, way_out)

    def size(self, key: str, least: int = 1, most: int = SIZE_LIMIT) -> int:
        value = self.text.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.refuse(f"{key} is {value!r}"[:80], f"a whole number from {least} to {most:,} is needed")
        return value

    def epsilon(self, key: str, default: float) -> float:
        value = self.text.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise self.refuse(f"{key} is {value!r}"[:80], "a number from 0 to 1 is needed")
        return float(value)

    def sizes(self, key: str) -> list[int]:
        value = self.text.get(key) or []
        if not isinstance(value, list) or not all(isinstance(x, int) for x in value):
            raise self.refuse(f"{key} is {value!r}", "a list of layer numbers is needed")
        return value


def read_model(folder: Folder, quantization: Quantization | None = None) -> Model:
    """What the checkpoint says about itself. Raises InputError for an unknown family, activation or quantisation.

    `quantization` stands in place of what the checkpoint says of it.
    """
    config = _Config(folder)
    model_type = str(config.text.get("model_type", config.whole.get("model_type")))
    family = FAMILIES.get(model_type)
    if family is None:
        raise config.refuse(
            f"model_type {model_type}",
            f"known MoE families are {', '.join(FAMILIES)}",
            "add an entry to FAMILIES in checkpoint/model.py",
        )
    activation = config.text.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise config.refuse(f"hidden_act {activation!r}", "the layer's activation is silu", "choose another checkpoint")
    num_layers = config.size("num_hidden_layers", most=LAYERS_LIMIT)
    num_experts = config.size(family.experts_key, most=EXPERTS_LIMIT)
    top_k = config.size("num_experts_per_tok")
    if top_k > num_experts:
        raise config.refuse(f"num_experts_per_tok {top_k}", f"there are {num_experts} experts")
    layers = _moe_layers(config, family, num_layers)
    if not layers:
        raise config.refuse("no layer has experts", "an MoE layer is needed", "choose another checkpoint")
    return Model(
        family,
        model_type,
        num_layers,
        config.size("hidden_size"),
        config.size(family.intermediate_key),
        num_experts,
        top_k,
        layers,
        _renormalise(config, family),
        config.epsilon("rms_norm_eps", 1e-6),
        str(config.text.get("torch_dtype") or config.text.get("dtype") or config.whole.get("torch_dtype")),
        quantization or _quantization(folder, config),
    )


def _renormalise(config: _Config, family: Family) -> bool | None:
    if family.renormalise is None:
        return None
    return family.renormalise is Renormalise.ALWAYS or bool(config.text.get("norm_topk_prob", False))


def _moe_layers(config: _Config, family: Family, num_layers: int) -> tuple[int, ...]:
    if family.schedule is Schedule.SPARSE_STEP:
        step = config.size("decoder_sparse_step") if "decoder_sparse_step" in config.text else 1
        dense = set(config.sizes("mlp_only_layers"))
        return tuple(x for x in range(num_layers) if x not in dense and (x + 1) % step == 0)
    if family.schedule is Schedule.FIRST_DENSE:
        first = config.size("first_k_dense_replace", 0)
        step = config.size("moe_layer_freq") if "moe_layer_freq" in config.text else 1
        return tuple(x for x in range(first, num_layers) if x % step == 0)
    return tuple(range(num_layers))


def _quantization(folder: Folder, config: _Config) -> Quantization:
    settings, name = config.whole.get("quantization_config") or config.text.get("quantization_config"), CONFIG
    if settings is None and "quant_config.json" in folder.files:  # AutoAWQ before it wrote into config.json
        name = "quant_config.json"
        settings = {"quant_method": "awq", **read_json(folder, name)}
    if not isinstance(settings, dict):
        raise config.refuse(
            "no quantization_config", "the study needs packed 4-bit experts", "choose an AWQ or compressed-tensors one"
        )

    def refuse(what: str, limit: str, way_out: str = "choose a checkpoint quantised that way") -> InputError:
        return _refuse(folder, name, f"quantization_config: {what}", limit, way_out)

    match settings.get("quant_method"):
        case "awq":
            return _awq(settings, refuse)
        case "compressed-tensors":
            return _compressed(settings, refuse)
        case method:
            raise refuse(f"quant_method {method!r}", "awq and compressed-tensors are read")


def _group(value: Any, refuse: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or (value >= 16 and value % 16 == 0)):
        raise refuse(f"group size {value!r}", "a multiple of 16, or -1 for one scale per column")
    return value


def _names(value: Any, key: str, refuse: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise refuse(f"{key} is {value!r}"[:120], "a list of module paths is needed", "check config.json")
    return tuple(value)


def _awq(settings: Mapping[str, Any], refuse: Any) -> Quantization:
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise refuse(f"bits {bits!r}", "4-bit weights are read")
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise refuse(f"version {version!r}", "the gemm packing is read")
    zero_points = settings.get("zero_point", True)
    if not isinstance(zero_points, bool):
        raise refuse(f"zero_point {zero_points!r}", "true or false is needed", "check config.json")
    skipped = _names(settings.get("modules_to_not_convert"), "modules_to_not_convert", refuse)
    return Quantization(
        Container.AWQ, _group(settings.get("group_size", settings.get("q_group_size")), refuse), zero_points, skipped
    )


def _compressed(settings: Mapping[str, Any], refuse: Any) -> Quantization:
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()) or len(groups) != 1:
        found = len(groups) if isinstance(groups, dict) else groups
        raise refuse(f"config_groups: {found!r}"[:120], "one group of settings for all quantised modules is read")
    (scheme,) = groups.values()
    form = scheme.get("format") or settings.get("format")
    if form != "pack-quantized":
        raise refuse(f"format {form!r}", "pack-quantized is read")
    if scheme.get("input_activations") is not None:
        raise refuse("input_activations are quantised", "weight-only quantisation is read")
    weights = scheme.get("weights")
    if not isinstance(weights, dict) or weights.get("num_bits") != 4 or weights.get("type", "int") != "int":
        raise refuse(f"weights {weights!r}"[:160], "4-bit integer weights are read")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else None)
    if strategy not in ("group", "channel"):
        raise refuse(f"strategy {strategy!r}", "group and channel are read")
    if weights.get("actorder") in (True, "group"):
        raise refuse(f"actorder {weights['actorder']!r}", "columns in their own order are read")
    group = _group(weights.get("group_size"), refuse) if strategy == "group" else -1
    skipped = _names(settings.get("ignore"), "ignore", refuse)
    for entry in skipped:
        if entry.startswith("re:"):
            try:
                re.compile(entry.removeprefix("re:"))
            except re.error as e:
                raise refuse(f"ignore entry {entry!r} is no pattern: {e}", "a regular expression is needed") from e
    return Quantization(Container.COMPRESSED, group, not weights.get("symmetric", True), skipped)
