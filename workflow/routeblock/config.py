# SPDX-License-Identifier: Apache-2.0
"""The settings of a study, from config.yaml: typed, and refused in one line where they do not fit."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Hashable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from routeblock.errors import UNREADABLE, InputError


class FixtureName(StrEnum):
    """Which layer, routing and plans a study runs on."""

    PUBLISHED_GEOMETRY = "published_geometry"
    CHECKPOINT = "checkpoint"


class Lane(StrEnum):
    """Where a study runs."""

    TWIN_AMPERE = "twin-ampere"
    TWIN_HOPPER = "twin-hopper"
    CUDA = "cuda"
    RECORDED_H200 = "recorded-h200"


class Point(StrEnum):
    """The operating point: thread sizes and grid of both GEMMs."""

    PUBLISHED = "published"
    AUTO = "auto"


class PlanSource(StrEnum):
    """Where the plans of the injected cells come from."""

    STORED = "stored"
    CAPTURED = "captured"


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) != len(values):
        raise ValueError("lists one value twice")
    return values


LIMIT_BYTES = 100_000  # of config.yaml: the given one has 4,000, and PyYAML reads 50,000 in a second
_Some = (Field(min_length=1), AfterValidator(_distinct))


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Fixture(_Section):
    """The layer that a study runs on."""

    name: FixtureName
    """Which fixture."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Seed of the drawn weights and inputs."""


class Census(_Section):
    """How often native alignment is asked, on the lane cuda."""

    calls: Annotated[int, Field(ge=1, le=10_000)]
    """Alignments, each with the layer that follows, in one process."""
    processes: Annotated[int, Field(ge=1, le=1000)]
    """Processes per history."""


class Cuda(_Section):
    """How the lane cuda uses this machine."""

    gpus: Annotated[int, Field(ge=1, le=64)]
    """Replicates are spread over so many GPUs, one process a GPU at a time."""
    python: str | None
    """An interpreter with torch and vllm; None: the one that runs the workflow."""
    wait_s: Annotated[int, Field(ge=1)]
    """Seconds that a process waits for the one before it on its GPU, and for the GPU."""
    census: Census
    """How often native alignment is asked."""


class GroupedLane(StrEnum):
    """Where study B's schedules run."""

    CPU = "cpu"
    CUDA = "cuda"
    RECORDED_H200 = "recorded-h200"


class GroupedSchedule(_Section):
    """Study B: grouped schedules of Q6_K x Q8_1 expert jobs."""

    lanes: Annotated[tuple[GroupedLane, ...], *_Some]
    """Where to run; `cuda` needs a GPU and envs/cuda13.txt or envs/cuda12.txt."""
    minimum_effect: Annotated[float, Field(ge=0, lt=1)]
    """The smallest change of time that matters, as a fraction: a verdict needs the whole interval beyond it."""
    cpu_threads: Annotated[int, Field(ge=1, le=1024)]
    """Threads of lane cpu, at most."""


Command = Annotated[str, Field(min_length=1)]


class Window(_Section):
    """Commands around each timed run on this machine's GPUs, where something else is served there."""

    before: tuple[Command, ...]
    """Drain what is served and hold its queue."""
    check: tuple[Command, ...]
    """Exit 0 while it is drained and held: right before the first batch and after the last."""
    after: tuple[Command, ...]
    """Open it again, whatever happened."""
    resident: tuple[Annotated[str, Field(pattern=r"^[^,]+$")], ...]
    """Names of processes that may stay on a GPU without rejecting batches."""


class Checkpoint(_Section):
    """Where fixture `checkpoint` comes from."""

    path: Annotated[str, Field(min_length=1)]
    """Folder of the checkpoint, plain or in the hub's cache."""
    revision: str | None
    """Commit that the folder must hold; null takes what is there."""
    layer: Annotated[int, Field(ge=0)]
    """Decoder layer."""
    captured: str | None
    """Safetensors file of captured hidden states."""
    prompt: str | None
    """Text of a stand-in."""
    token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None
    """Token ids of a stand-in."""
    all_experts: bool
    """Keep experts that no route uses."""
    confirm: bool
    """Let the twin look for pairs that change bits."""

    @model_validator(mode="after")
    def _one_source(self) -> Checkpoint:
        if sum(x is not None for x in (self.captured, self.prompt, self.token_ids)) != 1:
            raise ValueError("exactly one of captured, prompt and token_ids must be given, the others null")
        return self


class SurveyedLayer(_Section):
    """The layer that predictions and the survey ask about: sizes and quantisation alone."""

    hidden: Annotated[int, Field(ge=128)]
    """Hidden size."""
    intermediate: Annotated[int, Field(ge=64)]
    """Intermediate size of an expert."""
    experts: Annotated[int, Field(ge=1)]
    """Experts."""
    top_k: Annotated[int, Field(ge=1)]
    """Experts of a token."""
    dtype: str
    """float16 or bfloat16."""
    group_size: int
    """Quantisation group along K, -1: one scale a column."""
    zero_points: bool
    """Zero points, or the fixed 8."""


