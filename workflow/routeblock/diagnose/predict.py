# SPDX-License-Identifier: Apache-2.0
"""`predict`: which bits of an MoE layer can change, between which runs, why, and what stops it. No weights are needed.

Bits can differ between two runs only where a route is computed in another class (classes.py). So *cannot differ* is a
proof from the partition, and *can differ* says that the arithmetic differs: whether a bit does is up to the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.diagnose.answer import Answer, Fact, Verdict
from routeblock.diagnose.batches import Sweep
from routeblock.diagnose.classes import Classes, RunToRun, outcomes_text, run_to_run
from routeblock.diagnose.cures import options, other_grids, swept_batches
from routeblock.diagnose.engine import FIXED_ORDER_EXPERTS, FIXED_ORDER_ROUTES
from routeblock.diagnose.layer import GEMMS
from routeblock.diagnose.partitions import partition_document
from routeblock.diagnose.predict_text import lines, options_lines
from routeblock.diagnose.question import Between, Question
from routeblock.diagnose.routings import counts
from routeblock.moe.kernels import Kernel

COMMAND = "predict"
LISTED = 20  # changes of class in an answer
Ints = NDArray[np.int64]


@dataclass
class Found:
    """The run-to-run results of all routings. Arrays are [routings], summed over ranks; what a fixed order does not let
    differ is 0 in `at_stake` and `log_outcomes`.
    """

    at_stake: Ints
    w13: Ints
    straddling: Ints
    parted: Ints
    blocks: Ints
    log_outcomes: NDArray[np.float64]

    @property
    def can_differ(self) -> int:
        """Routings that can differ."""
        return int((self.at_stake > 0).sum())


def predict(question: Question) -> Answer:
    """The answer. Raises InputError for a batch that does not hold the token."""
    engine = question.engine
    kernel = engine.kernel
    tokens = max(r.tokens for r in question.routings)
    facts = [*question.routing_facts, *engine.facts(tokens)]
    if kernel.kernel is not Kernel.MARLIN:
        return _other_kernel(question, facts)
    if any(engine.launches_at(r.tokens) is None for r in question.routings):
        missing = next(f.basis for f in facts if f.value == "unknown")
        return Answer(
            COMMAND,
            Verdict.CANNOT_SAY,
            "the automatic launch is not known",
            missing,
            "give --launch, or read the registers there with tests/gpu/read_registers.py",
            facts,
            {"layer": engine.layer.document()},
        )
    runs = _all_runs(question)
    swept = swept_batches(question, full_k=question.full_k)
    detail: dict[str, Any] = {
        "layer": engine.layer.document(),
        "partition": [partition_document(engine, r, question.full_k) for r in question.routings if r.ids.shape[0] == 1],
        "runs": _runs_document(question, runs),
        "other_grids": other_grids(question),
        "options": options(question, swept),
    }
    if question.batches:
        detail["batches"] = None if swept is None else _sweep_document(question, swept)
    text = lines(detail)
    if runs.can_differ > 0 or (swept is not None and swept.classes > 1):
        text += options_lines(detail["options"])
    if question.between is Between.BATCHES:
        return _about_batches(question, facts, detail, text, swept)
    return _about_runs(question, facts, detail, text, runs)


def _all_runs(question: Question) -> Found:
    engine, parts = question.engine, []
    for some in question.routings:
        launches = engine.launches_at(some.tokens)
        assert launches is not None
        classes = Classes(engine.layer, launches, question.full_k)
        whole = counts(some.ids, engine.layer.experts)
        block = engine.block_size_at(some.tokens)
        ranks = [run_to_run(whole[:, local], block, classes) for _, local in engine.ranks()]
        free = not (question.canonical or engine.fixed_order(some.tokens))

        def total(name: str, count: bool = True, ranks: list[RunToRun] = ranks) -> Any:
            return np.sum([getattr(rank, name) for rank in ranks], axis=0) * count

        parts.append(
            (
                *(total("any", free), total("w13", free), total("straddling"), total("parted"), total("blocks")),
                total("log_outcomes", free),
            )
        )
    return Found(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _order_is_fixed(question: Question) -> bool:
    return question.canonical or all(question.engine.fixed_order(r.tokens) for r in question.routings)


def _about_runs(question: Question, facts: list[Fact], detail: dict[str, Any], text: list[str], runs: Found) -> Answer:
    if runs.can_differ == 0:
        return Answer(
            COMMAND, Verdict.CANNOT_DIFFER, "bits cannot differ between runs of one batch", _why_not(question, runs),
            "nothing needs stopping between runs; other batches are another question (--between batches)", facts,
            detail, text,
        )  # fmt: skip
    routings, worst = runs.at_stake.size, int(runs.at_stake.argmax())
    routes, experts = int(runs.at_stake.sum()), int(runs.parted[runs.at_stake > 0].sum())
    sentence = (
        f"{routes:,} routes can change bits between runs of one batch, in"
        f" {outcomes_text(float(runs.log_outcomes[0]))} ways at most"
        if routings == 1
        else f"{runs.can_differ:,} of {routings:,} routings can change bits between runs; the worst has"
        f" {int(runs.at_stake[worst]):,} routes that can"
    )
    reason = (
        f"{experts:,} expert{'s' if experts != 1 else ''} with blocks that are cut differently: a legal reorder could"
        f" move {routes:,} routes between them"
    )
    return Answer(COMMAND, Verdict.CAN_DIFFER, sentence, reason, _cure(detail["options"], "runs"), facts, detail, text)


def _why_not(question: Question, runs: Found) -> str:
    if question.canonical:
        return "canonical order gives one plan"
    if _order_is_fixed(question):
        return (
            f"native alignment has a fixed order below {FIXED_ORDER_ROUTES} routes and up to {FIXED_ORDER_EXPERTS}"
            " experts"
        )
    if not runs.straddling.any():
        return "no expert has two blocks"
    return f"{int(runs.straddling.sum()):,} experts have several blocks, but all blocks of each are cut alike"


def _about_batches(
    question: Question, facts: list[Fact], detail: dict[str, Any], text: list[str], swept: Sweep | None
) -> Answer:
    if swept is None:
        return Answer(
            COMMAND, Verdict.CANNOT_SAY, "the launch is not known for every batch size",
            "some launch cannot be derived", "give --launch", facts, detail, text,
        )  # fmt: skip
    span = f"batches of {swept.sizes[0]} to {swept.sizes[-1]} tokens"
    if swept.classes == 1:
        return Answer(
            COMMAND, Verdict.CANNOT_DIFFER, f"token {question.token} keeps its class in {span}",
            "thread_k and the cuts of K are the same in all of them", "nothing needs stopping", facts, detail, text,
        )  # fmt: skip
    first = swept.changes[1]
    return Answer(
        COMMAND, Verdict.CAN_DIFFER,
        f"token {question.token} is computed in {swept.classes:,} different ways in {span}",
        f"the launch and the cuts of K follow the batch: the first change comes at {first.tokens} tokens",
        _cure(detail["options"], "batches"), facts, detail, text,
    )  # fmt: skip


def _other_kernel(question: Question, facts: list[Fact]) -> Answer:
    engine, kernel = question.engine, question.engine.kernel
    refused = kernel.kernel is Kernel.REFUSED
    marlin = "" if engine.batch_invariant else "; --moe-backend marlin takes the kernel that has a twin"
    return Answer(
        COMMAND,
        Verdict.CANNOT_SAY,
        "vLLM refuses to load the layer" if refused else f"{kernel.kernel} has no twin",
        f"{kernel.reason}: {engine.known_of_kernel()}",
        "leave VLLM_BATCH_INVARIANT out, or name a later release"
        if refused
        else f"ask for a release and GPU that run Marlin{marlin}",
        facts,
        {"layer": engine.layer.document(), "kernel": str(kernel.kernel), "known": engine.known_of_kernel()},
    )


def _runs_document(question: Question, runs: Found) -> dict[str, Any]:
    order = "canonical" if question.canonical else "fixed" if _order_is_fixed(question) else "by arrival"
    return {
        "routings": runs.at_stake.size,
        "can_differ": runs.can_differ,
        "order": order,
        "straddling_experts": int(runs.straddling.sum()),
        "parted_experts": int(runs.parted.sum()),
        "routes_that_can_change": {
            "w13": int(runs.w13.sum()),
            "w2": int(runs.at_stake.sum()),
            "of_a_routing_at_most": int(runs.at_stake.max(initial=0)),
        },
        "blocks_of_a_routing": [int(runs.blocks.min(initial=0)), int(runs.blocks.max(initial=0))],
        "outcomes_at_most": outcomes_text(float(runs.log_outcomes.max(initial=0.0))),
    }


def _sweep_document(question: Question, swept: Sweep) -> dict[str, Any]:
    return {
        "token": question.token,
        "sizes": [swept.sizes[0], swept.sizes[-1], len(swept.sizes)],
        "classes": swept.classes,
        "changes": len(swept.changes) - 1,
        "first_changes": [
            {
                "tokens": c.tokens,
                "class": c.number,
                "block_size": c.block_size,
                "launches": {g: list(x) for g, x in zip(GEMMS, c.launches, strict=True)},
            }
            for c in swept.changes[:LISTED]
        ],
    }


def _cure(options: Sequence[dict[str, Any]], between: str) -> str:
    stops = [o["option"] for o in options if o[between]]
    return stops[0] if stops else "no option here is known to stop it"
