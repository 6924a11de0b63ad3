# SPDX-License-Identifier: Apache-2.0
"""Which tensors hold a layer's packed experts, and whether they are all there with the shapes that config.json implies.

Layouts: experts one by one (`experts.7.up_proj.qweight`) or stacked along a first axis (`experts.up_proj.qweight`),
gate and up apart or fused side by side (`gate_up_proj`, gate first). AutoAWQ: qweight int32 [K, N/8], qzeros int32
[K/g, N/8], scales [K/g, N]. compressed-tensors pack-quantized: weight_packed int32 [N, K/8], weight_scale [N, K/g],
weight_zero_point int32 [N/8, K/g], weight_shape [2]; low nibble first, values and zero points stored plus 8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from routeblock.checkpoint.families import PROJECTIONS
from routeblock.checkpoint.folder import COMPARE, Folder
from routeblock.checkpoint.model import CONFIG, Model
from routeblock.checkpoint.names import FUSED, expert_name, layer_name, shapeless
from routeblock.checkpoint.quantization import Container, Quantization
from routeblock.checkpoint.shards import INDEX, SINGLE, TensorRef
from routeblock.errors import InputError

MISSING = "is missing"
SCALE_DTYPES = ("F16", "BF16")
_ELSEWHERE = re.compile(r"^\w*attn\.|norm\.weight$")
LAYOUTS_PAGE = "docs/your-own-checkpoint.md"


class Part(StrEnum):
    """The tensors of a packed projection, and a plain one's."""

    WEIGHTS = "weights"
    ZEROS = "zero points"
    SCALES = "scales"
    SHAPE = "shape"
    PLAIN = "plain"


_PARTS: dict[Container, dict[str, Part]] = {
    Container.AWQ: {"qweight": Part.WEIGHTS, "qzeros": Part.ZEROS, "scales": Part.SCALES},
    Container.COMPRESSED: {
        "packed": Part.WEIGHTS,
        "zero_point": Part.ZEROS,
        "scale": Part.SCALES,
        "shape": Part.SHAPE,
    },
}


_DTYPES: dict[Part, tuple[str, ...]] = {
    Part.WEIGHTS: ("I32",),
    Part.ZEROS: ("I32",),
    Part.SCALES: SCALE_DTYPES,
    Part.SHAPE: ("I64", "I32"),
}


@dataclass(frozen=True)
class Key:
    """What a tensor is: the expert (None: stacked), the projection as stored (`gate_up_proj` if fused) and the part."""

    expert: int | None
    projection: str
    part: Part


@dataclass(frozen=True)
class Form:
    """How a layer's experts are stored."""

    stacked: bool
    fused: bool

    def __str__(self) -> str:
        gates = "gate and up fused" if self.fused else "gate and up apart"
        return f"{'experts stacked' if self.stacked else 'experts one by one'}, {gates}"


