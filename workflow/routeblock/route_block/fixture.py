# SPDX-License-Identifier: Apache-2.0
"""A fixture: one MoE layer with its routed inputs and its two stored plans, as files that anybody can check.

layer.safetensors holds the layer in AutoAWQ's checkpoint form, experts in use only; inputs.safetensors the hidden
states and the routing; plans.safetensors the plans of H0 and H1; fixture.json what it is, what was checked, and the
digests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, sha256_bytes, sha256_file
from routeblock.evidence.files import write_json
from routeblock.evidence.tensors import TensorFile, load_tensors, open_tensors, save_tensors
from routeblock.moe.routing import AlignedPlan, check_plan, check_topk_ids
from routeblock.route_block.cells import HISTORIES, Pairs

FORMAT = "routeblock.fixture.v1"
LAYER, INPUTS, PLANS, SPEC = "layer.safetensors", "inputs.safetensors", "plans.safetensors", "fixture.json"
TENSOR_FILES = (LAYER, INPUTS, PLANS)
PROJECTIONS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


def pairs_of(exchange: Mapping[str, Any]) -> Pairs:
    """The pairs that an `exchange` entry (of a fixture or a prediction) names."""
    within, across = (exchange[name] for name in ("within", "across"))
    return Pairs(tuple(within) if within else None, tuple(across) if across else None)


LARGEST = 1 << 20  # of any size in a document: far above every model, and small enough to allocate
Size = Annotated[int, Field(ge=1, le=LARGEST)]
RoutePair = Annotated[list[Annotated[int, Field(ge=0, le=LARGEST)]], Field(min_length=2, max_length=2)]


class Exchange(BaseModel):
    """The exchange pairs of a fixture or a prediction; None where there is none."""

    model_config = ConfigDict(strict=True, extra="allow")

    within: RoutePair | None
    across: RoutePair | None
    why: str = ""


def _of_every_file(digests: dict[str, str]) -> dict[str, str]:
    for name in TENSOR_FILES:
        if name not in digests:
            raise ValueError(f"no SHA-256 of {name}")
    return digests


class Spec(BaseModel):
    """The fields of fixture.json that a run reads; others are for the reader."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    layer: Annotated[int, Field(ge=0, le=LARGEST)]
    num_experts: Size
    experts: list[Annotated[int, Field(ge=0, le=LARGEST)]]
    tokens: Size
    top_k: Size
    block_size: Size
    group_size: Annotated[int, Field(ge=-1, le=LARGEST)]
    dtype: Literal["float16", "bfloat16"]
    hidden: Size
    intermediate: Size
    exchange: Exchange
    digests: Annotated[dict[str, str], AfterValidator(_of_every_file)]

    @model_validator(mode="after")
    def _fits_together(self) -> Spec:
        if self.experts != sorted(set(self.experts)) or any(e >= self.num_experts for e in self.experts):
            raise ValueError(f"experts ascend, each once, below num_experts {self.num_experts}")
        routes = self.tokens * self.top_k
        for pair in (self.exchange.within, self.exchange.across):
            if pair and max(pair) >= routes:
                raise ValueError(f"an exchange pair names route {max(pair)} of {routes}")
        return self


