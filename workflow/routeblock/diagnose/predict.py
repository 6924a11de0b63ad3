# SPDX-License-Identifier: Apache-2.0
"""`predict`: which bits of an MoE layer can change, between which runs, why, and what stops it. No weights are needed.

Bits can differ between two runs only where a route is computed in another class (classes.py). So *cannot differ* is a
proof from the partition, and *can differ* says that the arithmetic differs: whether a bit does is up to the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from routeblock.diagnose.answer import Answer, Fact, Verdict
from routeblock.diagnose.batches import Sweep
from routeblock.diagnose.classes import Classes, RunToRun, outcomes_text, run_to_run
from routeblock.diagnose.cures import options, other_grids, swept_batches
from routeblock.diagnose.engine import FIXED_ORDER_EXPERTS, FIXED_ORDER_ROUTES, Engine
from routeblock.diagnose.layer import GEMMS
from routeblock.diagnose.partitions import partition_document
from routeblock.diagnose.predict_text import lines
from routeblock.diagnose.question import Between, Question
from routeblock.diagnose.routings import Routings, counts
from routeblock.moe.kernels import Kernel

COMMAND = "predict"
LISTED = 20  # changes of class in an answer


@dataclass
class Found:
    """The run-to-run results of all routings: of each size and rank, in order."""

    parts: list[tuple[Routings, int, RunToRun]] = field(default_factory=list)
    can_differ: int = 0
    routings: int = 0
    routes: int = 0
    experts: int = 0
    straddling: int = 0

    def worst(self) -> RunToRun | None:
        """The result that holds the routing with the most routes at stake."""
        return max((r for _, _, r in self.parts), key=lambda r: int(r.any.max(initial=0)), default=None)


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
    runs = _all_runs(engine, question.routings, full_k=question.full_k)
    detail: dict[str, Any] = {
        "layer": engine.layer.document(),
        "partition": [partition_document(engine, r, question.full_k) for r in question.routings if r.ids.shape[0] == 1],
        "runs": _runs_document(question, runs),
        "other_grids": other_grids(question),
        "options": options(question),
    }
    swept = swept_batches(question, full_k=question.full_k)
    if question.batches:
        detail["batches"] = None if swept is None else _sweep_document(question, swept)
    text = lines(detail)
    if question.between is Between.BATCHES:
        return _about_batches(question, facts, detail, text, swept)
    return _about_runs(question, facts, detail, text, runs)


def _all_runs(engine: Engine, routings: Sequence[Routings], full_k: bool = False) -> Found:
    found = Found()
    for some in routings:
        launches = engine.launches_at(some.tokens)
        assert launches is not None
        classes = Classes(engine.layer, launches, full_k)
        whole = counts(some.ids, engine.layer.experts)
        differ = np.zeros(some.ids.shape[0], bool)
        for rank, local in engine.ranks():
            result = run_to_run(whole[:, local], engine.block_size_at(some.tokens), classes)
            found.parts.append((some, rank, result))
            differ |= result.can_differ
            found.routes += int(result.any.sum())
            found.experts += int(result.parted.sum())
            found.straddling += int(result.straddling.sum())
        found.can_differ += int(differ.sum())
        found.routings += differ.size
    return found


def _order_is_fixed(question: Question) -> bool:
    return question.canonical or all(question.engine.fixed_order(r.tokens) for r in question.routings)


def _about_runs(question: Question, facts: list[Fact], detail: dict[str, Any], text: list[str], runs: Found) -> Answer:
    one = runs.routings == 1
    who = "the routing" if one else f"{runs.can_differ:,} of {runs.routings:,} routings"
    if _order_is_fixed(question):
        reason = (
            "canonical order gives one plan"
            if question.canonical
            else f"native alignment has a fixed order below {FIXED_ORDER_ROUTES} routes and up to"
            f" {FIXED_ORDER_EXPERTS} experts"
        )
        return Answer(
            COMMAND, Verdict.CANNOT_DIFFER, "bits cannot differ between runs of one batch", reason,
            "nothing needs stopping between runs; other batches are another question (--between batches)", facts,
            detail, text,
        )  # fmt: skip
    if runs.can_differ == 0:
        reason = (
            "no expert has two blocks"
            if runs.straddling == 0
            else f"{runs.straddling:,} experts have several blocks, but all blocks of each are cut alike in both GEMMs"
        )
        return Answer(
            COMMAND, Verdict.CANNOT_DIFFER, "bits cannot differ between runs of one batch", reason,
            "nothing needs stopping between runs; other batches are another question (--between batches)", facts,
            detail, text,
        )  # fmt: skip
    worst = runs.worst()
    assert worst is not None
    at = int(worst.any.argmax())
    reason = (
        f"{runs.experts:,} expert{'s' if runs.experts != 1 else ''} with blocks that are cut differently: a legal"
        f" reorder could move {runs.routes:,} routes between them"
    )
    outcomes = outcomes_text(float(worst.log_outcomes[at]))
    sentence = (
        f"{runs.routes:,} routes can change bits between runs of one batch, in {outcomes} ways at most"
        if one
        else f"{who} can change bits between runs; the worst has {int(worst.any[at]):,} routes that can"
    )
    return Answer(COMMAND, Verdict.CAN_DIFFER, sentence, reason, _cure(detail["options"], "runs"), facts, detail, text)


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
    per_routing = np.concatenate([r.any for _, _, r in runs.parts]) if runs.parts else np.zeros(0, np.int64)
    worst = runs.worst()
    return {
        "routings": runs.routings,
        "can_differ": 0 if _order_is_fixed(question) else runs.can_differ,
        "order": "canonical" if question.canonical else "fixed" if _order_is_fixed(question) else "by arrival",
        "straddling_experts": runs.straddling,
        "parted_experts": runs.experts,
        "routes_that_can_change": {
            "w13": sum(int(r.w13.sum()) for _, _, r in runs.parts),
            "w2": runs.routes,
            "of_a_routing_at_most": int(per_routing.max(initial=0)),
        },
        "blocks_of_a_routing": [
            min((int(r.blocks.min(initial=0)) for _, _, r in runs.parts), default=0),
            max((int(r.blocks.max(initial=0)) for _, _, r in runs.parts), default=0),
        ],
        "outcomes_at_most": "1" if worst is None else outcomes_text(float(worst.log_outcomes.max(initial=0.0))),
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
