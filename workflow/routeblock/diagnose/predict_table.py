# SPDX-License-Identifier: Apache-2.0
"""Answers of `predict` as a table: one row an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routeblock.diagnose.answer import load_answer
from routeblock.tables import Column, Row, Table, write_sealed

COLUMNS = (
    Column("question"), Column("verdict"), Column("kernel"), Column("block_size", "count"), Column("launch_w13"),
    Column("launch_w2"), Column("launch_status"), Column("routings", "count"), Column("can_differ", "count"),
    Column("straddling_experts", "count"), Column("parted_experts", "count"), Column("routes_w13", "count"),
    Column("routes_w2", "count"), Column("outcomes_at_most"), Column("batch_classes", "count"), Column("reason"),
    Column("cure"),
)  # fmt: skip


def row(question: str, document: dict[str, Any]) -> dict[str, Any]:
    """An answer as a row; `question` names it."""
    facts = {f["name"]: f for f in document["facts"]}
    runs = document["detail"].get("runs", {})
    routes = runs.get("routes_that_can_change", {})
    launches = [facts.get(f"launch of {gemm}", {}) for gemm in ("W13", "W2")]
    return {
        "question": question,
        "verdict": document["verdict"],
        "kernel": facts["kernel"]["value"],
        "block_size": facts.get("block size", {}).get("value"),
        "launch_w13": str(launches[0].get("value", "")),
        "launch_w2": str(launches[1].get("value", "")),
        "launch_status": ", ".join(sorted({x["source"] for x in launches if x})),
        **{name: runs.get(name) for name in ("routings", "can_differ", "straddling_experts", "parted_experts")},
        "routes_w13": routes.get("w13"),
        "routes_w2": routes.get("w2"),
        "outcomes_at_most": runs.get("outcomes_at_most"),
        "batch_classes": (document["detail"].get("batches") or {}).get("classes"),
        "reason": document["reason"],
        "cure": document["cure"],
    }


def rows(answers: Sequence[Path]) -> list[Row]:
    """What can change, by GPU?

    One answer of `predict` a row, named after its file. Raises InputError for a file that is no answer.
    """
    return [row(path.stem, load_answer(path)) for path in answers]


TABLE = Table(
    "predictions",
    rows,
    COLUMNS,
    "What can change, by GPU",
    "`routes_w13`, `routes_w2`: routes that a legal reorder could move between blocks that are cut differently, in W13"
    " and in either GEMM. `batch_classes`: the ways in which a token is computed over batch sizes.",
)


def write(answers: Sequence[Path], out: Path) -> None:
    """Write the table `predictions`, sealed."""
    write_sealed(out, TABLE, rows(answers), inputs=answers)
