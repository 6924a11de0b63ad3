# SPDX-License-Identifier: Apache-2.0
"""Read one MoE layer of a checkpoint: its packed experts in AutoAWQ form, its router and its norm.

Tensors that are already in AutoAWQ form are views of the file; nothing is copied or unpacked. Only the shards that hold
the layer are opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.checkpoint.families import PROJECTIONS
from routeblock.checkpoint.folder import COMPARE, Folder, open_folder
from routeblock.checkpoint.layout import (
    LAYOUTS_PAGE,
    Form,
    Key,
    Layer,
    LayerTensors,
    Part,
    Plain,
    divisibility,
    examine,
    group_layers,
    stored_projections,
)
from routeblock.checkpoint.model import CONFIG, Model, read_model
from routeblock.checkpoint.names import FUSED
from routeblock.checkpoint.quantization import Container
from routeblock.checkpoint.shards import Catalogue, TensorRef, chosen, read_header, read_index, shard_names
from routeblock.errors import InputError
from routeblock.moe.awq import pack_awq, unpack_awq

SHARD_MISSING = "add the shard; nothing is put in its place"
HOLE = 32  # neighbouring rows or columns of zeros that no quantiser writes; every size is a multiple of it
GEMM_PROJECTIONS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


@dataclass(frozen=True)
class PackedProjection:
    """AutoAWQ form: qweight int32 [K, N/8], qzeros int32 [K/g, N/8] or None for the fixed 8, scales [K/g, N] 16-bit."""

    qweight: NDArray[np.int32]
    qzeros: NDArray[np.int32] | None
    scales: NDArray[Any]

    def unpacked(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None, NDArray[Any]]:
        """Values uint8 [K, N] 0..15, zero points uint8 [K/g, N] or None, scales [K/g, N]."""
        zeros = None if self.qzeros is None else unpack_awq(self.qzeros)
        return unpack_awq(self.qweight), zeros, np.ascontiguousarray(self.scales)


@dataclass(frozen=True)
class ExpertLayer:
    """One layer's experts, whole and checked. `dtype` is that of the scales: float16 or bfloat16."""

    layer: int
    model: Model
    form: Form
    dtype: str
    tensors: LayerTensors
    catalogue: Catalogue

    def packed(self, expert: int, projection: str) -> PackedProjection:
        """`gate_proj` or `up_proj` (K=hidden, N=intermediate) or `down_proj` (the other way) of an expert."""
        if not 0 <= expert < self.model.num_experts or projection not in PROJECTIONS:
            raise IndexError(
                f"expert {expert}, {projection} of {self.model.num_experts} experts, {', '.join(PROJECTIONS)}"
            )
        fused = self.form.fused and projection != "down_proj"
        stored = FUSED if fused else projection
        width = self.model.intermediate
        part = slice(width, 2 * width) if fused and projection == "up_proj" else slice(width) if fused else slice(None)
        if self.model.quantization.container is Container.AWQ:
            words = slice(*(None if x is None else x // 8 for x in (part.start, part.stop)))
            zeros = self._part(expert, stored, Part.ZEROS)
            return PackedProjection(
                self._read(expert, stored, Part.WEIGHTS)[:, words],
                None if zeros is None else zeros[:, words],
                self._read(expert, stored, Part.SCALES)[:, part],
            )
        return self._repacked(expert, stored, part)

    def gemm(self, expert: int, gemm: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None, NDArray[Any]]:
        """(q [K, N], zeros [K/g, N] or None, scales [K/g, N]) of `w13` (gate columns, then up columns) or `w2`."""
        parts = [self.packed(expert, p).unpacked() for p in GEMM_PROJECTIONS[gemm]]
        q, scales = (np.concatenate([p[i] for p in parts], axis=1) for i in (0, 2))
        zeros = [p[1] for p in parts if p[1] is not None]
        return q, np.concatenate(zeros, axis=1) if zeros else None, scales

    def other(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Another tensor of the layer by its name inside it, of the shape that the configuration implies; not all 0."""
        ref = self.tensors.others.get(name)
        if ref is None or ref.shape != shape:
            raise InputError(
                f"no tensor {self.tensors.prefix}layers.{self.layer}.{name}"
                if ref is None
                else f"tensor {ref.name} is {ref.dtype} {list(ref.shape)}",
                where=next(iter(self.catalogue.paths)) if ref is None else ref.shard,
                limit=f"the layer's inputs need it as {list(shape)}",
                way_out="give captured inputs with routing instead",
            )
        found = self.catalogue.read(ref.name)
        if not found.any():
            raise self.catalogue.without_data(ref.name, "is all 0")
        return found

    def router(self) -> NDArray[Any]:
        """The weights of the block's router [experts, hidden]: the one tensor of that shape and such a name.

        Raises InputError if there is another number of them, or an expert's row is all 0.
        """
        wanted = (self.model.num_experts, self.model.hidden)
        pattern = re.compile(rf"{re.escape(self.tensors.block)}\.(?:gate|router)(?:\.\w+)?\.weight")
        found = [r for name, r in self.tensors.others.items() if pattern.fullmatch(name) and r.shape == wanted]
        if len(found) != 1:
            raise InputError(
                f"{len(found)} tensors of layer {self.layer} can be its router",
                where=next(iter(self.catalogue.paths)),
                limit=f"one called gate or router, {list(wanted)}, is needed; the layer has {self.tensors.alike()}",
                way_out="give captured inputs with topk_ids and topk_weights",
            )
        gate = self.catalogue.read(found[0].name)
        empty = np.flatnonzero(~gate.any(axis=1))
        if empty.size:
            what = "is all 0" if empty.size == len(gate) else f"is all 0 in the row of expert {empty[0]}"
            raise self.catalogue.without_data(found[0].name, what)
        return gate

    def data_fault(self, expert: int, projection: str) -> InputError | None:
        """The error for a projection without its data, as in a sparse copy, or with scales that are no scales."""
        found = self.packed(expert, projection)
        whose = f"of expert {expert}, {projection},"
        if _constant(found.qweight):
            what, part = f"the weights {whose} are all {found.qweight.flat[0]}", Part.WEIGHTS
            limit = "quantised weights differ from row to row; a sparse or broken copy is all zeros"
        elif (at := self._hole(found.qweight)) is not None:
            what, part = f"the weights {whose} are all 0 in {at}", Part.WEIGHTS
            limit = "quantised weights differ from row to row; a sparse or broken copy has zeros"
        elif not np.isfinite(found.scales).all():
            what, part = f"the scales {whose} hold an infinity or NaN", Part.SCALES
            limit = "finite scales are needed"
        elif zeros := int(np.count_nonzero(found.scales == 0)):
            many = "are all 0" if zeros == found.scales.size else f"have {zeros} zeros"
            what, part = f"the scales {whose} {many}", Part.SCALES
            limit = "a scale is never 0; a sparse or broken copy has zeros"
        else:
            return None
        stored = FUSED if self.form.fused and projection != "down_proj" else projection
        ref = self.tensors.experts[Key(None if self.form.stacked else expert, stored, part)]
        where = str(self.catalogue.paths[ref.shard])
        return InputError(f"tensor {ref.name}: {what}", where=where, limit=limit, way_out=COMPARE)

    def _hole(self, qweight: NDArray[np.int32]) -> str | None:
        """Where `HOLE` neighbouring rows (AutoAWQ) or columns (compressed-tensors) begin that are zeros throughout.

        What a copy leaves out is a run of the file, so neighbours are those of the stored order.
        """
        if self.model.quantization.container is Container.AWQ:
            runs, axis, name = qweight.reshape(-1, HOLE, qweight.shape[1]), (1, 2), "row"
        else:
            runs, axis, name = qweight.reshape(qweight.shape[0], -1, HOLE // 8), (0, 2), "column"
        empty = np.flatnonzero(~runs.any(axis=axis))
        first = HOLE * int(empty[0]) if empty.size else 0
        return f"{name}s {first} to {first + HOLE - 1}" if empty.size else None

    def shape(self, projection: str) -> tuple[int, int]:
        """(K, N) of a projection of one expert."""
        h, i = self.model.hidden, self.model.intermediate
        return (i, h) if projection == "down_proj" else (h, i)

    def groups(self, k: int) -> int:
        """Rows of scales for K rows of weights."""
        group = self.model.quantization.group_size
        return 1 if group == -1 else k // group

    def shards(self) -> list[str]:
        """The shards that hold the experts, ascending."""
        return sorted({ref.shard for ref in self.tensors.experts.values()})

    def _part(self, expert: int, projection: str, part: Part) -> NDArray[Any] | None:
        key = Key(None if self.form.stacked else expert, projection, part)
        ref = self.tensors.experts.get(key)
        if ref is None:
            return None
        found = self.catalogue.read(ref.name)
        return found[expert] if self.form.stacked else found

    def _read(self, expert: int, projection: str, part: Part) -> NDArray[Any]:
        found = self._part(expert, projection, part)
        assert found is not None  # examine() saw it
        return found

    def _repacked(self, expert: int, stored: str, columns: slice) -> PackedProjection:
        """compressed-tensors to AutoAWQ: rows are columns there, so values must be unpacked and turned."""
        words = slice(*(None if x is None else x // 8 for x in (columns.start, columns.stop)))
        values = _low_first(self._read(expert, stored, Part.WEIGHTS)[columns])
        zeros = self._part(expert, stored, Part.ZEROS)
        turned = None if zeros is None else pack_awq(np.ascontiguousarray(_low_first(zeros[words].T)))
        scales = np.ascontiguousarray(self._read(expert, stored, Part.SCALES)[columns].T)
        return PackedProjection(pack_awq(np.ascontiguousarray(values.T)), turned, scales)


def _constant(x: NDArray[Any]) -> bool:
    """Whether all values have the same bits; the first rows settle it unless they are."""
    bits = x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)
    first = bits.flat[0]
    return bool((bits[:1] == first).all()) and bits.size > 1 and bool((bits == first).all())


def _low_first(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """int32 [R, C/8] -> uint8 [R, C], low nibble first."""
    pairs = np.ascontiguousarray(words).view(np.uint8)
    out = np.empty((pairs.shape[0], 2 * pairs.shape[1]), np.uint8)
    np.bitwise_and(pairs, 15, out=out[:, 0::2])
    np.right_shift(pairs, 4, out=out[:, 1::2])
    return out


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: files, index and configuration; no tensor is read yet."""

    folder: Folder
    model: Model
    index: Mapping[str, str] | None

    def catalogue(self, shards: list[str]) -> Catalogue:
        """The tensors of some shards. Raises InputError for a broken shard, or a tensor that two shards hold."""
        found, faults = self.survey(shards)
        if faults:
            raise faults[0]
        return found

    def survey(self, shards: list[str]) -> tuple[Catalogue, list[InputError]]:
        """The tensors of some shards, and everything that is wrong with the shards; a broken one has no tensors."""
        faults: list[InputError] = []
        headers: dict[str, dict[str, TensorRef]] = {}
        paths: dict[str, Path] = {}
        for shard in shards:
            try:
                paths[shard] = self.folder.path(shard, way_out=SHARD_MISSING)
                headers[shard] = read_header(paths[shard], shard)
            except InputError as e:
                faults.append(e)
        tensors, doubtful = chosen(headers, self.index, self.folder.root)
        return Catalogue(paths, tensors, self.index), faults + doubtful

    def shards_of(self, layer: int) -> list[str]:
        """The shards that hold a layer by the index; all of them if there is none."""
        every = shard_names(self.folder.files, self.index)
        if self.index is None:
            return every
        return sorted({s for name, s in self.index.items() if f"layers.{layer}." in name}) or every


def open_checkpoint(path: Path, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint folder. Raises InputError as `open_folder`, `read_model` and `read_index` do."""
    folder = open_folder(path, revision)
    index = read_index(folder.root, folder.files)
    shards = shard_names(folder.files, index)
    model = read_model(folder, index or _tensor_names(folder, shards))
    if not shards:
        raise InputError(
            "no safetensors file",
            where=str(folder.root),
            limit="weights are needed",
            way_out="name the folder that holds them",
        )
    return Checkpoint(folder, model, index)


def _tensor_names(folder: Folder, shards: list[str]) -> list[str]:
    """The names in the shards that can be read; what is wrong with the others is reported where they are used."""
    found: list[str] = []
    for shard in shards:
        with suppress(InputError):
            found += read_header(folder.path(shard), shard)
    return found


def one_prefix(
    layers: Mapping[tuple[str, int], LayerTensors], number: int, checkpoint: Checkpoint
) -> LayerTensors | InputError:
    """The layer of that number; an error if none has experts, or tensors of two prefixes claim to be it."""
    found = [x for (_, n), x in layers.items() if n == number and (x.experts or x.unknown)]
    root = checkpoint.folder.root
    if len(found) == 1:
        return found[0]
    if not found:
        here = next((x.alike() for (_, n), x in layers.items() if n == number), "")
        names = f"it has {here}" if here else "no tensor has its name"
        return InputError(
            f"layer {number} has no expert tensors",
            where=str(root),
            limit=f"{root / CONFIG} makes layers {ranges(checkpoint.model.moe_layers)} mixtures of experts; {names}",
            way_out=f"use a checkpoint of a layout in {LAYOUTS_PAGE}",
        )
    return InputError(
        f"layer {number} is found under {' and '.join(repr(x.prefix) for x in found)}",
        where=str(root),
        limit="one name for each tensor",
        way_out="remove or rename one of them",
    )


def read_layer(checkpoint: Checkpoint, layer: int) -> ExpertLayer:
    """One layer with packed experts, every tensor of them found and of the right shape.

    Raises InputError for the first thing that is wrong: no such MoE layer, a tensor missing, unexpected or misshapen, a
    layer that is not quantised, sizes that the kernel does not take.
    """
    model, config = checkpoint.model, str(checkpoint.folder.root / CONFIG)
    if layer not in model.moe_layers:
        raise InputError(
            f"layer {layer}",
            where=config,
            limit=f"layers with experts are {ranges(model.moe_layers)}",
            way_out="choose one of them",
        )
    faults = divisibility(model, checkpoint.folder)
    shards, every = checkpoint.shards_of(layer), shard_names(checkpoint.folder.files, checkpoint.index)
    catalogue, found = _examined(checkpoint, layer, shards, faults)
    if not isinstance(found, Layer | Plain) and set(shards) != set(every):
        # What the index does not name may lie in any shard.
        catalogue, found = _examined(checkpoint, layer, every, faults)
    if isinstance(found, InputError):
        raise found
    if isinstance(found, Plain):
        raise found.fault(layer, checkpoint.folder)
    fault = stored_shape_fault(found, model, catalogue, checkpoint.folder)
    if fault:
        raise fault
    dtype = {"F16": "float16", "BF16": "bfloat16"}[found.scale_dtype]
    return ExpertLayer(layer, model, found.form, dtype, found.tensors, catalogue)


def _examined(
    checkpoint: Checkpoint, layer: int, shards: list[str], faults: list[InputError]
) -> tuple[Catalogue, Layer | Plain | InputError]:
    """What some shards have of a layer; `faults` of its sizes come before those of single tensors."""
    catalogue = checkpoint.catalogue(shards)
    tensors = one_prefix(group_layers(catalogue.tensors, checkpoint.model), layer, checkpoint)
    if isinstance(tensors, InputError):
        return catalogue, tensors
    if faults:
        return catalogue, faults[0]
    found = examine(tensors, checkpoint.model, checkpoint.folder, checkpoint.index)
    return catalogue, found[0].error() if isinstance(found, list) else found


def stored_shape_fault(found: Layer, model: Model, catalogue: Catalogue, folder: Folder) -> InputError | None:
    """compressed-tensors also stores each weight's own shape [N, K]: the first that config.json contradicts."""
    sizes = stored_projections(found.form, model)
    for key, ref in found.tensors.experts.items():
        if key.part is not Part.SHAPE:
            continue
        k, n = sizes[key.projection]
        stored = np.asarray(catalogue.read(ref.name)).reshape(-1, ref.shape[-1])
        if not (stored[:, -2:] == (n, k)).all():
            return InputError(
                f"tensor {ref.name} says {stored[0].tolist()}",
                where=str(folder.root / ref.shard),
                limit=f"the sizes in {CONFIG} make it [{n}, {k}]",
                way_out=f"correct {CONFIG}",
            )
    return None


def ranges(numbers: tuple[int, ...] | list[int]) -> str:
    """Ascending numbers as `0-5, 7`."""
    runs: list[list[int]] = []
    for x in numbers:
        if runs and x == runs[-1][1] + 1:
            runs[-1][1] = x
        else:
            runs.append([x, x])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
