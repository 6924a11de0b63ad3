# SPDX-License-Identifier: Apache-2.0
"""Runs of a fixture's layer, named in words: `plan=H1,grid=200`, `tokens=0-4`, `launch=128x64x528`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.diagnose.answer import Fact
from routeblock.diagnose.layer_run import GEMMS, LayerInputs, Run, Setting
from routeblock.errors import InputError
from routeblock.moe.launches import Launch, selected_launch
from routeblock.moe.routing import AlignedPlan, align, block_size_for
from routeblock.moe.sources import Source
from routeblock.route_block.facts import HISTORIES
from routeblock.route_block.fixtures.fixture import SPEC, TENSOR_FILES, LayerFixture, captured_plans, load_fixture
from routeblock.route_block.operating_point import lane_facts, operating_point
from routeblock.twin.layer import SURFACES, GemmWeights

CANONICAL, REVERSED = "canonical", "reversed"
KEYS = ("plan", "plans", "tokens", "block", "launch", "w13", "w2", "grid", "architecture", "reduction", "full_k")


@dataclass(frozen=True)
class Layer:
    """A fixture, opened for a lane and an operating point: where launches are taken from that a run does not name."""

    fixture: LayerFixture
    inputs: LayerInputs
    lane: str
    point: str

    def compact(self, plan: AlignedPlan) -> AlignedPlan:
        """The plan with experts as rows of the weights."""
        return self.fixture.compact(plan)


@dataclass(frozen=True)
class NamedRun:
    """A run, the tokens of the fixture that its batch has, in order, and the facts that it stands on."""

    run: Run
    tokens: tuple[int, ...]
    facts: tuple[Fact, ...]

    def row(self, surface: str, row: int) -> int:
        """The row here of a row of the fixture; InputError if its token is not in the batch."""
        top_k = self.run.inputs.top_k
        token, slot = (row, 0) if surface == "final" else divmod(row, top_k)
        if token not in self.tokens:
            raise InputError(
                f"token {token} is not in the batch of run {self.run.name}",
                where=f"row {row} of {surface}",
                limit=f"its tokens are {', '.join(map(str, self.tokens))}",
                way_out="choose another row, or name the token in tokens=",
            )
        at = self.tokens.index(token)
        return at if surface == "final" else at * top_k + slot


def inputs_of(folder: Path) -> list[Path]:
    """The files of a fixture, for a manifest."""
    return [folder / name for name in (SPEC, *TENSOR_FILES)]


def open_layer(folder: Path, lane: str, point: str) -> Layer:
    """The layer of a fixture, weights unpacked."""
    from routeblock.twin.weights import unpack

    fixture = load_fixture(folder)
    lane_facts(lane)
    weights = {gemm: GemmWeights(*unpack(fixture, gemm)) for gemm in GEMMS}
    inputs = LayerInputs(
        fixture.hidden, fixture.topk_ids, fixture.topk_weights, weights, fixture.spec["group_size"], fixture.expert_rows
    )
    return Layer(fixture, inputs, lane, point)


def _refuse(text: str, what: str, limit: str) -> InputError:
    return InputError(what, where=f"run {text!r}", limit=limit, way_out="correct this run")


def _words(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, sign, value = part.partition("=")
        if key not in KEYS or (sign != "=" and key != "full_k") or key in found:
            raise _refuse(text, f"{part!r}", f"{', '.join(KEYS[:-1])} as key=value, or full_k; each once")
        found[key] = value
    return found


def _integers(text: str, value: str) -> list[int]:
    """`0-4` or `3` or both joined with `+`."""
    found: list[int] = []
    for part in value.split("+"):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise _refuse(text, f"{value!r}", "numbers and ranges joined with +, such as 0-4+9")
        found += range(int(first), int(last or first) + 1)
    return found


def parse_launch(text: str, value: str) -> Launch:
    """`64x128x246`: thread_k, thread_n, grid."""
    parts = value.split("x")
    if len(parts) != 3 or not all(p.isdigit() and int(p) for p in parts):
        raise _refuse(text, f"launch {value!r}", "thread_k x thread_n x grid, such as 64x128x246")
    return Launch(*map(int, parts))


def named_run(layer: Layer, text: str) -> NamedRun:
    """The run that `text` describes; what it does not name is the fixture's batch, plan H0 and the point's launches.

    Raises InputError for a word that is not known, a token or plan that does not exist, and a launch nobody recorded.
    """
    words = _words(text)
    spec = dict(layer.fixture.spec)
    every = tuple(range(spec["tokens"]))
    tokens = tuple(_integers(text, words["tokens"])) if "tokens" in words else every
    if len(set(tokens)) != len(tokens) or not set(tokens) <= set(every):
        raise _refuse(text, f"tokens {words.get('tokens')}", f"tokens 0 to {spec['tokens'] - 1}, each once")
    whole = tokens == every
    inputs = layer.inputs if whole else layer.inputs.tokens(tokens)
    if not whole:
        spec["block_size"] = block_size_for(len(tokens), spec["top_k"], spec["num_experts"])
    if "block" in words:
        spec["block_size"] = _integers(text, words["block"])[0]
    plan = _plan(layer, text, words, inputs, spec["block_size"], whole)
    launches, sources = _launches(layer, text, words, spec)
    facts = lane_facts(layer.lane)
    reduction = words.get("reduction", "float32")
    if reduction not in ("float32", "dtype"):
        raise _refuse(text, f"reduction {reduction!r}", "float32 or dtype")
    setting = Setting(
        launches["w13"], words.get("architecture", facts.architecture), reduction == "float32", "full_k" in words
    )
    run = Run(text or "plan=H0", inputs, layer.compact(plan), {g: replace(setting, launch=launches[g]) for g in GEMMS})
    return NamedRun(
        run, tokens,
        tuple(Fact(f"launch of {g}, {run.name}", list(launches[g]), *sources[g]) for g in GEMMS),
    )  # fmt: skip


def _plan(
    layer: Layer, text: str, words: Mapping[str, str], inputs: LayerInputs, block_size: int, whole: bool
) -> AlignedPlan:
    own = whole and block_size == layer.fixture.spec["block_size"]
    plans = captured_plans(layer.fixture, Path(words["plans"])) if "plans" in words else layer.fixture.plans
    name = words.get("plan", HISTORIES[0] if own else CANONICAL)
    if name in HISTORIES:
        if not own:
            raise _refuse(text, f"plan {name}", "a stored plan belongs to the fixture's batch and block size")
        return plans[name]
    if name not in (CANONICAL, REVERSED):
        raise _refuse(text, f"plan {name!r}", f"{', '.join(HISTORIES)}, {CANONICAL}, {REVERSED}")
    arrival = np.arange(inputs.topk_ids.size)[:: 1 if name == CANONICAL else -1]
    return align(inputs.topk_ids, layer.fixture.spec["num_experts"], block_size, arrival)


def _launches(
    layer: Layer, text: str, words: Mapping[str, str], spec: Mapping[str, Any]
) -> tuple[dict[str, Launch], dict[str, tuple[Source, str]]]:
    launches: dict[str, Launch] = {}
    sources: dict[str, tuple[Source, str]] = {}
    for gemm in GEMMS:
        value = words.get(gemm, words.get("launch"))
        if value is not None:
            launches[gemm], sources[gemm] = parse_launch(text, value), (Source.GIVEN, "named in the run")
            continue
        if layer.point == "auto":
            n, k = layer.fixture.shape(gemm)
            found = selected_launch(
                lane_facts(layer.lane).gpu, spec["block_size"], spec["dtype"], spec["group_size"], n, k
            )
            launches[gemm], sources[gemm] = found.launch, (found.status, found.source)
            continue
        point = operating_point(layer.point, layer.lane, spec)
        launches[gemm], sources[gemm] = point.launches[gemm], (Source(point.status[gemm]), f"point {layer.point}")
    if "grid" in words:
        grid = _integers(text, words["grid"])[0]
        launches = {g: launch._replace(grid=grid) for g, launch in launches.items()}
        sources = dict.fromkeys(GEMMS, (Source.GIVEN, "grid named in the run"))
    return launches, sources


def parse_element(text: str) -> tuple[str, int, int]:
    """`w13:51:207`: surface, row, column."""
    parts = text.split(":")
    if len(parts) != 3 or parts[0] not in SURFACES or not all(p.isdigit() for p in parts[1:]):
        raise InputError(
            f"element {text!r}",
            where="--element",
            limit=f"surface:row:column, surfaces {', '.join(SURFACES)}",
            way_out="write it as w13:51:207",
        )
    return parts[0], int(parts[1]), int(parts[2])


def common_rows(surface: str, first: NamedRun, second: NamedRun) -> list[tuple[int, int]]:
    """The rows of a surface that hold the same token (and slot) in both runs."""
    top_k = first.run.inputs.top_k
    found = []
    for at, token in enumerate(first.tokens):
        if token not in second.tokens:
            continue
        other = second.tokens.index(token)
        slots: Sequence[int] = (0,) if surface == "final" else range(top_k)
        width = 1 if surface == "final" else top_k
        found += [(at * width + s, other * width + s) for s in slots]
    return found