class Survey(_Section):
    """How often can bits change, and how often do they: targets `survey` and `predictions`."""

    layer: SurveyedLayer
    gpus: Annotated[tuple[str, ...], *_Some]
    """GPUs, as moe/devices.py names them."""
    vllm: str
    """vLLM's release."""
    populations: Annotated[tuple[str, ...], *_Some]
    """Populations of routings: uniform, zipf:EXPONENT, topics:TOPICS:EXPONENT, file."""
    routing: str | None
    """The file of population `file`."""
    tokens: Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=1)]
    """Batch sizes."""
    routings: Annotated[int, Field(ge=1)]
    """Routings of a point, at most."""
    sample: Annotated[int, Field(ge=0)]
    """Routings of a point that the twin computes, at most."""
    macs: Annotated[float, Field(ge=0)]
    """Multiply-accumulates that the twin may spend on a point."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Seed of what is drawn."""


class Config(_Section):
    """Every knob of config.yaml."""

    fixture: Fixture
    checkpoint: Checkpoint
    lanes: Annotated[tuple[Lane, ...], *_Some]
    """Where to run; `cuda` needs a GPU and envs/cuda.txt."""
    points: Annotated[tuple[Point, ...], *_Some]
    """Operating points."""
    plan_source: Annotated[tuple[PlanSource, ...], *_Some]
    """Where injected plans come from."""
    replicates: Annotated[int, Field(ge=1, le=1000)]
    """Processes per cell and history."""
    cuda: Cuda
    """How the lane cuda uses this machine."""
    grouped_schedule: GroupedSchedule
    survey: Survey
    window: Window
    """A window around each timed run on this machine's GPUs; without commands and names there is none."""


def load(path: Path) -> Config:
    """Read and check a YAML file. Raises `InputError`: unreadable, no YAML, a key twice, or as `check` does."""
    try:
        if path.stat().st_size > LIMIT_BYTES:
            raise ValueError(f"more than {LIMIT_BYTES} bytes")
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except OSError as e:
        raise _refused(e.strerror or str(e), str(path), "a readable YAML file is needed", "name another file") from e
    except (yaml.YAMLError, *UNREADABLE) as e:
        problem = str(getattr(e, "problem", None) or e or "nested too deep")
        mark = getattr(e, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise _refused(problem, where, "YAML with each key once is needed", "correct the file") from e
    return check(settings, where=str(path))


def check(settings: Any, *, where: str = "config") -> Config:
    """The typed form of settings read from YAML. Raises `InputError` for the first key or value that does not fit."""
    if not isinstance(settings, Mapping):
        raise _refused(
            "no settings", where, "a mapping of keys to values is needed", "start from the given config.yaml"
        )
    try:
        # Through JSON: strict on types there, yet a string may name an enum's member and a list may fill a tuple.
        text = json.dumps(settings, default=str)
    except UNREADABLE as e:
        way_out = "write plain keys, texts, numbers and lists"
        raise _refused(f"not plain settings: {e}", where, "what JSON can say, too", way_out) from e
    try:
        config = Config.model_validate_json(text)
    except ValidationError as e:
        errors = e.errors(include_url=False)
        # A misspelt key is also a missing key: name the spelling.
        errors.sort(key=lambda detail: detail["type"] == "missing")
        raise _explain(errors[0], where) from e
    twins = [lane for lane in config.lanes if lane.startswith("twin-")]
    if twins and PlanSource.CAPTURED in config.plan_source:
        raise _refused(
            f"plan_source captured on lane {twins[0]}",
            where,
            "a CPU has no alignment of its own to capture",
            "take captured plans on the lanes cuda and recorded-h200 alone",
        )
    return config


def _explain(detail: ErrorDetails, where: str) -> InputError:
    key = ".".join(str(part) for part in detail["loc"])
    kind, value = detail["type"], json.dumps(detail["input"])
    if kind == "extra_forbidden":
        *parents, name = (str(part) for part in detail["loc"])
        known = _keys(parents)
        return _refused(f"unknown key {key!r}", where, f"known keys are {', '.join(known)}", _nearest(name, known))
    if kind == "enum":
        known = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
        return _refused(
            f"unknown value {value} of {key}", where, f"known values are {', '.join(known)}", _nearest(value, known)
        )
    if kind == "missing":
        return _refused(f"key {key!r} is missing", where, "every key is needed", "copy it from the given config.yaml")
    message = detail["msg"].removeprefix("Value error, ")
    return _refused(f"{key} is {value[:80]}", where, message[0].lower() + message[1:], "change the value")


def _keys(parents: list[str]) -> list[str]:
    model: Any = Config
    for name in parents:
        model = model.model_fields[name].annotation
    return list(model.model_fields)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.strip('"'), known, n=1)
    return f"did you mean {near[0]!r}?" if near else "use one of these"


def _refused(what: str, where: str, limit: str, way_out: str) -> InputError:
    return InputError(what, where=where, limit=limit, way_out=way_out)


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a key given twice, where PyYAML lets the last one win, and aliases: a few lines of those can
    stand for more than a machine holds.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "an alias (*name)", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "one key is given twice", node.start_mark)
        return mapping
