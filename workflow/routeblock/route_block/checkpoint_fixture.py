# SPDX-License-Identifier: Apache-2.0
"""A fixture from a real checkpoint: one layer's packed experts, routed inputs, and plans found by search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import atomic_folder, write_json
from routeblock.evidence.manifest import seal
from routeblock.evidence.tensor_stream import LazyTensor, stream_tensors
from routeblock.evidence.tensors import save_tensors
from routeblock.moe.checkpoint.inputs import Inputs, captured_inputs, finite_in, stand_in_inputs
from routeblock.moe.checkpoint.layer import ExpertLayer, PackedProjection, open_checkpoint, read_layer
from routeblock.moe.checkpoint.manifest import compare, identity, read_manifest
from routeblock.moe.checkpoint.model import PROJECTIONS
from routeblock.moe.routing import AlignedPlan, block_size_for, check_plan
from routeblock.route_block.fixture import (
    FORMAT,
    INPUTS,
    LAYER,
    PLANS,
    SPEC,
    TENSOR_FILES,
    LayerFixture,
    plan_tensors,
    tensor_name,
)
from routeblock.route_block.operating_point import operating_point
from routeblock.route_block.pairs import Sensitivity, find_pairs

NAME = "checkpoint"


@dataclass(frozen=True)
class Request:
    """What to make a fixture of. One of `captured`, `prompt` and `token_ids` gives the inputs.

    `manifest` is the checkpoint's files.json; `points` are (operating point, lane) whose launches the pair search looks
    at, the first decisive; `all_experts` keeps experts that no route uses; `confirm` lets the twin look for pairs that
    change bits.
    """

    checkpoint: Path
    manifest: Path
    layer: int
    revision: str | None = None
    captured: Path | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    points: Sequence[tuple[str, str]] = (("published", "twin-ampere"),)
    all_experts: bool = False
    confirm: bool = False


def write_checkpoint_fixture(folder: Path, request: Request) -> dict[str, str]:
    """Write the files of the fixture into an existing folder; the SHA-256 of its tensor files, as they were written.

    The shards that hold the layer are hashed and held against the manifest, every other file by its size. Raises
    InputError for anything in the checkpoint, the manifest or the inputs that does not fit.
    """
    given = [x for x in (request.captured, request.prompt, request.token_ids) if x is not None]
    if len(given) != 1:
        raise InputError(
            f"{len(given)} sources of inputs",
            where=f"fixture {NAME}",
            limit="one of captured inputs, a prompt and token ids",
            way_out="name one of them",
        )
    checkpoint = open_checkpoint(request.checkpoint, request.revision)
    data, entries = read_manifest(request.manifest)
    layer = read_layer(checkpoint, request.layer)
    differences = compare(checkpoint.folder, entries, ["config.json", *layer.shards()])
    if differences:
        raise differences[0]
    if request.captured is not None:
        inputs = captured_inputs(request.captured, checkpoint, layer)
    else:
        inputs = stand_in_inputs(checkpoint, layer, prompt=request.prompt, token_ids=request.token_ids)
    for name, x in (("hidden", inputs.hidden), ("topk_weights", inputs.topk_weights)):
        if not finite_in(x, layer.dtype):
            raise InputError(
                f"{name}: an infinity or NaN in {layer.dtype}",
                where=f"fixture {NAME}",
                limit="finite inputs",
                way_out="give other inputs",
            )
    experts = sorted(set(inputs.topk_ids.reshape(-1).tolist()))
    stored = list(range(layer.model.num_experts)) if request.all_experts else experts
    spec = _spec(layer, inputs, experts)
    digests = {LAYER: stream_tensors(folder / LAYER, list(_tensors(layer, stored)))}
    launches = [operating_point(point, lane, spec).launches for point, lane in request.points]
    sensitivity = _by_twin(folder, spec, inputs, request.points) if request.confirm else None
    found = find_pairs(inputs.topk_ids, spec["num_experts"], spec["block_size"], spec, launches, sensitivity)
    for history, plan in found.plans.items():
        check_plan(plan, inputs.topk_ids, spec["num_experts"], where=f"fixture {NAME}, {history}")
    named: dict[str, NDArray[Any]] = {
        "hidden": inputs.hidden,
        "topk_ids": inputs.topk_ids,
        "topk_weights": inputs.topk_weights,
    }
    for name, tensors in ((INPUTS, named), (PLANS, plan_tensors(found.plans))):
        save_tensors(folder / name, tensors)
        digests[name] = sha256_file(folder / name)
    source = {
        **identity(data, checkpoint.folder.revision, request.layer),
        "form": f"{layer.model.quantization.container}, {layer.form}",
        "model_type": layer.model.model_type,
        "shards": layer.shards(),
        "inputs": inputs.source,
    }
    document = {
        **spec,
        "format": FORMAT,
        "digests": digests,
        "source": source,
        "exchange": found.exchange,
        "facts": found.facts,
    }
    write_json(folder / SPEC, document)
    return digests


def _by_twin(folder: Path, spec: dict[str, Any], inputs: Inputs, points: Sequence[tuple[str, str]]) -> Sensitivity:
    """What the twin shows of this layer at each point; the layer's tensors lie in `folder`."""
    from routeblock.route_block import confirm  # numba: only where it is asked for

    fixture = LayerFixture(folder, spec, "", inputs.hidden, inputs.topk_ids, inputs.topk_weights, {})

    def look(plan: AlignedPlan, block_pairs: Sequence[tuple[int, int]]) -> list[Mapping[int, frozenset[str]]]:
        return [confirm.shown(confirm.Layer(fixture, point, lane), plan, block_pairs) for point, lane in points]

    return look


