# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints in the real formats, drawn from a seed: for tests, and for trying the tool without a download.

They have what a published checkpoint has (shards, index, configuration, tokenizer files, seventeen files by default)
and random weights. Their logical weights are known, so a reader can be held against them bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from routeblock.checkpoint.families import FAMILIES, PROJECTIONS, Schedule
from routeblock.checkpoint.layer import PackedProjection
from routeblock.checkpoint.layout import KERNEL_GROUPS
from routeblock.checkpoint.model import EXPERTS_LIMIT, LAYERS_LIMIT
from routeblock.checkpoint.quantization import Container
from routeblock.checkpoint.shards import INDEX
from routeblock.errors import InputError
from routeblock.evidence.files import atomic_folder
from routeblock.evidence.tensor_stream import LazyTensor, stream_tensors
from routeblock.moe.awq import unpack_awq

BYTE_VOCABULARY = 256  # token ids of the generated tokenizer: one a byte


@dataclass(frozen=True)
class Layout:
    """How the experts of a generated checkpoint are stored."""

    container: Container
    zero_points: bool = True
    stacked: bool = False
    fused: bool = False
    per_column: bool = False  # one scale a column, no groups
    separator: str = "."


LAYOUTS = {
    "awq": Layout(Container.AWQ),
    "awq-symmetric": Layout(Container.AWQ, zero_points=False),
    "awq-fused": Layout(Container.AWQ, fused=True),
    "awq-stacked": Layout(Container.AWQ, stacked=True),
    "awq-stacked-fused": Layout(Container.AWQ, stacked=True, fused=True),
    "compressed": Layout(Container.COMPRESSED, zero_points=False),
    "compressed-asymmetric": Layout(Container.COMPRESSED),
    "compressed-channel": Layout(Container.COMPRESSED, zero_points=False, per_column=True),
    "compressed-fused": Layout(Container.COMPRESSED, zero_points=False, fused=True),
    "compressed-stacked-fused": Layout(
        Container.COMPRESSED, zero_points=False, stacked=True, fused=True, separator="_"
    ),
}


@dataclass(frozen=True)
class Spec:
    """What to generate. `plain_layers` keep unquantised experts and stand in modules_to_not_convert."""

    layout: str = "awq"
    model_type: str = "qwen3_moe"
    layers: int = 2
    hidden: int = 256
    intermediate: int = 128
    experts: int = 16
    top_k: int = 4
    group_size: int = 32
    dtype: str = "float16"
    prefix: str = "model."
    shards: int = 5
    plain_layers: tuple[int, ...] = ()
    dense_layers: tuple[int, ...] = ()
    revision: str | None = None  # given: the hub's cache layout, with this snapshot
    seed: int = 0
    skew: float = 1.5  # of the router: how unevenly it spreads tokens over experts

    def stored(self) -> Layout:
        """The layout's table entry; InputError if there is none."""
        if self.layout not in LAYOUTS or self.model_type not in FAMILIES:
            raise InputError(
                f"layout {self.layout!r}, model type {self.model_type!r}",
                where="generator",
                limit=f"layouts are {', '.join(LAYOUTS)}; model types {', '.join(FAMILIES)}",
                way_out="choose from these",
            )
        return LAYOUTS[self.layout]

    def shape(self, projection: str) -> tuple[int, int]:
        """(K, N) of a projection of an expert."""
        return (self.intermediate, self.hidden) if projection == "down_proj" else (self.hidden, self.intermediate)


Weights = Callable[[int, int, str], PackedProjection]