@dataclass
class LayerTensors:
    """A decoder layer's tensors: the experts' by what they are, `others` by their name inside the layer.

    `stored` has each projection's own name, `modules` the path of each expert tensor's Linear.
    """

    layer: int
    prefix: str
    block: str = ""
    experts: dict[Key, TensorRef] = field(default_factory=dict)
    modules: dict[Key, str] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    unknown: list[TensorRef] = field(default_factory=list)
    others: dict[str, TensorRef] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The path of the module that holds the experts."""
        return f"{self.prefix}layers.{self.layer}.{self.block}.experts"

    @property
    def form(self) -> Form:
        """How most of the packed projections are stored."""
        packed = [k for k in self.experts if k.part is Part.WEIGHTS]
        stacked = sum(k.expert is None for k in packed)
        return Form(2 * stacked > len(packed), any(k.projection == FUSED for k in packed))

    def alike(self, limit: int = 10) -> str:
        """The names that the layer has outside attention and norms, numbers left open."""
        names = [*(r.name for r in self.experts.values()), *(r.name for r in self.unknown), *self.others]
        inside = (n.partition(f"layers.{self.layer}.")[2] or n for n in names)
        found = list(dict.fromkeys(shapeless(n) for n in inside if not _ELSEWHERE.search(n)))
        return ", ".join(found[:limit]) + (f" and {len(found) - limit} more" if len(found) > limit else "")


@dataclass(frozen=True)
class Layer:
    """A layer that was found to be whole: form and dtype of its packed experts."""

    tensors: LayerTensors
    form: Form
    scale_dtype: str


@dataclass(frozen=True)
class Plain:
    """A layer whose experts are not quantised, and the part of the configuration that says so."""

    first: TensorRef
    reason: str

    def fault(self, layer: int, folder: Folder) -> InputError:
        """Why the study cannot run on it."""
        return InputError(
            f"tensor {self.first.name} is plain {self.first.dtype}",
            where=str(folder.root / self.first.shard),
            limit=f"{self.reason} in {CONFIG}, and the study needs packed 4-bit experts",
            way_out=f"choose another layer than {layer} (routeblock checkpoint check lists them)",
        )


def group_layers(tensors: Mapping[str, TensorRef], model: Model) -> dict[tuple[str, int], LayerTensors]:
    """The decoder layers among `tensors`, by prefix and number."""
    parts = {**_PARTS[model.quantization.container], "weight": Part.PLAIN}
    layers: dict[tuple[str, int], LayerTensors] = {}
    for name, ref in tensors.items():
        found = layer_name(name)
        if found is None:
            continue
        layer = layers.setdefault((found.prefix, found.layer), LayerTensors(found.layer, found.prefix))
        if found.block is None:
            layer.others[found.rest] = ref
            continue
        layer.block = layer.block or found.block
        expert = expert_name(found.inside) if layer.block == found.block else None
        if expert is None or expert.part not in parts:
            layer.unknown.append(ref)
            continue
        key = Key(expert.expert, expert.projection, parts[expert.part])
        if key in layer.experts:
            layer.unknown.append(ref)
        layer.experts[key] = ref
        layer.modules[key] = f"{found.module}.{expert.module}"
        layer.stored.setdefault(expert.projection, expert.stored)
    return layers


@dataclass
class Problem:
    """One rule that tensors of a layer break, the first of them named."""

    where: str
    tensor: str
    what: str
    rule: str
    way_out: str
    more: int = 0

    @property
    def key(self) -> tuple[str, ...]:
        """What makes two problems one kind: tensors may then share a line."""
        missing = self.what == MISSING
        return (self.what if missing else "", self.where if missing else "", self.rule, self.way_out)

    def error(self) -> InputError:
        """As the line that a user sees."""
        more = f" (and {self.more} more like it)" if self.more else ""
        return InputError(
            f"tensor {self.tensor}: {self.what}{more}", where=self.where, limit=self.rule, way_out=self.way_out
        )


def examine(
    layer: LayerTensors, model: Model, folder: Folder, index: Mapping[str, str] | None
) -> Layer | Plain | list[Problem]:
    """The layer's form if its experts are whole, `Plain` if all are declared unquantised, else every broken rule."""
    quantization = model.quantization
    reasons = {key: quantization.why_plain(module) for key, module in layer.modules.items()}
    declared = {module: reasons[key] for key, module in layer.modules.items()}
    if declared and all(declared.values()):
        return _examine_skipped(layer, reasons, folder, quantization)
    found = _Findings(folder, quantization)
    config = folder.root / CONFIG
    for key, ref in layer.experts.items():
        if key.part is not Part.PLAIN:
            continue
        if reason := reasons[key]:
            rule = f"{reason} in {config}, and not the layer's other experts"
            found.add(ref, "is not quantised", rule, f"choose another layer than {layer.layer}")
        else:
            rule = f"{config} quantises layer {layer.layer}: {quantization.key} does not list {layer.module}"
            found.add(ref, "is not quantised", rule, "choose another layer, or list the module")
    packed = [k for k in layer.experts if k.part is not Part.PLAIN]
    if any(reasons[k] for k in packed):
        _check_declared(layer, reasons, config, found)
    elif packed or layer.unknown:
        _check_wanted(layer, model, folder, index, found)
        _check_others(layer, model, folder, found)
        _check_scales(layer, found)
    scales = [r.dtype for k, r in layer.experts.items() if k.part is Part.SCALES]
    return found.problems() or Layer(layer, layer.form, scales[0])


def _check_declared(layer: LayerTensors, reasons: Mapping[Key, str | None], config: Path, found: _Findings) -> None:
    """What the configuration leaves unquantised has no packed tensors."""
    for key, ref in layer.experts.items():
        if key.part is not Part.PLAIN and (reason := reasons[key]):
            found.add(ref, "is quantised", f"{reason} in {config}, so it must not be quantised", "correct config.json")


