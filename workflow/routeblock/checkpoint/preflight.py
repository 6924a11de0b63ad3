# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is and everything that is wrong with it, from its headers alone, in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from routeblock.checkpoint.families import PROJECTIONS
from routeblock.checkpoint.layer import Checkpoint, one_prefix, open_checkpoint, ranges, read_layer, stored_shape_fault
from routeblock.checkpoint.layout import (
    MISSING,
    Layer,
    LayerTensors,
    Plain,
    Problem,
    divisibility,
    examine,
    group_layers,
    merge,
)
from routeblock.checkpoint.model import CONFIG, Model
from routeblock.checkpoint.shards import Catalogue, shard_names
from routeblock.errors import InputError
from routeblock.moe.partition import operator_group

TENSOR_PARALLEL = (1, 2, 4, 8)


@dataclass
class Report:
    """What was found: a few sentences to print, and the problems, each one line."""

    lines: list[str] = field(default_factory=list)
    problems: list[InputError] = field(default_factory=list)


def preflight(path: Path, revision: str | None = None, layer: int | None = None, tensor_parallel: int = 1) -> Report:
    """Examine a checkpoint. `layer` and `tensor_parallel` say what it is wanted for: what they need and the checkpoint
    does not have is a problem. Reads headers only, and of `layer` also its experts' data. Raises InputError
    where nothing more can be said (no folder, no configuration).
    """
    checkpoint = open_checkpoint(path, revision)
    report = Report()
    catalogue, faults = checkpoint.survey(shard_names(checkpoint.folder.files, checkpoint.index))
    report.problems += checkpoint.folder.unfinished() + faults
    states = dict(_layers(checkpoint, catalogue, report))
    report.problems += divisibility(checkpoint.model, checkpoint.folder, tensor_parallel)
    if layer is not None and not isinstance(states.get(layer), Layer):
        report.problems += _unfit(checkpoint, layer, states.get(layer))
    elif layer is not None and not report.problems:
        report.problems += _without_data(checkpoint, layer)
    report.lines = list(_describe(checkpoint, catalogue, states))
    return report


State = Layer | Plain | None


def _layers(checkpoint: Checkpoint, catalogue: Catalogue, report: Report) -> Iterator[tuple[int, State]]:
    layers = group_layers(catalogue.tensors, checkpoint.model)
    lost = set(shard_names(checkpoint.folder.files, checkpoint.index)) - _readable(catalogue)
    broken: list[Problem] = []
    for number in checkpoint.model.moe_layers:
        tensors = one_prefix(layers, number, checkpoint)
        if isinstance(tensors, InputError):
            if not lost:
                report.problems.append(tensors)
            yield number, None
            continue
        state = examine(tensors, checkpoint.model, checkpoint.folder, checkpoint.index)
        if isinstance(state, list):
            # A shard that cannot be read was named once; the tensors that the index puts there say nothing new.
            broken += [p for p in state if not (p.what == MISSING and _lies_in(p.tensor, checkpoint, lost))]
            yield number, None
        else:
            if isinstance(state, Layer) and (fault := _stored_shapes(state, checkpoint, catalogue)):
                report.problems.append(fault)
            yield number, state
    report.problems += [p.error() for p in merge(broken)]
    report.problems += _beyond(layers, checkpoint)
    experts = {ref.name for x in layers.values() for ref in (*x.experts.values(), *x.unknown)}  # examine() saw them
    report.problems += [f for name in catalogue.tensors if name not in experts and (f := catalogue.misplaced(name))]


def _stored_shapes(state: Layer, checkpoint: Checkpoint, catalogue: Catalogue) -> InputError | None:
    return stored_shape_fault(state, checkpoint.model, catalogue, checkpoint.folder)


def _beyond(layers: dict[tuple[str, int], LayerTensors], checkpoint: Checkpoint) -> Iterator[InputError]:
    """Experts in decoder layers that the configuration calls dense (layers past the last are prediction heads)."""
    model, folder = checkpoint.model, checkpoint.folder
    for (_, number), tensors in layers.items():
        if number < model.num_layers and number not in model.moe_layers and tensors.experts:
            first = next(iter(tensors.experts.values()))
            yield InputError(
                f"tensor {first.name} belongs to an expert of layer {number}",
                where=str(folder.root / first.shard),
                limit=f"{CONFIG} gives experts to layers {ranges(model.moe_layers)}",
                way_out=f"correct {CONFIG}",
            )


