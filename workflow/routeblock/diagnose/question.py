# SPDX-License-Identifier: Apache-2.0
"""Questions, and how options become one: which routings, which batches, which launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.answer import Fact
from routeblock.diagnose.engine import Engine
from routeblock.diagnose.layer import GEMMS
from routeblock.diagnose.routings import Routings, chunked, draw, padded, read
from routeblock.errors import InputError
from routeblock.moe.launches import Launch
from routeblock.moe.sources import Source

MOST_TOKENS = 1 << 20
BATCHES = "1-4096"


class Between(StrEnum):
    """What the verdict is about."""

    RUNS = "runs"
    BATCHES = "batches"


@dataclass(frozen=True)
class Question:
    """What is asked. `canonical` order and `full_k`: as if they were on. `batches` empty: that question is left out."""

    engine: Engine
    routings: Sequence[Routings]
    routing_facts: Sequence[Fact]
    between: Between = Between.RUNS
    canonical: bool = False
    full_k: bool = False
    batches: Sequence[int] = ()
    batch_ids: NDArray[np.int32] | None = None
    token: int = 0


@dataclass(frozen=True)
class Asked:
    """The options that say what is asked of an engine, as they were given."""

    routing: Path | None
    tokens: int | None
    routings: int
    seed: int
    graph_sizes: tuple[int, ...]
    chunk: int | None
    canonical: bool
    full_k: bool
    between: str
    batches: str | None
    token: int

    def document(self) -> dict[str, Any]:
        """The options as JSON; a routing's file is among the inputs."""
        return {**asdict(self), "routing": None if self.routing is None else self.routing.name,
                "graph_sizes": list(self.graph_sizes)}  # fmt: skip


def question(engine: Engine, asked: Asked) -> Question:
    """The question. Raises InputError where options contradict each other or a value is out of range."""
    layer = engine.layer
    if asked.between not in [*Between]:
        raise _refuse(f"--between {asked.between}", f"{' or '.join(Between)}", "choose one of them")
    if (asked.routing is None) == (asked.tokens is None):
        what = "neither --routing nor --tokens" if asked.routing is None else "--routing and --tokens"
        raise _refuse(what, "the batch comes from a file, or is drawn", "give one of the two")
    facts = []
    if asked.routing is not None:
        routings = read(asked.routing, layer.experts, layer.top_k)
        count = sum(r.ids.shape[0] for r in routings)
        facts.append(Fact("routing", f"{count} from {asked.routing.name}", Source.GIVEN, "a file"))
    else:
        assert asked.tokens is not None
        _within("--tokens", asked.tokens)
        if asked.tokens * asked.routings > MOST_TOKENS:
            raise _refuse(
                f"{asked.routings} routings of {asked.tokens} tokens", f"{MOST_TOKENS:,} tokens in all", "ask for fewer"
            )
        ids = draw(asked.tokens, layer.top_k, layer.experts, asked.seed, asked.routings)
        routings = [Routings(ids, asked.tokens)]
        basis = f"uniform, without repeats in a token, seed {asked.seed}"
        facts.append(Fact("routing", f"{asked.routings} drawn", Source.GIVEN, basis))
    own = routings[0].ids
    if asked.chunk is not None:
        routings = chunked(routings, asked.chunk)
    if asked.graph_sizes:
        before = [r.tokens for r in routings]
        routings = padded(routings, asked.graph_sizes, layer.experts, asked.seed)
        if [r.tokens for r in routings] != before:
            basis = "drawn: nobody here has seen where an engine routes its padding"
            facts.append(Fact("routes of the padding", "uniform", Source.ASSUMED, basis))
    batches: tuple[int, ...] = ()
    batch_ids = None
    wanted = asked.batches or (BATCHES if asked.between == Between.BATCHES else None)
    if wanted is not None:
        sizes = _sizes(wanted, asked.token)
        most = max(max(sizes), max(asked.graph_sizes, default=0))
        if asked.routing is None:
            batch_ids = draw(most, layer.top_k, layer.experts, asked.seed)[0]
        elif asked.batches is None:
            sizes = tuple(s for s in sizes if s <= own.shape[1])
            batch_ids = own[0]
        else:
            batch_ids = own[0]
        if asked.graph_sizes:
            sizes = tuple(min((g for g in asked.graph_sizes if g >= s), default=s) for s in sizes)
            if batch_ids.shape[0] < max(sizes):
                extra = draw(max(sizes) - batch_ids.shape[0], layer.top_k, layer.experts, asked.seed)[0]
                batch_ids = np.concatenate([batch_ids, extra])
        if not sizes or max(sizes) > batch_ids.shape[0]:
            raise _refuse(
                f"batches of up to {max(sizes, default=0)} tokens",
                f"the routing has {batch_ids.shape[0]}",
                "ask for smaller batches (--batches), or give a longer routing",
            )
        batches = sizes
    return Question(
        engine, routings, facts, Between(asked.between), asked.canonical, asked.full_k, batches, batch_ids, asked.token
    )


def launches_given(texts: Iterable[str]) -> dict[str, Launch]:
    """Launches as options give them: `thread_k,thread_n,grid` for both GEMMs, or `w13:...` and `w2:...`."""
    found: dict[str, Launch] = {}
    for text in texts:
        gemm, _, numbers = text.rpartition(":")
        parts = numbers.split(",")
        if gemm not in ("", *GEMMS) or len(parts) != 3 or not all(p.strip().isdigit() and int(p) > 0 for p in parts):
            raise InputError(
                f"launch {text!r}",
                where="--launch",
                limit="thread_k,thread_n,grid, with w13: or w2: before it for one GEMM",
                way_out="write it as 64,128,246",
            )
        launch = Launch(*(int(p) for p in parts))
        found |= dict.fromkeys(GEMMS, launch) if not gemm else {gemm: launch}
    if found and found.keys() != {*GEMMS}:
        raise InputError(
            f"a launch of {next(iter(found))} alone",
            where="--launch",
            limit="both GEMMs are launched",
            way_out="give the other one too",
        )
    return found


def _sizes(text: str, token: int) -> tuple[int, ...]:
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise _refuse(f"--batches {text!r}", "each is a size, or a range such as 1-4096", "write it so")
        low, high = int(first), int(last) if dash else int(first)
        _within("--batches", max(low, high))
        if low < 1 or high < low:
            raise _refuse(f"--batches {part}", "sizes from 1, ascending", "write the smaller size first")
        sizes += range(low, high + 1)
    held = sorted({s for s in sizes if s > token})
    if not held:
        raise _refuse(f"token {token}", f"batches {text} do not hold it", "ask for larger batches, or another token")
    return tuple(held)


def _within(option: str, value: int) -> None:
    if value > MOST_TOKENS:
        raise _refuse(f"{option} {value}", f"at most {MOST_TOKENS:,} tokens", "ask for fewer")


def _refuse(what: str, limit: str, way_out: str) -> InputError:
    return InputError(what, where="predict", limit=limit, way_out=way_out)