def _examine_skipped(
    layer: LayerTensors, reasons: Mapping[Key, str | None], folder: Folder, quantization: Quantization
) -> Plain | list[Problem]:
    """A layer whose experts the configuration leaves unquantised."""
    found = _Findings(folder, quantization)
    _check_declared(layer, reasons, folder.root / CONFIG, found)
    plain = [(r, reasons[k]) for k, r in layer.experts.items() if k.part is Part.PLAIN]
    return found.problems() or Plain(plain[0][0], plain[0][1] or "")


def _whole(folder: Folder, index: Mapping[str, str] | None) -> str:
    """Where a tensor of no known shard should be named."""
    return str(folder.root / (INDEX if index is not None else SINGLE))


def _check_wanted(
    layer: LayerTensors, model: Model, folder: Folder, index: Mapping[str, str] | None, found: _Findings
) -> None:
    """Every tensor of a whole layer is there, in the index, with its dtype and shape."""
    q, config = model.quantization, folder.root / CONFIG
    for key, (dtypes, shapes) in _wanted(layer.form, model):
        ref = layer.experts.get(key)
        if ref is None and key.part is not Part.SHAPE:
            name = _name(layer, key, model)
            shard = (index or {}).get(name)
            where = str(folder.root / shard) if shard else _whole(folder, index)
            rule = f"{INDEX} puts it there" if shard else f"each of the {model.num_experts} experts needs it"
            found.missing(where, name, key, rule, q.zero_points)
        elif ref is None:
            continue
        elif ref.dtype not in dtypes or ref.shape not in shapes:
            rule = f"{config} makes it {' or '.join(dtypes)} {list(shapes[0])}"
            found.add(ref, f"is {ref.dtype} {list(ref.shape)}", rule, f"correct {CONFIG}, or {COMPARE}")
        elif index is not None and index.get(ref.name, ref.shard) != ref.shard:
            what = f"is in {index[ref.name]} by the index"
            found.add(ref, what, "that shard does not hold it", f"correct {INDEX}")


def _check_others(layer: LayerTensors, model: Model, folder: Folder, found: _Findings) -> None:
    """No tensor of the experts is left over."""
    q, config, form = model.quantization, folder.root / CONFIG, layer.form
    for ref in layer.unknown:
        rule = f"{q.container} experts, {form}, have no such tensor; the layer has {layer.alike()}"
        found.add(ref, "is not expected here", rule, f"use a checkpoint of a layout in {LAYOUTS_PAGE}")
    wanted = {key for key, _ in _wanted(form, model)}
    for key, ref in layer.experts.items():
        if key in wanted or key.part is Part.PLAIN:
            continue
        if key.part is Part.ZEROS and not q.zero_points:
            found.add(ref, "holds zero points", f"{config} says that there are no zero points", "correct config.json")
        elif key.expert is not None and key.expert >= model.num_experts:
            rule = f"{config} has {model.num_experts} experts"
            found.add(ref, f"belongs to expert {key.expert}", rule, "correct config.json")
        else:
            rule = f"the other experts of the layer are stored otherwise ({form})"
            found.add(ref, "is not expected here", rule, "use a checkpoint with one layout")


def _check_scales(layer: LayerTensors, found: _Findings) -> None:
    """All scales of the layer are of one dtype."""
    scales = [r for k, r in layer.experts.items() if k.part is Part.SCALES]
    for ref in scales:
        if ref.dtype != scales[0].dtype:
            rule = f"other scales of the layer are {scales[0].dtype}"
            found.add(ref, f"is {ref.dtype}", rule, "use a checkpoint with one dtype")


def divisibility(model: Model, folder: Folder, tensor_parallel: int = 1) -> list[InputError]:
    """Why the kernel does not take this layer's shapes on `tensor_parallel` GPUs; empty: it does."""
    return [
        InputError(what, where=str(folder.root / CONFIG), limit=limit, way_out=way_out)
        for what, limit, way_out in _shape_faults(model, tensor_parallel)
    ]


# Facts: vLLM's check for Marlin MoE: hidden a multiple of 128, each rank's intermediate one of max(64, group), and:
KERNEL_GROUPS = (-1, 32, 64, 128)


