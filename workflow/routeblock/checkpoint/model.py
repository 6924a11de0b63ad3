# SPDX-License-Identifier: Apache-2.0
"""What config.json says about the decoder: which layers have experts, their sizes, how they are routed and stored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from routeblock.checkpoint.families import FAMILIES, Family, Renormalise, Schedule
from routeblock.checkpoint.folder import COMPARE, Folder, lfs_pointer
from routeblock.checkpoint.names import expert_name, layer_name
from routeblock.checkpoint.quantization import Quantization, read_quantization
from routeblock.errors import UNREADABLE, InputError

CONFIG = "config.json"
# Far above any model, and small enough that what is missing is listed at once.
LAYERS_LIMIT = EXPERTS_LIMIT = 10_000
ALL_EXPERTS_LIMIT = 100_000  # of all layers; the largest models have some 25,000
SIZE_LIMIT = 1 << 20

# One setting under the names that families and versions of transformers give it; transformers 5 maps some to others.
SPELLINGS = (
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "moe_k", "moe_topk"),
    ("rms_norm_eps", "layernorm_epsilon"),
)


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
    renormalise_source: str
    norm_eps: float
    dtype: str
    quantization: Quantization


def read_json(folder: Folder, name: str) -> dict[str, Any]:
    """A JSON mapping among the checkpoint's files. Raises InputError if it is missing or not a mapping."""
    data = folder.path(name).read_bytes()
    if pointer := lfs_pointer(folder.root / name, data):
        raise pointer
    try:
        value = json.loads(data)
    except UNREADABLE as e:
        raise _refuse(folder, name, f"not JSON: {e}", "a JSON file is needed", COMPARE) from e
    if not isinstance(value, dict):
        raise _refuse(folder, name, "not a mapping", "a mapping of keys to values is needed", COMPARE)
    return value


def _refuse(folder: Folder, name: str, what: str, limit: str, way_out: str) -> InputError:
    # A config.json may be given under another name; a hub's cache has files elsewhere, and their names say nothing.
    given = folder.files.get(name)
    where = given if given is not None and given.parent == folder.root else folder.root / name
    return InputError(what, where=str(where), limit=limit, way_out=way_out)


