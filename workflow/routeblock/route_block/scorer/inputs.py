# SPDX-License-Identifier: Apache-2.0
"""What the scorer holds runs against, read from disk and hashed by itself: fixture, frozen prediction, expected
identity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json, sha256_array, sha256_bytes, sha256_file
from routeblock.evidence.manifest import SUFFIX, Manifest
from routeblock.evidence.tensors import load_tensors
from routeblock.route_block.scorer.membership import ASKED, HISTORIES, StoredPlan, wanted_plan

FIXTURE, PREDICTION, IDENTITY = "fixture.json", "prediction.json", "identity.json"
LAYER, INPUTS, PLANS = "layer.safetensors", "inputs.safetensors", "plans.safetensors"
SURFACES = ("w13", "activation", "w2", "final")
GEMMS = ("w13", "w2")
STORED_AS = {"float16": "F16", "bfloat16": "BF16"}
CAPTURED_PLANS = "captured plans"
# What freeze-identity writes, and how a document about recorded evidence begins, held here apart from what writes them.
FROZEN_BEFORE, FROZEN_AFTER = "before the first run, as its input", "after the runs"
IDENTITY_RULE = "identity"
RECORDED_LANE = re.compile("recorded-[a-z0-9]+")

Arm = tuple[str, str]


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


Size = Annotated[int, Field(ge=1, le=1 << 20)]
Launch = tuple[Size, Size, Size]


def _of_both(launches: dict[str, Launch]) -> dict[str, Launch]:
    for gemm in GEMMS:
        if gemm not in launches:
            raise ValueError(f"no launch of {gemm}")
    return launches


class Exchange(_Read):
    """Exchange pairs; None where there is none, and why."""

    within: tuple[int, int] | None
    across: tuple[int, int] | None
    why: str = ""
    chosen: str = ""
    """How: published prior data, by construction, by search."""
    source: Annotated[str, Field(alias="from")] = ""
    """From which data."""


class FixtureSpec(_Read):
    """What the scorer needs of fixture.json."""

    format: Literal["routeblock.fixture.v1"]
    name: str
    tokens: Size
    top_k: Size
    block_size: Size
    group_size: int
    dtype: Literal["float16", "bfloat16"]
    hidden: Size
    intermediate: Size
    exchange: Exchange
    digests: dict[str, str]


class _Predicted(_Read):
    """A part of a prediction: it has no field that the scorer does not work out again."""

    model_config = ConfigDict(extra="forbid")


class PredictedArm(_Predicted):
    """One cell under one history, as predicted; of each GEMM whether no tile is split, and how many routes stand in
    split ones.
    """

    cell: str
    history: str
    fingerprint: str
    launches: dict[str, tuple[int, int, int]]
    single_slice: dict[str, bool]
    split_routes: dict[str, int]


class PredictedPair(_Predicted):
    """Two arms: the routes that stand in other blocks, those that each GEMM computes differently, the rows of each
    surface that can differ, and the surfaces that must coincide.
    """

    first: Arm
    second: Arm
    changed_memberships: list[int]
    changed_signature: dict[str, list[int]]
    rows: dict[str, list[int]]
    must_coincide: list[str]

    @property
    def name(self) -> str:
        """Both arms, to be read."""
        return f"{'/'.join(self.first)} and {'/'.join(self.second)}"


class Control(_Predicted):
    """The superseded prediction of the study, with thread_k and thread_n swapped."""

    name: str
    launch: tuple[int, int, int]
    claimed_single_slice: bool
    single_slice: bool
    split_tiles: int


class Prediction(_Predicted):
    """prediction.json."""

    format: Literal["routeblock.prediction.v1"]
    fixture: str
    lane: str
    point: str
    plan_source: Literal["stored", "captured"]
    architecture: str
    launches: Annotated[dict[str, Launch], AfterValidator(_of_both)]
    launch_status: dict[str, str]
    """Where the native launch of each GEMM comes from: published, assumed ..."""
    full_k_grid: Size
    plans: dict[str, str]
    informative: bool
    exchange: Exchange
    arms: list[PredictedArm]
    pairs: list[PredictedPair]
    controls: list[Control]


class ExpectedIdentity(_Read):
    """What was going to compute, written down outside the runs: the scorer asks no run what most of them say."""

    format: Literal["routeblock.expected_identity.v1"]
    lane: str
    source: str
    binary: str
    environment: dict[str, str]
    frozen: str
    """When, and for what was written down afterwards, from what."""


@dataclass(frozen=True)
class Study:
    """Fixture, prediction and expected identity: their digests, and everything that a run has to agree with."""

    fixture_folder: Path
    prediction_path: Path
    identity_path: Path
    identity: ExpectedIdentity
    identity_digest: str
    spec: FixtureSpec
    prediction: Prediction
    fixture_digest: str
    prediction_digest: str
    tensors: Mapping[str, str]
    """SHA-256 of each tensor that goes in; of the layer, its file."""
    files: Mapping[str, str]
    """SHA-256 by name of what every run's manifest must list: the fixture's files, the prediction, captured plans where
    the study has them and, of runs made here, the expected identity. That of recorded runs is committed apart from
    them: no seal of theirs covers it.
    """
    topk_ids: NDArray[Any]
    own: Mapping[str, StoredPlan]
    """The plans of H0 and H1 that the injected cells use."""
    lane: str
    """The lane under which the verdict is filed: that of the runs, or `recorded-...` for runs rebuilt from evidence."""

    @property
    def is_twin(self) -> bool:
        """Whether a CPU computed the runs: there `native` replays a stored plan."""
        return self.prediction.lane.startswith("twin-")

    @property
    def is_recorded(self) -> bool:
        """Whether the runs were rebuilt from evidence that is older than some of what runs now report."""
        return self.lane != self.prediction.lane

    @property
    def dtype(self) -> str:
        """The dtype of every surface, as safetensors writes it."""
        return STORED_AS[self.spec.dtype]

    @property
    def pairs(self) -> dict[str, tuple[int, int] | None]:
        """The exchange pairs, `within` and `across`, of the prediction; None where there is none."""
        return {"within": self.prediction.exchange.within, "across": self.prediction.exchange.across}

    @property
    def arms(self) -> dict[Arm, StoredPlan]:
        """Every cell and history that the fixture has a plan for, with that plan."""
        found = {}
        for cell in ASKED:
            for history in HISTORIES:
                plan = wanted_plan(cell, history, self.own, self.pairs, self.topk_ids)
                if plan is not None:
                    found[cell, history] = plan
        return found

    def shape(self, surface: str) -> list[int]:
        """The shape that a surface has on this fixture."""
        routes, hidden, intermediate = self.spec.tokens * self.spec.top_k, self.spec.hidden, self.spec.intermediate
        shapes = {"w13": (routes, 2 * intermediate), "activation": (routes, intermediate), "w2": (routes, hidden)}
        return list(shapes.get(surface, (self.spec.tokens, hidden)))

    def launch(self, cell: str, gemm: str) -> tuple[int, int, int]:
        """(thread_k, thread_n, grid) that a cell asks for: full_k puts both GEMMs on its own grid."""
        thread_k, thread_n, grid = self.prediction.launches[gemm]
        return thread_k, thread_n, self.prediction.full_k_grid if cell == "full_k" else grid


def _refuse(path: Path, what: str, limit: str, way_out: str) -> InputError:
    return InputError(what, where=str(path), limit=limit, way_out=way_out)


_FREEZE = "make it with routeblock study-a freeze-identity, and the runs after it"

Document = TypeVar("Document", bound=_Read)


def _canonical(path: Path, model: type[Document], way_out: str) -> tuple[Document, str]:
    try:
        data = path.read_bytes()
        if canonical_json(json.loads(data)) != data:
            raise ValueError("not canonical JSON")
        return model.model_validate_json(data), sha256_bytes(data)
    except (OSError, ValueError, RecursionError) as e:
        raise _refuse(path, f"not readable: {first_line(e)}", "canonical JSON of this version", way_out) from e


def read_study(
    fixture: Path, prediction: Path, identity: Path, plans: Path | None = None, lane: str | None = None
) -> Study:
    """Read and hash fixture, prediction and expected identity; `plans`: the file of captured plans, of a study of
    captured plans alone.

    `lane`: the lane under which a verdict is filed, default that of the prediction. Raises InputError if a file is
    missing or broken, or is not the one that fixture.json names, for a lane that these runs are not of, and for an
    identity that was not sealed before runs made here.
    """
    spec, fixture_digest = _canonical(fixture / FIXTURE, FixtureSpec, "make it with routeblock study-a fixture")
    frozen, prediction_digest = _canonical(prediction, Prediction, "make it with routeblock study-a freeze")
    expected, identity_digest = _canonical(
        identity, ExpectedIdentity, "make it with routeblock study-a freeze-identity"
    )
    if expected.lane != frozen.lane:
        limit = f"the runs are of lane {frozen.lane}"
        raise _refuse(identity, f"the identity of lane {expected.lane}", limit, "name the identity of their lane")
    filed = _filed(prediction, frozen.lane, lane)
    files = {FIXTURE: fixture_digest, PREDICTION: prediction_digest}
    if filed == frozen.lane:
        files[IDENTITY] = identity_digest
        _frozen_before(identity, expected, identity_digest)
    elif not expected.frozen.startswith(FROZEN_AFTER):
        limit = f"that of recorded evidence says {FROZEN_AFTER!r} first"
        raise _refuse(identity, f"frozen {expected.frozen!r}", limit, "name the identity beside the evidence")
    if (plans is not None) != (frozen.plan_source == "captured"):
        found, way_out = ("a file of plans", "leave --plans out") if plans else ("no file of plans", "name it: --plans")
        limit = "captured plans come from a file of their own, stored ones from the fixture"
        raise _refuse(prediction, f"{found} for a study of {frozen.plan_source} plans", limit, way_out)
    if plans is not None:
        if not plans.is_file():
            raise _refuse(
                plans, "no such file", "the captured plans are needed", "capture them (routeblock study-a capture)"
            )
        files[CAPTURED_PLANS] = sha256_file(plans)
    for name in (LAYER, INPUTS, PLANS):
        path = fixture / name
        if not path.is_file():
            raise _refuse(path, "no such file", "a fixture has four files", "make the fixture again")
        files[name] = sha256_file(path)
        if files[name] != spec.digests.get(name):
            limit = f"fixture.json names SHA-256 {spec.digests.get(name)}"
            raise _refuse(path, f"its SHA-256 is {files[name]}", limit, "make the fixture again")
    inputs = load_tensors(fixture / INPUTS)
    stored = load_tensors(plans or fixture / PLANS)
    shape = (spec.tokens, spec.top_k)
    if inputs.keys() != {"hidden", "topk_ids", "topk_weights"} or inputs["topk_ids"].shape != shape:
        held = ", ".join(f"{name} {list(x.shape)}" for name, x in sorted(inputs.items()))
        limit = f"hidden, topk_weights, topk_ids {list(shape)}"
        raise _refuse(fixture / INPUTS, f"it holds {held or 'nothing'}", limit, "make the fixture again")
    routes = int(inputs["topk_ids"].size)
    try:
        own = {
            h: StoredPlan(stored[f"{h}.sorted_token_ids"], stored[f"{h}.expert_ids"], spec.block_size, routes)
            for h in HISTORIES
        }
    except KeyError as e:
        raise _refuse(plans or fixture / PLANS, f"no tensor {e}", "plans of H0 and H1", "make the plans again") from e
    for history, plan in own.items():
        if fault := plan.fault(inputs["topk_ids"]):
            way_out = "make the plans again"
            raise _refuse(plans or fixture / PLANS, f"{history}: {fault[1]}", "a legal plan is needed", way_out)
    hashed = {name: sha256_array(inputs[name]) for name in ("hidden", "topk_ids", "topk_weights")}
    return Study(
        fixture,
        prediction,
        identity,
        expected,
        identity_digest,
        spec,
        frozen,
        fixture_digest,
        prediction_digest,
        {**hashed, "layer": files[LAYER]},
        files,
        inputs["topk_ids"],
        own,
        filed,
    )


def with_prediction(study: Study, path: Path) -> Study:
    """The study with another prediction. Raises InputError if it cannot be read."""
    frozen, digest = _canonical(path, Prediction, "make it with routeblock study-a freeze")
    files = {**study.files, PREDICTION: digest}
    return replace(study, prediction_path=path, prediction=frozen, prediction_digest=digest, files=files)


def _filed(prediction: Path, own: str, lane: str | None) -> str:
    # Evidence from a GPU may be filed as recorded; nothing else is called what it is not.
    if lane in (None, own) or (own == "cuda" and lane is not None and RECORDED_LANE.fullmatch(lane)):
        return lane or own
    raise _refuse(prediction, f"runs of lane {own}", f"they cannot be filed as {lane}", f"name {own}")


def _frozen_before(path: Path, expected: ExpectedIdentity, digest: str) -> None:
    """Refuse an identity that is not as the rule sealed it, or that was not written for runs to come."""
    if expected.frozen != FROZEN_BEFORE:
        raise _refuse(path, f"frozen {expected.frozen!r}", f"that of runs made here is {FROZEN_BEFORE!r}", _FREEZE)
    seal = path.with_suffix(SUFFIX)
    try:
        manifest = Manifest.model_validate_json(seal.read_bytes())
    except (OSError, ValueError) as e:
        raise _refuse(seal, f"no readable seal: {first_line(e)}", "an identity is sealed", _FREEZE) from e
    sealed = [(entry.path, entry.size, entry.sha256) for entry in manifest.outputs]
    if sealed != [(path.name, path.stat().st_size, digest)]:
        raise _refuse(path, "not the file that was sealed", "an identity stays as it was frozen", _FREEZE)
    if manifest.code != expected.source:
        found = f"sealed by code {manifest.code[:16]}"
        raise _refuse(seal, found, f"the code that it expects of the runs, {expected.source[:16]}", _FREEZE)
    if (manifest.rule, manifest.parameters) != (IDENTITY_RULE, {"lane": expected.lane}):
        found = f"sealed by rule {manifest.rule!r} for {manifest.parameters}"
        raise _refuse(seal, found, f"rule {IDENTITY_RULE!r} and lane {expected.lane}", _FREEZE)


def bits(x: NDArray[Any]) -> NDArray[Any]:
    """The raw bits of a float16 or bfloat16 array: what compares equal here is equal to the last bit."""
    return x.view(np.uint16)


def first_line(error: BaseException) -> str:
    """What is wrong, without what a parser adds to it."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".lstrip(": ")
    return str(error).splitlines()[0] if str(error) else type(error).__name__