def _shape_faults(model: Model, tensor_parallel: int) -> Iterator[tuple[str, str, str]]:
    group, hidden, whole = model.quantization.group_size, model.hidden, model.intermediate
    other = "choose a checkpoint with such sizes"
    if group not in KERNEL_GROUPS:
        yield f"group size {group}", f"the Marlin MoE kernel takes {', '.join(map(str, KERNEL_GROUPS))}", other
    if hidden % 128:
        yield f"hidden_size {hidden}", "W13's K and W2's N must be a multiple of 128", other
    least = max(64, group)
    key = model.family.intermediate_key
    if whole % tensor_parallel or whole // tensor_parallel % least:
        share = whole / tensor_parallel
        fits = [t for t in (1, 2, 4, 8) if not whole % (t * least)]
        way_out = f"use tensor parallel {' or '.join(map(str, fits))}" if fits else other
        split = f" split in {tensor_parallel} = {share:g}" if tensor_parallel > 1 else ""
        yield (
            f"{key} {whole}{split}, with group size {group}",
            f"each rank's share must be a multiple of {least}",
            way_out,
        )


def _wanted(form: Form, model: Model) -> Iterator[tuple[Key, tuple[tuple[str, ...], list[tuple[int, ...]]]]]:
    """Every tensor that a whole layer has, with the dtypes and shapes allowed."""
    q = model.quantization
    for projection, (k, n) in stored_projections(form, model).items():
        groups = 1 if q.group_size == -1 else -(-k // q.group_size)
        if q.container is Container.AWQ:
            shapes: dict[Part, tuple[int, ...]] = {
                Part.WEIGHTS: (k, n // 8),
                Part.ZEROS: (groups, n // 8),
                Part.SCALES: (groups, n),
            }
        else:
            shapes = {
                Part.WEIGHTS: (n, k // 8),
                Part.ZEROS: (n // 8, groups),
                Part.SCALES: (n, groups),
                Part.SHAPE: (2,),
            }
        if not q.zero_points:
            del shapes[Part.ZEROS]
        for expert in [None] if form.stacked else range(model.num_experts):
            for part, shape in shapes.items():
                whole = [(model.num_experts, *shape)] if form.stacked else [shape]
                if part is Part.SHAPE and form.stacked:
                    whole = [(3,), (2,), *whole]
                yield Key(expert, projection, part), (_DTYPES[part], whole)


def stored_projections(form: Form, model: Model) -> dict[str, tuple[int, int]]:
    """(K, N) of each projection as stored."""
    h, i = model.hidden, model.intermediate
    gates = {FUSED: (h, 2 * i)} if form.fused else {"gate_proj": (h, i), "up_proj": (h, i)}
    return {**gates, "down_proj": (i, h)}


def _name(layer: LayerTensors, key: Key, model: Model) -> str:
    """The name that a missing tensor should have, spelt as its neighbours are."""
    own = dict(zip(PROJECTIONS, model.family.projections, strict=True)) | layer.stored
    suffix = next(s for s, p in _PARTS[model.quantization.container].items() if p is key.part)
    neighbours = [r.name for k, r in layer.experts.items() if k.part is Part.WEIGHTS]
    underscored = bool(neighbours) and re.search(r"_proj_(qweight|packed)$", neighbours[0]) is not None
    if model.quantization.container is Container.COMPRESSED and not underscored:
        suffix = f"weight_{suffix}"
    expert = "" if key.expert is None else f"{key.expert}."
    return f"{layer.module}.{expert}{own.get(key.projection, key.projection)}{'_' if underscored else '.'}{suffix}"


def merge(problems: Iterable[Problem]) -> list[Problem]:
    """One problem of each kind, the first, with the number of the others."""
    found: dict[tuple[str, ...], Problem] = {}
    for problem in problems:
        first = found.setdefault(problem.key, problem)
        if first is not problem:
            first.more += 1 + problem.more
    return list(found.values())


class _Findings:
    """Problems of one layer."""

    def __init__(self, folder: Folder, quantization: Quantization) -> None:
        self.folder, self.quantization = folder, quantization
        self._found: list[Problem] = []

    def add(self, ref: TensorRef, what: str, rule: str, way_out: str) -> None:
        self._found.append(Problem(str(self.folder.root / ref.shard), ref.name, what, rule, way_out))

    def missing(self, where: str, name: str, key: Key, held: str, zero_points: bool) -> None:
        way_out = "use a checkpoint that has it; nothing is put in its place"
        if key.part is Part.ZEROS and zero_points:
            way_out += f", or set {self.quantization.symmetric} in config.json if the weights are symmetric"
        self._found.append(Problem(where, name, MISSING, held, way_out))

    def problems(self) -> list[Problem]:
        return merge(self._found)