def seal_fixture(out: Path, request: Request, *, code: str) -> None:
    """Make the fixture at `out`, whole or not at all, and seal it. Raises as `write_checkpoint_fixture` does.

    Captured inputs lie outside the results, as the checkpoint does: fixture.json names their SHA-256.
    """
    parameters = {
        "layer": request.layer,
        "revision": request.revision,
        "prompt": request.prompt,
        "token_ids": request.token_ids,
        "points": [list(p) for p in request.points],
        "all_experts": request.all_experts,
        "confirm": request.confirm,
    }
    with atomic_folder(out) as folder:
        digests = write_checkpoint_fixture(folder, request)
        files = [folder / name for name in (*TENSOR_FILES, SPEC)]
        seal(
            folder / "fixture.manifest.json",
            rule="checkpoint_fixture",
            outputs=files,
            inputs=[request.manifest],
            parameters=parameters,
            code=code,
            known={folder / name: sha256 for name, sha256 in digests.items()},
        )


def parse_tokens(text: str | None) -> list[int] | None:
    """Token ids as the command line gives them."""
    if text is None:
        return None
    try:
        return [int(x) for x in text.split(",")]
    except ValueError as e:
        raise InputError(
            f"token ids {text[:80]!r}", where="--token-ids", limit="whole numbers and commas", way_out="as in 1,2,3"
        ) from e


def parse_points(texts: Sequence[str] | None) -> list[tuple[str, str]]:
    """`POINT:LANE` as the command line gives them; the published launch if there are none."""
    found = []
    for text in texts or ["published:twin-ampere"]:
        point, colon, lane = text.partition(":")
        if not colon:
            raise InputError(f"point {text!r}", where="--point", limit="POINT:LANE", way_out="as in auto:twin-hopper")
        found.append((point, lane))
    return found


def _spec(layer: ExpertLayer, inputs: Inputs, experts: list[int]) -> dict[str, Any]:
    model = layer.model
    tokens, top_k = inputs.topk_ids.shape
    return {
        "name": NAME,
        "kind": inputs.source["kind"],
        "layer": layer.layer,
        "num_experts": model.num_experts,
        "experts": experts,
        "tokens": tokens,
        "top_k": top_k,
        "block_size": block_size_for(tokens, top_k, model.num_experts),
        "group_size": model.quantization.group_size,
        "dtype": layer.dtype,
        "hidden": model.hidden,
        "intermediate": model.intermediate,
    }


def _tensors(layer: ExpertLayer, experts: Sequence[int]) -> Iterator[LazyTensor]:
    """The layer's tensors in AutoAWQ form, expert by expert, each made when it is written."""
    for expert in experts:
        for projection in PROJECTIONS:
            k, n = layer.shape(projection)
            groups = layer.groups(k)
            parts: dict[str, tuple[str, tuple[int, ...], Callable[[PackedProjection], NDArray[Any] | None]]] = {
                "qweight": ("int32", (k, n // 8), lambda p: p.qweight),
                "qzeros": ("int32", (groups, n // 8), lambda p: p.qzeros),
                "scales": (layer.dtype, (groups, n), lambda p: p.scales),
            }
            if not layer.model.quantization.zero_points:
                del parts["qzeros"]
            once = _Once(layer, expert, projection)
            for part, (dtype, shape, pick) in parts.items():
                name = tensor_name(layer.layer, expert, projection, part)
                yield LazyTensor(name, dtype, shape, _picked(once, pick, name))


class _Once:
    """A projection that is read when its first tensor is written and forgotten after its last."""

    def __init__(self, layer: ExpertLayer, expert: int, projection: str) -> None:
        self.read: Callable[[], PackedProjection] = lambda: layer.packed(expert, projection)
        self.left = 3 if layer.model.quantization.zero_points else 2
        self.found: PackedProjection | None = None

    def __call__(self) -> PackedProjection:
        found = self.found or self.read()
        self.left -= 1
        self.found = found if self.left else None
        return found


def _picked(
    once: _Once, pick: Callable[[PackedProjection], NDArray[Any] | None], name: str
) -> Callable[[], NDArray[Any]]:
    def make() -> NDArray[Any]:
        found = pick(once())
        assert found is not None
        if found.dtype != np.int32 and not np.isfinite(found).all():  # scales
            raise InputError(
                f"{name}: an infinity or NaN",
                where=f"fixture {NAME}",
                limit="finite scales",
                way_out="repair the checkpoint",
            )
        return found

    return make
