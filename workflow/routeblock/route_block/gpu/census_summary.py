# SPDX-License-Identifier: Apache-2.0
"""A census over its processes: distinct plans and final outputs, native per history and in canonical order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.evidence.record import restored_list

PROCESS_FORMAT, FORMAT = "routeblock.census.v1", "routeblock.census_summary.v1"
ORDERS = ("native", "canonical")
SAME = ("fixture", "fixture_name", "point", "launches", "calls", "stored")  # of every process of a census


def summarize(lane: str, folder: Path, out: Path) -> None:
    """Write census.json from the documents of its processes below `folder`, sealed.

    For each history and order: calls, distinct plans, distinct final outputs, the share of the commonest plan, in how
    many processes more than one plan came, and how often the canonical plan came. Raises InputError if the documents
    are not of one census by one binary, or if the counts of one are not those of its calls.
    """
    processes = sorted(p for p in folder.glob("*/process*.json") if not p.name.endswith(SUFFIX))
    documents = [_read(path) for path in processes]
    about = {json.dumps([*(d[key] for key in SAME), d["identity"]["binary"]]) for d in documents}
    if len(about) != 1:
        raise InputError(
            "no census" if not about else "censuses of different launches, fixtures or binaries",
            where=str(folder),
            limit="one census at a time",
            way_out="name the processes of one census",
        )
    rows = [
        _row(order, history, [d for d in documents if d["history"] == history])
        for order in ORDERS
        for history in sorted({d["history"] for d in documents})
    ]
    rows += [_row(order, "both", documents) for order in ORDERS]
    document = {
        "format": FORMAT,
        "lane": lane,
        **{key: documents[0][key] for key in SAME},
        "gpu": documents[0]["identity"]["environment"]["gpu"],
        "rows": rows,
    }
    write_json(out, document)
    seal(
        out.with_suffix(SUFFIX),
        rule="census_summary",
        outputs=[out],
        inputs=[*processes, *restored_list(folder)],
        parameters={"lane": lane},
        modules=[__name__],
    )


def _row(order: str, history: str, documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    plans: Counter[str] = Counter()
    finals: Counter[str] = Counter()
    for document in documents:
        for found in document[order]:
            plans[found["fingerprint"]] += found["count"]
            finals[found["final"]] += found["count"]
    canonical = {found["fingerprint"] for document in documents for found in document["canonical"]}
    commonest = min(plans, key=lambda plan: (-plans[plan], plan))
    return {
        "order": order,
        "history": history,
        "processes": len(documents),
        "calls": sum(plans.values()),
        "distinct_plans": len(plans),
        "distinct_finals": len(finals),
        "commonest_plan": commonest,
        "commonest_calls": plans[commonest],
        "canonical_calls": sum(n for plan, n in plans.items() if plan in canonical),
        "processes_with_several_plans": sum(len({f["fingerprint"] for f in d[order]}) > 1 for d in documents),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != PROCESS_FORMAT:
            raise ValueError(f"format {document['format']}")
        for order in ORDERS:
            counts = [found["count"] for found in document[order]]
            if any(type(n) is not int or n < 1 for n in counts):
                raise ValueError(f"{order} counts {min(counts, key=str)} calls of one outcome")
            if sum(counts) != document["calls"]:
                raise ValueError(f"{order} counts {sum(counts)} calls, the process made {document['calls']}")
            if len({(found["fingerprint"], found["final"]) for found in document[order]}) != len(counts):
                raise ValueError(f"{order} counts one outcome twice")
        return dict(document)
    except UNREADABLE as e:
        raise InputError(
            f"not a readable census: {e}",
            where=str(path),
            limit=f"canonical JSON of {PROCESS_FORMAT}",
            way_out="count again (routeblock study-a census)",
        ) from e
