# SPDX-License-Identifier: Apache-2.0
"""Populations of routings to survey: drawn by a stated model, or windows of a file.

`uniform`: every expert alike. `zipf:S`: the expert of popularity rank r has weight r^-S, ranks drawn for each routing.
`topics:T:S`: each token is of one of T topics, each topic with Zipf ranks of its own: tokens of a topic go together.
The last two are models of skew and correlation, not observations. `file`: windows of successive tokens of a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.routings import draw, read
from routeblock.errors import InputError

FILE = "file"
_KEYS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Population:
    """A way to draw routings: `topics` 0 is uniform; `exponent` of the Zipf weights; `path` of a file's tokens."""

    name: str
    topics: int = 0
    exponent: float = 0.0
    path: Path | None = None

    @property
    def status(self) -> str:
        """`given` for a file, `modelled` for anything drawn."""
        return "given" if self.path else "modelled"


def population(name: str, path: Path | None = None) -> Population:
    """The population of a name such as `uniform`, `zipf:1.2`, `topics:8:1` or `file`; InputError for another."""
    kind, *numbers = name.split(":")
    try:
        if kind == FILE and path is not None and not numbers:
            return Population(name, path=path)
        if kind == "uniform" and not numbers:
            return Population(name)
        if kind == "zipf" and len(numbers) == 1 and 0 <= float(numbers[0]) <= 8:
            return Population(name, 1, float(numbers[0]))
        if kind == "topics" and len(numbers) == 2 and 1 <= int(numbers[0]) <= 4096 and 0 <= float(numbers[1]) <= 8:
            return Population(name, int(numbers[0]), float(numbers[1]))
    except ValueError:
        pass
    raise InputError(
        f"population {name!r}" + (" without --routing" if kind == FILE and path is None else ""),
        where="survey",
        limit="uniform, zipf:EXPONENT, topics:TOPICS:EXPONENT or file, exponents from 0 to 8",
        way_out="write it as zipf:1 or topics:8:1; give --routing with file",
    )


def routings_of(chosen: Population, tokens: int, top_k: int, experts: int, count: int, seed: int) -> NDArray[np.int32]:
    """`count` routings of a population, int32 [count, tokens, top_k]. Raises InputError for too short a file."""
    if chosen.path is not None:
        return _windows(chosen.path, tokens, top_k, experts, count, seed)
    if not chosen.topics:
        return draw(tokens, top_k, experts, seed, count)
    rng = np.random.Generator(np.random.PCG64([seed, 1]))
    weights = -chosen.exponent * np.log(np.arange(1, experts + 1, dtype=np.float32))
    found = np.empty((count, tokens, top_k), np.int32)
    step = max(1, _KEYS_AT_ONCE // (tokens * experts))
    for first in range(0, count, step):
        rows = min(step, count - first)
        ranks = rng.permuted(np.tile(weights, (rows, chosen.topics, 1)), axis=2)
        topic = rng.integers(0, chosen.topics, (rows, tokens))
        # The largest of log-weight + Gumbel noise are a draw without repeats, one after another by weight.
        keys = np.take_along_axis(ranks, topic[:, :, None], axis=1) if chosen.topics > 1 else ranks
        waits = rng.standard_exponential((rows, tokens, experts), dtype=np.float32)
        noise = -np.log(np.maximum(waits, np.finfo(np.float32).tiny))
        found[first : first + rows] = np.argpartition(-(keys + noise), top_k - 1, axis=2)[:, :, :top_k]
    return found


def _windows(path: Path, tokens: int, top_k: int, experts: int, count: int, seed: int) -> NDArray[np.int32]:
    line = np.concatenate([some.ids.reshape(-1, top_k) for some in read(path, experts, top_k)])
    if len(line) < tokens:
        raise InputError(
            f"{len(line)} tokens",
            where=str(path),
            limit=f"windows of {tokens} tokens are needed",
            way_out="survey smaller batches, or give a longer file",
        )
    rng = np.random.Generator(np.random.PCG64([seed, 2]))
    starts = rng.integers(0, len(line) - tokens + 1, count)
    return np.stack([line[s : s + tokens] for s in starts])
