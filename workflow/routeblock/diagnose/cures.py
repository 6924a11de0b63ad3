# SPDX-License-Identifier: Apache-2.0
"""What would stop it, cheapest first, and whether it stops changes between runs, and between batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.batches import Sweep, sweep
from routeblock.diagnose.classes import Classes, cut_of, run_to_run, tile_classes
from routeblock.diagnose.engine import MOST_BLOCKS_PER_SM, Engine
from routeblock.diagnose.layer import GEMMS
from routeblock.diagnose.question import Question
from routeblock.diagnose.routings import Routings, counts
from routeblock.moe.launches import Launch

SEARCHED_ROUTINGS = 256  # beyond so many routings no launch is sought that keeps all of them whole
SHALLOW, DEEP = (64, 128), (128, 64)  # (thread_k, thread_n) that every block size has


def swept_batches(question: Question, *, full_k: bool, thread_k: int | None = None) -> Sweep | None:
    """The classes of the question's token over its batches; None if no batches are asked for, or a launch is unknown.

    thread_k: every launch takes it, on one block an SM.
    """
    if not question.batches or question.batch_ids is None:
        return None
    engine = question.engine
    pinned = None
    if thread_k is not None:
        sizes = SHALLOW if thread_k == SHALLOW[0] else DEEP

        def pinned(tokens: int) -> dict[str, Launch]:
            return dict.fromkeys(GEMMS, Launch(*sizes, engine.device.sms))

    return sweep(engine, question.batch_ids, question.token, question.batches, full_k=full_k, launches=pinned)


def options(question: Question, swept: Sweep | None) -> list[dict[str, Any]]:
    """What would stop it, cheapest first: each with whether it stops changes between runs, and between batches."""
    engine = question.engine
    found: list[dict[str, Any]] = [
        {
            "option": "canonical alignment (ROUTEBLOCK_CANONICAL_ALIGNMENT=1)",
            "runs": True,
            "batches": _one_class(swept_batches(question, full_k=False) if question.full_k else swept),
            "reason": "one plan for one routing",
            "cost": "0.15 to 0.69 of the native alignment's time on an H200 by graph (recorded): docs/alignment.md",
        }
    ]
    total = sum(r.ids.shape[0] for r in question.routings)
    if total <= SEARCHED_ROUTINGS:
        launch = _whole_launch(engine, question.routings)
        found.append(
            {
                "option": "explicit thread sizes and blocks an SM, passed to the operator",
                "runs": launch is not None,
                "batches": False,
                "launch": launch and {gemm: list(x) for gemm, x in launch.items()},
                "reason": f"at {_named(launch)} every expert's blocks are cut alike, for these routings and no others"
                if launch
                else "no such launch keeps every expert's blocks alike for these routings",
                "cost": "not measured; vLLM passes -1 (automatic), so its call must be changed",
            }
        )
    found += [
        {
            "option": "full K (use_full_k, in no release up to 0.33)",
            "runs": True,
            "batches": _one_class(swept_batches(question, full_k=True)),
            "reason": "no tile is cut, so all blocks are alike; the warps along K still follow the launch",
            "cost": "not measured here",
        },
        {
            "option": "full K with thread_k held at 64",
            "runs": True,
            "batches": _one_class(swept_batches(question, full_k=True, thread_k=64)),
            "reason": "no tile is cut and the warps along K are always two",
            "cost": "not measured here",
        },
        {
            "option": "VLLM_BATCH_INVARIANT=1 with vLLM 0.28 or later (Humming)",
            "runs": None,
            "batches": None,
            "reason": "vLLM's files say so; that kernel has no twin, so nothing here proves it",
            "cost": "another kernel",
        },
    ]
    return found


def other_grids(question: Question) -> list[dict[str, Any]]:
    """Routes that can change between runs at 1 to 4 blocks an SM of the automatic thread sizes, as JSON.

    Empty for routings of several sizes, and for very many.
    """
    engine, routings = question.engine, question.routings
    if len(routings) != 1 or routings[0].ids.shape[0] > SEARCHED_ROUTINGS:
        return []
    tokens, found = routings[0].tokens, []
    automatic = engine.launches_at(tokens)
    assert automatic is not None
    whole = counts(routings[0].ids, engine.layer.experts)
    for per_sm in range(1, MOST_BLOCKS_PER_SM + 1):
        grid = engine.device.sms * per_sm
        classes = Classes(engine.layer, {g: launch._replace(grid=grid) for g, launch in automatic.items()})
        results = [run_to_run(whole[:, local], engine.block_size_at(tokens), classes) for _, local in engine.ranks()]
        found.append({"grid": grid, "routes_that_can_change": sum(int(r.any.sum()) for r in results)})
    return found


def _named(launches: dict[str, Launch]) -> str:
    return ", ".join(f"{gemm.upper()} {tuple(launch[:2])} on {launch.grid}" for gemm, launch in launches.items())


def _one_class(swept: Sweep | None) -> bool | None:
    return None if swept is None else swept.classes == 1


def _whole_launch(engine: Engine, routings: Sequence[Routings]) -> dict[str, Launch] | None:
    """A launch of each GEMM at which no expert's blocks part in any of the routings, the nearest to the automatic."""
    if len({r.tokens for r in routings}) != 1:
        return None
    tokens, found = routings[0].tokens, {}
    whole = np.concatenate([counts(r.ids, engine.layer.experts) for r in routings])
    block = engine.block_size_at(tokens)
    for gemm in GEMMS:
        for launch in engine.explicit_launches(gemm, tokens):
            if _keeps_whole(engine, gemm, launch, whole, block):
                found[gemm] = launch
                break
        else:
            return None
    return found


def _keeps_whole(engine: Engine, gemm: str, launch: Launch, whole: NDArray[np.int64], block: int) -> bool:
    for row in whole:
        for _, local in engine.ranks():
            per_expert = -(-row[local] // block)
            tiles = tile_classes(cut_of(engine.layer, gemm, int(per_expert.sum()), launch))
            inside = np.ones(len(tiles), bool)
            inside[(np.cumsum(per_expert) - per_expert)[per_expert > 0]] = False  # an expert's first block
            if (tiles[1:] != tiles[:-1]).any(axis=1)[inside[1:]].any():
                return False
    return True
