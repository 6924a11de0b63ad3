# SPDX-License-Identifier: Apache-2.0
"""Rows of the tables that only a GPU can fill: agreement, census, probe_control, versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

Document = dict[str, Any]
Row = dict[str, Any]

SURFACES = ("w13", "activation", "w2", "final")


def agreement(documents: Sequence[Document], _: Document) -> list[Row]:
    """For each study, cell, history and surface: elements compared over all replicates, and how many differ."""
    rows = []
    for document in documents:
        arms: dict[tuple[str, str], list[Document]] = defaultdict(list)
        for run in document["runs"]:
            arms[run["cell"], run["history"]].append(run)
        for (cell, history), runs in arms.items():
            for surface in SURFACES:
                counted = [run["surfaces"][surface] for run in runs]
                rows.append(
                    {
                        **{key: document[key] for key in ("lane", "point", "plan_source", "architecture")},
                        "cell": cell,
                        "history": history,
                        "surface": surface,
                        "processes": len(runs),
                        "plans": len({run["fingerprint"] for run in runs}),
                        "elements": sum(c["elements"] for c in counted),
                        "differing": sum(c["differing"] for c in counted),
                        "processes_that_differ": sum(c["differing"] > 0 for c in counted),
                    }
                )
    return rows


def census(documents: Sequence[Document], _: Document) -> list[Row]:
    """For each point, order and history: calls, distinct plans and final outputs, how common the commonest is."""
    return [
        {
            **{key: document[key] for key in ("lane", "gpu", "point")},
            **{key: value for key, value in row.items() if key != "commonest_calls"},
            "commonest_share": row["commonest_calls"] / row["calls"],
            "canonical_share": row["canonical_calls"] / row["calls"],
        }
        for document in documents
        for row in document["rows"]
    ]


def probe_control(documents: Sequence[Document], _: Document) -> list[Row]:
    """For each launch that needs no probe: whether it gave the same bits with the probe and without."""
    return [
        {
            "lane": document["lane"],
            "gpu": document["gpu"],
            "sms": document["sms"],
            "plan": row["plan"],
            **dict(zip(("thread_k", "thread_n", "grid"), row["launch"], strict=True)),
            "equal_surfaces": len(row["equal"]),
            "same": row["same"],
        }
        for document in documents
        for row in document["launches"]
    ]


def versions(documents: Sequence[Document], _: Document) -> list[Row]:
    """For each version of the extension: surfaces with the recorded bits at each launch, and its automatic launch."""
    rows = []
    for document in documents:
        for version in document["versions"]:
            row = {key: version[key] for key in ("version", "extension", "extension_sha256", "gpu", "torch")}
            row |= {f"same_{launch}": len(same) for launch, same in version["same"].items()}
            row["compared"] = max(version["compared"].values())
            row |= {
                f"automatic_{gemm}": " ".join("({}, {}) on {}".format(*launch) for launch in launches)
                for gemm, launches in version["automatic"].items()
            }
            rows.append(row)
    return rows


def history(documents: Sequence[Document], _: Document) -> list[Row]:
    """For each kind of outcome: how far H0 and H1 are apart, and how far labels exchanged inside pairs put them."""
    return [{**_place(document), **row} for document in documents for row in document["history"]]


def repetition(documents: Sequence[Document], _: Document) -> list[Row]:
    """For each way to call the native alignment: whether it repeats itself."""
    return [{**_place(document), **row} for document in documents for row in document["repetition"]]


def operator(documents: Sequence[Document], _: Document) -> list[Row]:
    """What the real operator does with launches, one group over K, and a block without an expert."""
    return [{**_place(document), **row} for document in documents for row in document["rows"]]


def _place(document: Document) -> Row:
    return {key: document[key] for key in ("lane", "gpu")}
