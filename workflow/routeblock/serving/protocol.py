# SPDX-License-Identifier: Apache-2.0
"""The committed protocol: model, prompts, batch sizes, processes and repeats, and how steps are timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from routeblock.serving.kinds import Alignment, Clock, Kind, Mode
from routeblock.timing import protocol as timing
from routeblock.timing.protocol import Bootstrap, Count, Natural, Seed, Strict, Whole, each_once, read, refuse


class Build(Strict):
    vllm: str
    extension_sha256: str


class Model(Strict):
    """The generated model: see `model.write`."""

    layers: Count
    hidden: Count
    intermediate: Count
    experts: Count
    top_k: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocabulary: Count
    group_size: Count
    dtype: Literal["float16", "bfloat16"]
    seed: Seed


class Prompts(Strict):
    """Token ids drawn evenly from the vocabulary; all are `tokens` long."""

    count: Count
    tokens: Count
    seed: Seed


class Series(Strict):
    """One side of a comparison of step times: a name of its own, so that a side can be timed against itself."""

    name: str
    arm: Alignment


class Steps(Strict):
    """The process that times steps: it switches between the series repetition by repetition."""

    series: tuple[Series, ...]
    baseline: str
    floor: str
    order: str
    repetitions: Count
    warmups: Count
    clocks: dict[Clock, str]


class Margins(Strict):
    eager: float
    graphs: float


class Observed(Strict):
    """The process beside: plans of the first MoE layer, and the number of tokens that the kernel saw."""

    repeats: Count
    words: str


class Captured(Strict):
    """The process whose first MoE layer is held against the twin: orders of arrival that are injected, and batches."""

    arrivals: tuple[str, ...]
    batches: tuple[Count, ...]
    words: str


class Acceptance(timing.Acceptance):
    extra_repetitions: Natural
    pause_ms: Natural

    @property
    def rest_s(self) -> float:
        return self.pause_ms / 1000

    @property
    def retries(self) -> int | None:
        return self.extra_repetitions


class Protocol(Whole):
    """The whole protocol; see fixtures/protocols/serving.json for what its words mean."""

    name: Literal["serving"]
    version: int
    builds: tuple[Build, ...]
    model: Model
    prompts: Prompts
    completion_tokens: Count
    alignments: dict[Alignment, str]
    modes: dict[Mode, str]
    batches: tuple[Count, ...]
    captured_batches: tuple[Count, ...]
    processes: Count
    repeats: Count
    warmups: Count
    order: str
    alone: tuple[Count, ...]
    alone_words: str
    steps: Steps
    observed: Observed
    captured: Captured
    statistic: str
    bootstrap: Bootstrap
    minimum_pairs: float
    margins: Margins
    verdicts: dict[str, str]
    acceptance: Acceptance

    def margin(self, mode: Mode) -> float:
        """By how much a step may be slower, as a fraction."""
        return self.margins.eager if mode is Mode.EAGER else self.margins.graphs


@dataclass(frozen=True)
class Process:
    """One process of the engine; alignment and number are those of a repeating one, else native and 0."""

    kind: Kind
    mode: Mode
    alignment: Alignment = Alignment.NATIVE
    number: int = 0

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.kind}-{self.mode}" + (f"-{self.alignment}-{self.number}" if self.kind is Kind.REPEAT else "")

    @property
    def alone(self) -> bool:
        """Whether it also serves prompts one by one: the first canonical process of each mode does."""
        return (self.kind, self.alignment, self.number) == (Kind.REPEAT, Alignment.CANONICAL, 1)


def processes(protocol: Protocol) -> list[Process]:
    """Every process, in order: conditions interleaved and rotated, then what is timed, observed and captured.

    One process times both modes; it is filed under `graphs`, since it captures them.
    """
    conditions = [(mode, alignment) for mode in protocol.modes for alignment in protocol.alignments]
    found = []
    for number in range(1, protocol.processes + 1):
        start = (number - 1) % len(conditions)
        for mode, alignment in (*conditions[start:], *conditions[:start]):
            found.append(Process(Kind.REPEAT, mode, alignment, number))
    beside = (Process(Kind.OBSERVED, Mode.GRAPHS), Process(Kind.CAPTURED, Mode.EAGER))
    return [*found, Process(Kind.TIMED, Mode.GRAPHS), *beside]


def order(protocol: Protocol, process: Process) -> Iterator[tuple[int, int]]:
    """(batch, repeat) of a repeating process: all batch sizes each repeat, rotated by repeat and process."""
    sizes = protocol.batches
    for repeat in range(protocol.repeats):
        start = (repeat + process.number - 1) % len(sizes)
        yield from ((batch, repeat) for batch in (*sizes[start:], *sizes[:start]))


def prompts(protocol: Protocol) -> list[list[int]]:
    """The prompts as token ids, the same for every batch: a batch of n takes the first n."""
    drawn = protocol.prompts
    rng = np.random.Generator(np.random.PCG64(drawn.seed))
    ids: list[list[int]] = rng.integers(0, protocol.model.vocabulary, (drawn.count, drawn.tokens)).tolist()
    return ids


def load(path: Path) -> Protocol:
    """Read a protocol. Raises InputError if it cannot be read, has unknown keys, or names what does not exist."""
    protocol = read(path, Protocol, "serving")
    each_once([s.name for s in protocol.steps.series], (protocol.steps.baseline, protocol.steps.floor), path, "serving")
    most: Any = max(protocol.batches)
    if most > protocol.prompts.count or not {*protocol.alone} <= {*protocol.batches}:
        what = f"batches {protocol.batches}, alone {protocol.alone}, {protocol.prompts.count} prompts"
        raise refuse(what, path, "no batch has more than all prompts, and what is served alone is a batch", "serving")
    if most > max(protocol.captured_batches):
        what = f"batches of {most}, graphs of {max(protocol.captured_batches)}"
        raise refuse(what, path, "every batch has a graph that holds it", "serving")
    return protocol
