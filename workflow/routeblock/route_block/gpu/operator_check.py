# SPDX-License-Identifier: Apache-2.0
"""The operator's record, proved again: the twin computes every output, the rule every refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.archive import CONTENTS
from routeblock.evidence.digest import sha256_array
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import SUFFIX, seal
from routeblock.moe.partition import operator_group
from routeblock.moe.routing import align
from routeblock.moe.shared_memory import available, shared_memory
from routeblock.route_block.gpu import operator_cases as cases
from routeblock.route_block.gpu.operator_record import BEHIND, FOLDER, FORMAT, OWN, RUN
from routeblock.twin.gemm import moe_gemm

SUMMARY_FORMAT = "routeblock.operator_summary.v1"
ARCHITECTURE = "hopper"  # of the GPU that recorded


def _twin(case: cases.Case, drawn: cases.Inputs, order: str) -> NDArray[Any]:
    return moe_gemm(
        drawn.x,
        drawn.q,
        drawn.zeros,
        drawn.scales,
        drawn.plan(case, order),
        top_k=case.top_k,
        architecture=ARCHITECTURE,
        thread_k=case.thread_k,
        thread_n=case.thread_n,
        grid=case.launch(cases.GPU.sms).grid,
        group_size=case.group_size,
        topk_weights=drawn.topk_weights if case.multiply else None,
    )


def _outputs(wanted: list[cases.Case], told: dict[str, Any]) -> tuple[int, int]:
    """Outputs compared with the twin, and how many differ; a refused case has none."""
    compared = differing = 0
    for case in wanted:
        found = told[case.name]
        if "refused" not in found:
            drawn = cases.draw(case)
            for order in cases.ORDERS:
                compared += 1
                differing += sha256_array(_twin(case, drawn, order)) != found[order]
    return compared, differing


def _row(check: str, number: int, differing: int, says: str) -> dict[str, Any]:
    return {"check": check, "cases": number, "differing": differing, "says": says}


def fits(case: cases.Case) -> bool:
    """Whether the rule lets a case's launch pass on the recording GPU."""
    group = operator_group(case.group_size, case.k)
    need = shared_memory(case.thread_k, case.thread_n, case.block_size, group, case.zero_points)
    return need <= available(cases.GPU, case.blocks_per_sm)


def _launches(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    wanted = list(cases.launches())
    refused = [case for case in wanted if "refused" in told[case.name]]
    wrong = sum(fits(case) == ("refused" in told[case.name]) for case in wanted)
    shapes = sorted({(c.block_size, c.thread_k, c.thread_n, c.blocks_per_sm) for c in refused})
    listed = "; ".join(f"({k}, {n}) with blocks of {b} at {sm} per SM" for b, k, n, sm in shapes)
    yield _row("launches taken or refused as the rule says", len(wanted), wrong, f"refused: {listed}")
    compared, differing = _outputs(wanted, told)
    yield _row("outputs of the launches taken, by the twin", compared, differing, "three groupings, two weight types")


def _one_group(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    wanted = list(cases.one_group())
    compared, differing = _outputs(wanted, told)
    where = "random shapes and launches, two orders each; the scale is a column's, applied once after rounding"
    yield _row("outputs with one group over K, by the twin", compared, differing, where)


def _missing(parts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    case = cases.MISSING
    drawn = cases.draw(case)
    whole = _twin(case, drawn, "stable")
    behind, own = (parts[f"missing-{placement}"] for placement in (BEHIND, OWN))
    same = sha256_array(np.ascontiguousarray(whole[behind["routes"]])) == behind.get("sha256")
    rest = sha256_array(np.ascontiguousarray(np.delete(whole, behind["routes"], axis=0))) == behind.get("others_sha256")
    yield _row(
        "expert id -1, other weights before the expert's",
        len(behind["routes"]),
        0 if same and rest else len(behind["routes"]),
        "the rows are those of the expert before: the kernel reads there",
    )
    if own["outcome"] == "returned":
        rest = sha256_array(np.ascontiguousarray(np.delete(whole, own["routes"], axis=0))) == own["others_sha256"]
        says = (
            f"{own['written']} of {len(own['routes'])} rows written from what lay before the allocation,"
            f" {own['not_finite']} elements not finite; other rows {'as computed' if rest else 'differ'}"
        )
    else:
        says = f"{own['outcome']}: {own['error']}"
    yield _row("expert id -1, weights at the beginning of an allocation", len(own["routes"]), 0, says)


def _expert_map(told: dict[str, Any]) -> dict[str, Any]:
    case = cases.MISSING
    here = align(cases.draw(case).ids, case.experts, case.block_size, expert_map=cases.expert_map())
    same = here.expert_ids.tolist() == told["expert_ids"] and all(e >= 0 for e in told["expert_ids"])
    return _row(
        "alignment with an expert map: no block of an expert that is not here",
        len(told["expert_ids"]),
        0 if same else len(told["expert_ids"]),
        "as the fused path calls it (ignore_invalid_experts)",
    )


def check(source: Path) -> tuple[dict[str, Any], list[str]]:
    """The summary of a record, and what does not hold, one line each. Raises InputError if a file cannot be used."""
    wrong = [f"{path}: not the bytes that were recorded" for path in FOLDER.changed(source)]
    try:
        document = json.loads((source / RUN).read_bytes())
        if document["format"] != FORMAT or document["seed"] != cases.SEED:
            raise ValueError(f"format {document['format']}, seed {document['seed']}")
        parts = document["parts"]
        told = {entry["name"]: entry for name, part in parts.items() if isinstance(part, list) for entry in part}
        rows = [*_launches(told), *_one_group(told), *_missing(parts), _expert_map(parts["expert_map"])]
    except UNREADABLE as e:
        if isinstance(e, InputError):
            raise
        raise InputError(
            f"not a record of the operator: {type(e).__name__} {e}",
            where=str(source),
            limit=f"{RUN} and {CONTENTS} of `routeblock study-a record-operator`",
            way_out="restore the folder, or record again",
        ) from e
    wrong += [
        f"{source}: {row['check']}: {row['differing']} of {row['cases']} differ" for row in rows if row["differing"]
    ]
    return {"format": SUMMARY_FORMAT, "gpu": document["identity"]["gpu"], "rows": rows}, wrong


def write(out: Path, source: Path, *, lane: str) -> list[str]:
    """Prove the record of `source` and write its summary to the file `out`, sealed; returns what does not hold."""
    summary, wrong = check(source)
    if wrong:
        return wrong
    write_json(out, {"lane": lane, **summary})
    seal(
        out.with_suffix(SUFFIX),
        rule="recorded_operator",
        outputs=[out],
        inputs=[source / CONTENTS, source / RUN],
        parameters={"lane": lane},
        modules=[__name__],
    )
    return []