def tensor_name(layer: int, expert: int, projection: str, part: str) -> str:
    """AutoAWQ's name of one tensor of one expert."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}.{part}"


@dataclass(frozen=True)
class PackedExpert:
    """One projection of one expert: qweight int32 [K, N/8], qzeros int32 [K/g, N/8] or None, scales [K/g, N]."""

    qweight: NDArray[np.int32]
    qzeros: NDArray[np.int32] | None
    scales: NDArray[Any]


@dataclass(frozen=True)
class LayerFixture:
    """A fixture in memory; the layer's tensors stay on disk until they are asked for."""

    folder: Path
    spec: Mapping[str, Any]
    digest: str
    hidden: NDArray[Any]
    topk_ids: NDArray[np.int32]
    topk_weights: NDArray[np.float32]
    plans: Mapping[str, AlignedPlan]

    @property
    def experts(self) -> list[int]:
        """Global ids of the experts in use, ascending: the rows of the compact weight arrays."""
        return list(self.spec["experts"])

    @cached_property
    def expert_rows(self) -> NDArray[np.int32]:
        """int32 [num_experts]: the row of each global expert in the compact weight arrays, or -1."""
        rows = np.full(self.spec["num_experts"], -1, np.int32)
        rows[self.experts] = np.arange(len(self.experts), dtype=np.int32)
        return rows

    @property
    def pairs(self) -> Pairs:
        """The exchange pairs."""
        return pairs_of(self.spec["exchange"])

    def shape(self, gemm: str) -> tuple[int, int]:
        """(N, K) of `w13` or `w2`."""
        hidden, intermediate = self.spec["hidden"], self.spec["intermediate"]
        return (2 * intermediate, hidden) if gemm == "w13" else (hidden, intermediate)

    def compact(self, plan: AlignedPlan) -> AlignedPlan:
        """The plan with each block's global expert replaced by its row in the compact weight arrays."""
        rows = np.where(plan.expert_ids < 0, -1, self.expert_rows[plan.expert_ids]).astype(np.int32)
        return AlignedPlan(plan.sorted_token_ids, rows, plan.num_tokens_post_padded, plan.block_size, plan.num_routes)

    def packed(self, gemm: str) -> Iterator[list[PackedExpert]]:
        """For each expert in use, the packed projections of `w13` (gate, up) or `w2` (down)."""
        layer = self.spec["layer"]
        with open_tensors(self.folder / LAYER) as tensors:
            for expert in self.experts:
                found = []
                for projection in PROJECTIONS[gemm]:
                    names = {
                        part: tensor_name(layer, expert, projection, part) for part in ("qweight", "qzeros", "scales")
                    }
                    read = {part: tensors.read(n) for part, n in names.items() if self._has(part, n, tensors)}
                    self._check_shapes(gemm, names, read)
                    found.append(PackedExpert(read["qweight"], read.get("qzeros"), read["scales"]))
                yield found

    def _has(self, part: str, name: str, tensors: TensorFile) -> bool:
        """Whether to read a tensor: zero points are absent for all experts or for none."""
        symmetric = not any(n.endswith(".qzeros") for n in tensors.names)
        return not (part == "qzeros" and symmetric and name not in tensors.names)

    def _check_shapes(self, gemm: str, names: Mapping[str, str], read: Mapping[str, NDArray[Any]]) -> None:
        n, k = self.shape(gemm)
        n //= len(PROJECTIONS[gemm])
        groups = 1 if self.spec["group_size"] == -1 else k // self.spec["group_size"]
        wanted = {
            "qweight": ("int32", (k, n // 8)),
            "qzeros": ("int32", (groups, n // 8)),
            "scales": (self.spec["dtype"], (groups, n)),
        }
        for part, x in read.items():
            if (x.dtype.name, x.shape) != wanted[part]:
                raise InputError(
                    f"{names[part]} is {x.dtype.name} {x.shape}",
                    where=str(self.folder / LAYER),
                    limit=f"{wanted[part][0]} {wanted[part][1]} for this layer",
                    way_out="make the fixture again (routeblock fixture)",
                )
            if part == "scales" and not np.isfinite(x.astype(np.float32)).all():
                raise InputError(
                    f"{names[part]} holds an infinity or NaN",
                    where=str(self.folder / LAYER),
                    limit="finite scales",
                    way_out="repair the checkpoint",
                )


def first_fault(error: ValidationError) -> str:
    """The first thing that a strict model refuses: where, and what."""
    detail = error.errors(include_url=False)[0]
    message = detail["msg"].removeprefix("Value error, ")
    return f"{'.'.join(map(str, detail['loc']))}: {message[:1].lower()}{message[1:]}".removeprefix(": ")


def plan_tensors(plans: Mapping[str, AlignedPlan]) -> dict[str, NDArray[np.int32]]:
    """Plans as named tensors `{history}.sorted_token_ids`, `{history}.expert_ids`."""
    named = {}
    for name, plan in plans.items():
        named[f"{name}.sorted_token_ids"] = plan.sorted_token_ids[: plan.num_tokens_post_padded]
        named[f"{name}.expert_ids"] = plan.expert_ids[: plan.num_blocks]
    return named


def plans_from(tensors: Mapping[str, NDArray[Any]], block_size: int, routes: int) -> dict[str, AlignedPlan]:
    """Inverse of `plan_tensors`."""
    plans = {}
    for name in sorted({key.split(".")[0] for key in tensors}):
        if any(x.dtype != np.int32 or x.ndim != 1 for x in tensors.values()):
            raise ValueError("plans are int32, one axis")
        ids, experts = tensors[f"{name}.sorted_token_ids"], tensors[f"{name}.expert_ids"]
        plans[name] = AlignedPlan(ids.astype(np.int32), experts.astype(np.int32), int(ids.size), block_size, routes)
    return plans


def captured_plans(fixture: LayerFixture, path: Path) -> dict[str, AlignedPlan]:
    """The plans of both histories in a file of captured plans. Raises InputError if one is missing or not legal."""
    tensors = load_tensors(path)
    wanted = {f"{history}.{part}" for history in HISTORIES for part in ("sorted_token_ids", "expert_ids")}
    if tensors.keys() != wanted:
        raise InputError(
            f"it holds {', '.join(sorted(tensors)) or 'nothing'}",
            where=str(path),
            limit=f"the plans of {' and '.join(HISTORIES)} are needed",
            way_out="capture them again (routeblock capture, routeblock freeze-plans)",
        )
    plans = plans_from(tensors, fixture.spec["block_size"], fixture.topk_ids.size)
    for history, plan in plans.items():
        check_plan(plan, fixture.topk_ids, fixture.spec["num_experts"], where=f"{path}, {history}")
    return plans


def write_fixture(
    folder: Path,
    spec: Mapping[str, Any],
    *,
    layer: Mapping[str, NDArray[Any]],
    inputs: Mapping[str, NDArray[Any]],
    plans: Mapping[str, AlignedPlan],
) -> None:
    """Write the files of a fixture into an existing folder; `spec` gets format and digests."""
    save_tensors(folder / LAYER, layer)
    save_tensors(folder / INPUTS, inputs)
    save_tensors(folder / PLANS, plan_tensors(plans))
    write_spec(folder, spec)


def write_spec(folder: Path, spec: Mapping[str, Any]) -> None:
    """Write fixture.json last: it names the tensor files by SHA-256."""
    digests = {name: sha256_file(folder / name) for name in TENSOR_FILES}
    write_json(folder / SPEC, {**spec, "format": FORMAT, "digests": digests})


def load_fixture(folder: Path, *, verify: bool = True) -> LayerFixture:
    """Read a fixture. Raises InputError if a file is missing, broken, or not the one that fixture.json names."""

    def refuse(what: str, name: str, limit: str) -> InputError:
        return InputError(
            what, where=str(folder / name), limit=limit, way_out="make the fixture again (routeblock fixture)"
        )

    try:
        data = (folder / SPEC).read_bytes()
        spec = json.loads(data)
        canonical = canonical_json(spec) == data
    except (OSError, ValueError, RecursionError) as e:
        raise refuse(f"not a readable fixture: {e}", SPEC, "canonical JSON of a fixture is needed") from e
    if not isinstance(spec, dict) or spec.get("format") != FORMAT or not canonical:
        raise refuse("not a fixture of this version", SPEC, f"format {FORMAT} in canonical JSON")
    try:
        Spec.model_validate(spec)
    except ValidationError as e:
        raise refuse(first_fault(e), SPEC, "every field of a fixture, well typed") from e
    for name in TENSOR_FILES:
        path = folder / name
        if not path.is_file():
            raise refuse("no such file", name, "a fixture has four files")
        if verify and sha256_file(path) != spec["digests"][name]:
            raise refuse("its bytes are not those the fixture was made with", name, f"SHA-256 {spec['digests'][name]}")
    inputs = load_tensors(folder / INPUTS)
    if inputs.keys() != {"hidden", "topk_ids", "topk_weights"}:
        raise refuse(f"it holds {', '.join(sorted(inputs))}", INPUTS, "hidden, topk_ids and topk_weights")
    hidden, ids, weights = inputs["hidden"], inputs["topk_ids"], inputs["topk_weights"]
    found = (hidden.dtype.name, ids.dtype.name, weights.dtype.name)
    if found != (spec["dtype"], "int32", "float32"):
        raise refuse(f"dtypes {', '.join(found)}", INPUTS, f"{spec['dtype']}, int32 and float32")
    for name, x in (("hidden", hidden), ("topk_weights", weights)):
        if not np.isfinite(x.astype(np.float32)).all():
            raise refuse(f"{name} holds an infinity or NaN", INPUTS, "finite inputs")
    tokens, top_k = spec["tokens"], spec["top_k"]
    if hidden.shape != (tokens, spec["hidden"]) or not ids.shape == weights.shape == (tokens, top_k):
        shapes = f"hidden {hidden.shape}, ids {ids.shape}, weights {weights.shape}"
        raise refuse(shapes, INPUTS, f"one row for each of {tokens} tokens, {top_k} experts a token")
    check_topk_ids(ids, spec["num_experts"], outside_allowed=False)
    if missing := sorted(set(ids.reshape(-1).tolist()) - set(spec["experts"])):
        raise refuse(f"expert {missing[0]} is routed to and not listed", SPEC, "`experts` names every expert in use")
    stored = load_tensors(folder / PLANS)
    if stored.keys() != {f"{h}.{part}" for h in HISTORIES for part in ("sorted_token_ids", "expert_ids")}:
        raise refuse(f"it holds {', '.join(sorted(stored))}", PLANS, f"the plans of {' and '.join(HISTORIES)}")
    try:
        plans = plans_from(stored, spec["block_size"], ids.size)
    except ValueError as e:
        raise refuse(str(e), PLANS, "sorted_token_ids and expert_ids of each history") from e
    for history in HISTORIES:
        check_plan(plans[history], ids, spec["num_experts"], where=f"{folder / PLANS}, {history}")
    return LayerFixture(folder, spec, sha256_bytes(data), hidden, ids, weights, plans)