def _readable(catalogue: Catalogue) -> set[str]:
    return {ref.shard for ref in catalogue.tensors.values()}


def _lies_in(tensor: str, checkpoint: Checkpoint, lost: set[str]) -> bool:
    return bool(lost) and (checkpoint.index is None or checkpoint.index.get(tensor) in lost)


def _unfit(checkpoint: Checkpoint, layer: int, state: State) -> list[InputError]:
    where = str(checkpoint.folder.root)
    if layer not in checkpoint.model.moe_layers:
        limit = f"layers with experts are {ranges(checkpoint.model.moe_layers)}"
        return [InputError(f"layer {layer} has no experts", where=where, limit=limit, way_out="choose one of them")]
    if isinstance(state, Plain):
        return [state.fault(layer, checkpoint.folder)]
    return []  # its own problems are listed


def _without_data(checkpoint: Checkpoint, layer: int) -> list[InputError]:
    """The first projection of the layer whose weights or scales are no data."""
    experts = read_layer(checkpoint, layer)
    every = ((e, p) for e in range(checkpoint.model.num_experts) for p in PROJECTIONS)
    return list(islice((fault for e, p in every if (fault := experts.data_fault(e, p))), 1))


def shapes(model: Model, tensor_parallel: int = 1) -> dict[str, tuple[int, int, int]]:
    """(N, K, group) of both GEMMs as the operator sees them on one of `tensor_parallel` ranks."""
    share, group = model.intermediate // tensor_parallel, model.quantization.group_size
    sizes = {"W13": (2 * share, model.hidden), "W2": (model.hidden, share)}
    return {gemm: (n, k, operator_group(group, k)) for gemm, (n, k) in sizes.items()}


def _group_text(group: int) -> str:
    return "one scale per column" if group == -1 else f"group {group}"


def _describe(checkpoint: Checkpoint, catalogue: Catalogue, states: dict[int, State]) -> Iterator[str]:
    model, folder = checkpoint.model, checkpoint.folder
    q = model.quantization
    size = sum(p.stat().st_size for p in folder.files.values())
    yield f"{folder.root}: {len(folder.files)} files, {size:,} bytes, revision {folder.revision or 'not known'}"
    yield f"{model.model_type}: {model.num_layers} layers, {model.num_experts} experts, top-{model.top_k}"
    zeros = "zero points" if q.zero_points else "symmetric"
    yield f"{q.container}: 4-bit, {_group_text(q.group_size)}, {zeros}"
    yield _routing(model)
    for text, numbers in _runs(states, model):
        yield f"layers {ranges(numbers)}: {text}"
    for tp in TENSOR_PARALLEL:
        faults = divisibility(model, folder, tp)
        if faults:
            yield f"tensor parallel {tp}: not possible: {faults[0].what}; {faults[0].limit}"
        else:
            sizes = "; ".join(f"{gemm} N={n}, K={k}, {_group_text(g)}" for gemm, (n, k, g) in shapes(model, tp).items())
            yield f"tensor parallel {tp}: {sizes}"
    used = {ref.shard for ref in catalogue.tensors.values()}
    yield f"shards: {len(used)}, {len(catalogue.tensors)} tensors"


def _routing(model: Model) -> str:
    if model.renormalise is None:
        return "router: not a plain softmax and top-k; the study needs captured routing"
    divided = "divided by their sum" if model.renormalise else "not divided by their sum"
    return f"router: softmax, top-{model.top_k}, weights {divided} ({model.renormalise_source})"


def _runs(states: dict[int, State], model: Model) -> list[tuple[str, list[int]]]:
    """Layers that are alike, in one line each."""
    found: dict[str, list[int]] = {}
    for number in range(model.num_layers):
        found.setdefault(_state_text(states, number), []).append(number)
    return list(found.items())


def _state_text(states: dict[int, State], number: int) -> str:
    if number not in states:
        return "dense, no experts"
    match states[number]:
        case Layer(form=form, scale_dtype=dtype):
            return f"packed 4-bit experts, {form}, {dtype} scales"
        case Plain(first=first, reason=reason):
            return f"plain {first.dtype} experts, {reason}"
        case _:
            return "experts incomplete or malformed"