class _Config:
    """Typed access to the part of config.json that describes the text decoder."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.whole = read_json(folder, CONFIG)
        thinker = self.whole.get("thinker_config")
        nested = [part.get("text_config") for part in (self.whole, thinker) if isinstance(part, dict)]
        self.text = next((x for x in nested if isinstance(x, dict) and "num_hidden_layers" in x), self.whole)

    def refuse(self, what: str, limit: str, way_out: str = "check config.json") -> InputError:
        return _refuse(self.folder, CONFIG, what, limit, way_out)

    def get(self, key: str) -> Any:
        """A value, under any of the names that the key has; None if it is absent. Two names must agree."""
        given = {name: self.text[name] for name in (key, *_spellings(key)) if self.text.get(name) is not None}
        for name, value in given.items():
            first, wanted = next(iter(given.items()))
            if name != first and value != wanted:
                raise self.refuse(f"{first} is {wanted!r}, {name} is {value!r}"[:120], "two names of one setting")
        return next(iter(given.values()), None)

    def size(self, key: str, least: int = 1, most: int = SIZE_LIMIT, default: int | None = None) -> int:
        """A whole number; a list with one for each layer must have the same for all."""
        value = self.get(key)
        if isinstance(value, list) and value and all(x == value[0] for x in value):
            value = value[0]
        if value is None and key not in self.text and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.refuse(f"{key} is {value!r}"[:80], f"a whole number from {least} to {most:,} is needed")
        return value

    def epsilon(self, key: str, default: float) -> float:
        value = self.get(key) if any(k in self.text for k in _spellings(key)) else default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise self.refuse(f"{key} is {value!r}"[:80], "a number from 0 to 1 is needed")
        return float(value)

    def sizes(self, key: str) -> list[int]:
        value = self.text.get(key) or []
        if not isinstance(value, list) or not all(isinstance(x, int) for x in value):
            raise self.refuse(f"{key} is {value!r}"[:120], "a list of layer numbers is needed")
        return value

    def marks(self, key: str, words: Mapping[Any, bool], layers: int) -> list[int] | None:
        """The layers that a list marks, one entry a layer; None if there is no such list."""
        value = self.text.get(key)
        if not isinstance(value, list):
            return None
        if len(value) < layers or not all(isinstance(x, str | int) and x in words for x in value):
            text = f"{key} of {len(value)} entries: {value!r}"
            raise self.refuse(text[:120], f"{' or '.join(map(repr, words))} for each of {layers} layers")
        return [i for i, x in enumerate(value[:layers]) if words[x]]


def _spellings(key: str) -> Sequence[str]:
    return next((s for s in SPELLINGS if key in s), (key,))


def read_model(folder: Folder, tensors: Iterable[str] | None = None, quantization: Quantization | None = None) -> Model:
    """What the checkpoint says about itself. `tensors` are its tensors' names: quantisation is declared by the names of
    modules. None: the configuration alone is there, and a layout whose tensors are not read serves too.
    `quantization` stands in place of what the checkpoint says of it.

    Raises InputError for an unknown family, activation, routing or quantisation.
    """
    config = _Config(folder)
    model_type = str(config.text.get("model_type", config.whole.get("model_type")))
    family = FAMILIES.get(model_type)
    if family is None:
        raise config.refuse(
            f"model_type {model_type}",
            f"known MoE families are {', '.join(FAMILIES)}",
            "add an entry to FAMILIES in checkpoint/families.py",
        )
    activation = config.text.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise config.refuse(f"hidden_act {activation!r}", "the layer's activation is silu", "choose another checkpoint")
    num_layers = config.size("num_hidden_layers", most=LAYERS_LIMIT)
    num_experts = config.size(family.experts_key, most=EXPERTS_LIMIT)
    top_k = config.size(family.top_k_key)
    if top_k > num_experts:
        raise config.refuse(f"{family.top_k_key} {top_k}", f"there are {num_experts} experts")
    layers = _moe_layers(config, family, num_layers)
    if not layers:
        raise config.refuse("no layer has experts", "an MoE layer is needed", "choose another checkpoint")
    if len(layers) * num_experts > ALL_EXPERTS_LIMIT:
        raise config.refuse(
            f"{len(layers)} layers of {num_experts} experts", f"at most {ALL_EXPERTS_LIMIT:,} experts in all layers"
        )
    renormalise, source = _renormalise(config, family)
    modules = _expert_modules(tensors or ()) or [
        f"model.layers.{layer}.{family.block}.experts.{expert}.{projection}"
        for layer in layers
        for expert in range(num_experts)
        for projection in family.projections
    ]
    return Model(
        family,
        model_type,
        num_layers,
        config.size("hidden_size"),
        config.size(family.intermediate_key),
        num_experts,
        top_k,
        layers,
        renormalise,
        source,
        config.epsilon("rms_norm_eps", family.norm_eps),
        str(config.text.get("torch_dtype") or config.text.get("dtype") or config.whole.get("torch_dtype")),
        quantization or _quantization(folder, config, modules, tensors=tensors is not None),
    )


def _expert_modules(tensors: Iterable[str]) -> list[str]:
    """The Linears of the experts among these tensors."""
    found: dict[str, None] = {}
    for name in tensors:
        layer = layer_name(name)
        expert = expert_name(layer.inside) if layer and layer.block is not None else None
        if layer and expert:
            found[f"{layer.module}.{expert.module}"] = None
    return list(found)


def _renormalise(config: _Config, family: Family) -> tuple[bool | None, str]:
    """Whether top-k weights are divided by their sum (None: another kind of router), and what says so."""
    match family.renormalise:
        case None:
            return None, "another kind of router"
        case Renormalise.ALWAYS | Renormalise.NEVER as rule:
            return rule is Renormalise.ALWAYS, f"{family.model_type} {rule} divides"
        case rule:
            pass
    if "norm_topk_prob" not in config.text:
        if rule is Renormalise.STATED:
            limit = f"the default of {family.model_type} is not known"
            raise config.refuse("norm_topk_prob is absent", limit, "add it as the model's own code has it")
        return rule is Renormalise.TRUE, f"norm_topk_prob is absent: the default of {family.model_type}"
    value = config.text["norm_topk_prob"]
    if not isinstance(value, bool):
        raise config.refuse(f"norm_topk_prob is {value!r}"[:80], "true or false is needed")
    return value, "norm_topk_prob"


def _moe_layers(config: _Config, family: Family, num_layers: int) -> tuple[int, ...]:
    every = range(num_layers)
    if (marked := config.marks("mlp_layer_types", {"sparse": True, "dense": False}, num_layers)) is not None:
        return tuple(marked)
    match family.schedule:
        case Schedule.SPARSE_STEP:
            step, dense = config.size("decoder_sparse_step", default=1), set(config.sizes("mlp_only_layers"))
            return tuple(x for x in every if x not in dense and (x + 1) % step == 0)
        case Schedule.FIRST_DENSE:
            if (marked := config.marks("moe_layer_freq", {1: True, 0: False}, num_layers)) is not None:
                return tuple(marked)
            first, step = config.size("first_k_dense_replace", 0), config.size("moe_layer_freq", default=1)
            return tuple(x for x in every if x >= first and x % step == 0)
        case Schedule.PERIOD:
            period, offset = (
                config.size("expert_layer_period", default=2),
                config.size("expert_layer_offset", 0, default=1),
            )
            return tuple(x for x in every if x % period == offset)
        case Schedule.INTERVAL:
            first, step = (
                config.size("moe_layer_start_index", 0, default=1),
                config.size("moe_layer_interval", default=1),
            )
            last = config.size("moe_layer_end_index", -1, default=-1)
            return tuple(x for x in every if first <= x <= (last % num_layers) and (x + 1) % step == 0)
        case Schedule.ALL:
            return tuple(every)


def _quantization(folder: Folder, config: _Config, modules: Sequence[str], *, tensors: bool) -> Quantization:
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

    return read_quantization(settings, modules, refuse, tensors=tensors)
