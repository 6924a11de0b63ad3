# SPDX-License-Identifier: Apache-2.0
"""A survey's rows as an answer: verdict, reason and cure, then a line a point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from routeblock.diagnose.answer import Answer, Fact, Verdict
from routeblock.moe.sources import Source, weakest


def answer(rows: Sequence[dict[str, Any]]) -> Answer:
    """The answer of a survey."""
    worst = max(rows, key=lambda r: (r["can_share"], r["tokens"]))
    facts = [
        Fact("launches", ", ".join(sorted({r["gpu"] for r in rows})), weakest(*_sources(rows)), "the weakest of all"),
        Fact("populations", ", ".join(sorted({f"{r['population']} ({r['population_status']})" for r in rows})),
             Source.GIVEN, "as asked"),
    ]  # fmt: skip
    can = any(r["can"] for r in rows)
    computed = f"; of {worst['sample']} computed, {worst['changed']} changed" if worst.get("sample") else ""
    return Answer(
        "survey",
        Verdict.CAN_DIFFER if can else Verdict.CANNOT_DIFFER,
        f"up to {worst['can_share']:.1%} of routings can change bits between runs"
        if can
        else "no surveyed routing can change bits between runs",
        f"most at {worst['tokens']} tokens, {worst['population']}, {worst['gpu']}{computed}"
        if can
        else "no expert's blocks are cut differently",
        "canonical alignment (ROUTEBLOCK_CANONICAL_ALIGNMENT=1) stops it between runs" if can else "nothing to stop",
        facts,
        {"points": list(rows)},
        [_line(r) for r in rows],
    )


def _sources(rows: Sequence[dict[str, Any]]) -> list[Source]:
    return [Source(name) for r in rows for name in r["launch_status"].split(", ")]


def _line(row: dict[str, Any]) -> str:
    computed = f"{row['changed']}/{row['sample']} computed" if row.get("sample") else "none computed"
    return (
        f"{row['population']:>12} {row['gpu']:>12} {row['tokens']:>5} tokens, blocks of {row['block_size']:>2}: can"
        f" {row['can_share']:6.1%} [{row['can_low']:.1%}, {row['can_high']:.1%}] of {row['routings']:,}; {computed};"
        f" first token otherwise than alone {row['batch_can_share']:6.1%}"
    )