def drawn_weights(spec: Spec) -> Weights:
    """The weights of `spec`: by layer, expert and projection, each drawn from its own stream, in AutoAWQ form."""
    layout = spec.stored()

    def draw(layer: int, expert: int, projection: str) -> PackedProjection:
        rng = np.random.Generator(np.random.PCG64([spec.seed, layer, expert, PROJECTIONS.index(projection)]))
        k, n = spec.shape(projection)
        groups = 1 if layout.per_column else k // spec.group_size
        words = np.frombuffer(rng.bytes(k * n // 2), np.dtype("<i4")).reshape(k, n // 8)
        zeros = np.frombuffer(rng.bytes(groups * n // 2), np.dtype("<i4")).reshape(groups, n // 8)
        scales = rng.random((groups, n)) * (0.5 / np.sqrt(k)) + 0.1 / np.sqrt(k)
        return PackedProjection(words, zeros if layout.zero_points else None, scales.astype(_dtype(spec.dtype)))

    return draw


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def generate(path: Path, spec: Spec, weights: Weights | None = None) -> Path:
    """Write a checkpoint and return its folder (with a revision: the snapshot inside the hub's layout at `path`).

    `weights` replaces the drawn experts. Raises InputError for a layout, sizes or a revision that cannot be stored or
    that the other commands refuse, and if `path` holds something else.
    """
    for is_sound, what, limit in _rules(spec):
        if not is_sound:
            raise InputError(what, where="generator", limit=limit, way_out="choose another")
    with atomic_folder(path) as tmp:
        if spec.revision is None:
            _write(tmp, spec, weights or drawn_weights(spec))
        else:
            _write_hub(tmp, spec, weights or drawn_weights(spec), spec.revision)
    return path if spec.revision is None else path / "snapshots" / spec.revision


def _rules(spec: Spec) -> Iterator[tuple[bool, str, str]]:
    """What a checkpoint must hold to: whether it does, what it has, and the limit."""
    per_column, group = spec.stored().per_column, spec.group_size
    groups = [g for g in KERNEL_GROUPS if g > 0]
    yield per_column or group in groups, f"group size {group}", f"the kernel takes {', '.join(map(str, groups))}"
    unit = 128 if per_column else max(128, group)
    yield spec.hidden >= unit and spec.hidden % unit == 0, f"hidden {spec.hidden}", f"a multiple of {unit}"
    unit = 64 if per_column else max(64, group)
    yield (
        spec.intermediate >= unit and spec.intermediate % unit == 0,
        f"intermediate {spec.intermediate}",
        f"a multiple of {unit}",
    )
    yield 1 <= spec.layers <= LAYERS_LIMIT, f"{spec.layers} layers", f"1 to {LAYERS_LIMIT:,}"
    yield 1 <= spec.experts <= EXPERTS_LIMIT, f"{spec.experts} experts", f"1 to {EXPERTS_LIMIT:,}"
    yield 1 <= spec.top_k <= spec.experts, f"top-k {spec.top_k}", f"there are {spec.experts} experts"
    yield spec.dtype in ("float16", "bfloat16"), f"dtype {spec.dtype!r}", "float16 or bfloat16"
    for layer in (*spec.plain_layers, *spec.dense_layers):
        yield 0 <= layer < spec.layers, f"layer {layer}", f"layers are 0 to {spec.layers - 1}"
    name = spec.revision
    yield (
        name is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name) is not None,
        f"revision {name!r}",
        "a plain name of letters, digits, '.', '_' and '-'",
    )


def _write_hub(root: Path, spec: Spec, weights: Weights, revision: str) -> None:
    """The hub's layout: files become blobs named by SHA-256 and are linked into the snapshot."""
    snapshot, blobs = root / "snapshots" / revision, root / "blobs"
    for folder in (snapshot, blobs, root / "refs"):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(revision, encoding="utf-8")
    _write(snapshot, spec, weights)
    for path in sorted(snapshot.iterdir()):
        with path.open("rb") as f:
            name = hashlib.file_digest(f, "sha256").hexdigest()
        path.rename(blobs / name)
        path.symlink_to(Path("..") / ".." / "blobs" / name)


def _write(folder: Path, spec: Spec, weights: Weights) -> None:
    tensors = list(_tensors(spec, weights))
    total = sum(t.nbytes for t in tensors)
    runs: list[list[LazyTensor]] = [[] for _ in range(spec.shards)]
    place = 0
    for t in tensors:
        runs[min(place * spec.shards // total, spec.shards - 1)].append(t)
        place += t.nbytes
    weight_map = {}
    for i, run in enumerate(runs, 1):
        name = "model.safetensors" if spec.shards == 1 else f"model-{i:05d}-of-{spec.shards:05d}.safetensors"
        stream_tensors(folder / name, run, {"format": "pt"})
        weight_map.update({t.name: name for t in run})
    if spec.shards > 1:
        _json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    _json(folder / "config.json", config(spec))
    for name, content in _companions(spec).items():
        (folder / name).write_text(content, encoding="utf-8")


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def config(spec: Spec) -> dict[str, Any]:
    """config.json of a generated checkpoint."""
    layout, family = spec.stored(), FAMILIES[spec.model_type]
    skipped = [f"model.layers.{x}.{family.block}.experts" for x in spec.plain_layers]
    if layout.container is Container.AWQ:
        quantization: dict[str, Any] = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": spec.group_size,
            "version": "gemm",
            "zero_point": layout.zero_points,
            "modules_to_not_convert": skipped or None,
        }
    else:
        group = None if layout.per_column else spec.group_size
        scheme = {
            "num_bits": 4,
            "type": "int",
            "symmetric": not layout.zero_points,
            "strategy": "channel" if layout.per_column else "group",
            "group_size": group,
        }
        quantization = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
            "ignore": ["lm_head", r"re:.*\.gate$", *skipped],
        }
    text: dict[str, Any] = {
        "architectures": ["GeneratedForCausalLM"],
        "model_type": spec.model_type,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        family.intermediate_key: spec.intermediate,
        family.experts_key: spec.experts,
        family.top_k_key: spec.top_k,
        "num_hidden_layers": spec.layers,
        "norm_topk_prob": True,
        **_schedule(family.schedule, spec.dense_layers),
        "rms_norm_eps": 1e-6,
        "vocab_size": BYTE_VOCABULARY,
        "torch_dtype": spec.dtype,
    }
    return {**text, "quantization_config": quantization}


def _schedule(schedule: Schedule, dense: tuple[int, ...]) -> dict[str, Any]:
    """The keys by which a family says which layers have experts: all but the dense ones."""
    match schedule:
        case Schedule.SPARSE_STEP:
            return {"decoder_sparse_step": 1, "mlp_only_layers": list(dense)}
        case Schedule.FIRST_DENSE:
            return {"first_k_dense_replace": len(dense)}
        case Schedule.PERIOD:
            return {"expert_layer_period": 1, "expert_layer_offset": 0}
        case Schedule.INTERVAL:
            return {"moe_layer_start_index": len(dense), "moe_layer_end_index": -1, "moe_layer_interval": 1}
        case Schedule.ALL:
            return {}


def _tensors(spec: Spec, weights: Weights) -> Iterator[LazyTensor]:
    layout, family = spec.stored(), FAMILIES[spec.model_type]
    rng = np.random.Generator(np.random.PCG64([spec.seed, 1 << 20]))
    common = rng.standard_normal(spec.hidden)
    embedding = rng.standard_normal((BYTE_VOCABULARY, spec.hidden)) + common
    yield _given(f"{spec.prefix}embed_tokens.weight", embedding, spec.dtype)
    for layer in range(spec.layers):
        base = f"{spec.prefix}layers.{layer}."
        for norm in ("input_layernorm", family.norm):
            yield _given(f"{base}{norm}.weight", rng.uniform(0.8, 1.2, spec.hidden) - family.norm_offset, spec.dtype)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield _given(f"{base}self_attn.{name}.weight", rng.standard_normal((64, 64)), spec.dtype)
        if layer in spec.dense_layers:
            for name in PROJECTIONS:
                yield _given(f"{base}mlp.{name}.weight", rng.standard_normal((64, 64)), spec.dtype)
            continue
        # A share of the common direction makes some experts popular, as trained routers are.
        pull = rng.standard_normal(spec.experts)[:, None] * common[None, :] * spec.skew
        gate = (rng.standard_normal((spec.experts, spec.hidden)) + pull / np.sqrt(spec.hidden)) / np.sqrt(spec.hidden)
        yield _given(f"{base}{family.block}.{family.router}.weight", gate, spec.dtype)
        if layer in spec.plain_layers:
            yield from _plain(spec, base, layer)
        else:
            yield from _experts(spec, layout, base, layer, weights)
    yield _given(f"{spec.prefix}norm.weight", np.ones(spec.hidden), spec.dtype)
    yield _given("lm_head.weight", embedding, spec.dtype)


def _given(name: str, values: NDArray[Any], dtype: str) -> LazyTensor:
    return LazyTensor(name, dtype, values.shape, lambda: values.astype(_dtype(dtype)))


def _plain(spec: Spec, base: str, layer: int) -> Iterator[LazyTensor]:
    family = FAMILIES[spec.model_type]
    for expert in range(spec.experts):
        for projection, own in zip(PROJECTIONS, family.projections, strict=True):
            rng = np.random.Generator(np.random.PCG64([spec.seed, layer, expert, PROJECTIONS.index(projection)]))
            values = rng.standard_normal(spec.shape(projection)[::-1])
            yield _given(f"{base}{family.block}.experts.{expert}.{own}.weight", values, spec.dtype)


def _experts(spec: Spec, layout: Layout, base: str, layer: int, weights: Weights) -> Iterator[LazyTensor]:
    family = FAMILIES[spec.model_type]
    own = dict(zip(PROJECTIONS, family.projections, strict=True))
    groups: dict[str, tuple[str, ...]] = {p: (p,) for p in PROJECTIONS}
    if layout.fused:
        groups = {"gate_up_proj": PROJECTIONS[:2], "down_proj": PROJECTIONS[2:]}
    for expert in [None] if layout.stacked else range(spec.experts):
        for stored, parts in groups.items():
            module = f"{base}{family.block}.experts.{'' if expert is None else f'{expert}.'}{own.get(stored, stored)}"
            k, n = spec.shape(parts[0])
            for suffix, (dtype, shape) in _announced(spec, layout, k, n * len(parts)).items():
                experts = range(spec.experts) if expert is None else [expert]
                make = _maker(layout, weights, layer, experts, parts, suffix, stacked=expert is None)
                whole = (spec.experts, *shape) if layout.stacked and suffix != "weight_shape" else shape
                name = suffix.removeprefix("weight_") if layout.separator == "_" else suffix
                yield LazyTensor(f"{module}{layout.separator}{name}", dtype, whole, make)


def _announced(spec: Spec, layout: Layout, k: int, n: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    groups = 1 if layout.per_column else k // spec.group_size
    found: dict[str, tuple[str, tuple[int, ...]]]
    if layout.container is Container.AWQ:
        found = {
            "qweight": ("int32", (k, n // 8)),
            "qzeros": ("int32", (groups, n // 8)),
            "scales": (spec.dtype, (groups, n)),
        }
    else:
        found = {
            "weight_packed": ("int32", (n, k // 8)),
            "weight_zero_point": ("int32", (n // 8, groups)),
            "weight_scale": (spec.dtype, (n, groups)),
            "weight_shape": ("int64", (2,)),
        }
    if not layout.zero_points:
        found = {s: x for s, x in found.items() if s not in ("qzeros", "weight_zero_point")}
    return found


def _maker(
    layout: Layout,
    weights: Weights,
    layer: int,
    experts: range | list[int],
    projections: tuple[str, ...],
    suffix: str,
    *,
    stacked: bool,
) -> Callable[[], NDArray[Any]]:
    def make() -> NDArray[Any]:
        found = []
        for expert in experts:
            parts = [weights(layer, expert, p) for p in projections]
            zeros = None if parts[0].qzeros is None else np.concatenate([_present(p.qzeros) for p in parts], axis=1)
            whole = PackedProjection(
                np.concatenate([p.qweight for p in parts], axis=1),
                zeros,
                np.concatenate([p.scales for p in parts], axis=1),
            )
            found.append(_stored(layout, whole, suffix))
            if suffix == "weight_shape":
                return found[0]
        return np.stack(found) if stacked else found[0]

    return make


def _present(x: NDArray[np.int32] | None) -> NDArray[np.int32]:
    assert x is not None
    return x


def _stored(layout: Layout, whole: PackedProjection, suffix: str) -> NDArray[Any]:
    """One tensor of a projection, [K, N] in AutoAWQ form, as its container stores it."""
    match suffix:
        case "qweight":
            return whole.qweight
        case "qzeros":
            return _present(whole.qzeros)
        case "scales":
            return whole.scales
        case "weight_packed":
            return _pack_low_first(np.ascontiguousarray(unpack_awq(whole.qweight).T))
        case "weight_zero_point":
            return np.ascontiguousarray(_pack_low_first(unpack_awq(_present(whole.qzeros))).T)
        case "weight_scale":
            return np.ascontiguousarray(whole.scales.T)
        case _:
            return np.array([whole.scales.shape[1], whole.qweight.shape[0]], np.int64)


def _pack_low_first(values: NDArray[np.uint8]) -> NDArray[np.int32]:
    """uint8 [R, C] -> int32 [R, C/8]: shifts and sums, unlike the reader's bytes, so that one checks the other."""
    nibbles = values.reshape(values.shape[0], -1, 8).astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))
    words: NDArray[np.int32] = nibbles.sum(axis=2, dtype=np.uint32).view(np.int32)
    return words


def _companions(spec: Spec) -> dict[str, str]:
    """The files that stand beside weights, index and configuration: ten."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    letters = {chr(b if b in printable else next(spare)): b for b in range(BYTE_VOCABULARY)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }
    note = f"A generated checkpoint with random weights: layout {spec.layout}, seed {spec.seed}. Not a model.\n"
    return {
        ".gitattributes": "*.safetensors filter=lfs diff=lfs merge=lfs -text\n",
        "README.md": note,
        "added_tokens.json": "{}\n",
        "chat_template.jinja": "{{ messages[-1]['content'] }}\n",
        "generation_config.json": '{"do_sample": false}\n',
        "merges.txt": "#version: 0.2\n",
        "special_tokens_map.json": "{}\n",
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}\n',
        "vocab.json": json.dumps(letters, ensure_ascii=False) + "\n",
    }
