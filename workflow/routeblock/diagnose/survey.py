# SPDX-License-Identifier: Apache-2.0
"""`survey`: how often can bits change, and how often do they? One point: a GPU, a population of routings, a batch size.

Predicted: the share of routings that can change between runs, and of routings whose first token is computed otherwise
than alone, by the partition. Computed: the share that do, by the twin, on a sample of those that can; its size follows
a budget of multiply-accumulates and is stated. A share that does is the product of the two; so are its bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from routeblock.diagnose.batches import first_token_differs
from routeblock.diagnose.classes import Classes, run_to_run
from routeblock.diagnose.engine import Engine
from routeblock.diagnose.populations import Population, routings_of
from routeblock.diagnose.routings import counts
from routeblock.errors import InputError
from routeblock.moe.kernels import Kernel
from routeblock.moe.launches import Launch
from routeblock.moe.routing import align

FORMAT = "routeblock.survey_point.v1"
TOKENS_AT_MOST = 1 << 19  # of all routings of a point
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Plan:
    """How much a point does: routings at most, sampled routings at most, multiply-accumulates at most, seed."""

    routings: int
    sample: int
    macs: float
    seed: int


def survey_point(engine: Engine, chosen: Population, tokens: int, plan: Plan) -> dict[str, Any]:
    """The document of one point. Raises InputError where no Marlin kernel runs or its launch is not known."""
    kernel = engine.kernel
    launches = engine.launches_at(tokens)
    alone = engine.launches_at(1)
    if kernel.kernel is not Kernel.MARLIN or launches is None or alone is None:
        what = kernel.reason if kernel.kernel is not Kernel.MARLIN else engine.launch_at("w13", tokens).basis
        raise InputError(
            f"{engine.device.name}, vLLM {engine.version}: {what}",
            where="survey",
            limit="a survey needs Marlin and its launches",
            way_out="survey another release or GPU, or force --moe-backend marlin",
        )
    layer = engine.layer
    routings = max(1, min(plan.routings, TOKENS_AT_MOST // tokens))
    ids = routings_of(chosen, tokens, layer.top_k, layer.experts, routings, plan.seed)
    whole = counts(ids, layer.experts)
    classes = Classes(layer, launches)
    block = engine.block_size_at(tokens)
    runs = run_to_run(whole, block, classes)
    can = np.zeros(routings, bool) if engine.fixed_order(tokens) else runs.can_differ
    batch = first_token_differs(engine, ids, whole)
    found: dict[str, Any] = {
        "format": FORMAT,
        "gpu": engine.device.name,
        "vllm": engine.version,
        "architecture": engine.device.architecture,
        "population": chosen.name,
        "population_status": chosen.status,
        "layer": layer.document(),
        "tokens": tokens,
        "block_size": block,
        "launches": {gemm: list(launch) for gemm, launch in launches.items()},
        "launch_status": {gemm: str(engine.launch_at(gemm, tokens).source) for gemm in launches},
        "seed": plan.seed,
        "runs": {**_share(can), "routes_that_can": int(runs.any[can].sum()), "routes": routings * tokens * layer.top_k},
        "batches": _share(batch),
    }
    if engine.device.architecture:
        found["runs"] |= _computed_runs(engine, ids, whole, can, launches, plan)
        found["batches"] |= _computed_batches(engine, ids, batch, launches, alone, plan)
    return found


def _share(which: NDArray[np.bool_]) -> dict[str, Any]:
    low, high = interval(int(which.sum()), which.size)
    return {"routings": which.size, "can": int(which.sum()), "share": float(which.mean()), "low": low, "high": high}


def interval(hits: int, trials: int) -> tuple[float, float]:
    """Wilson's interval of a share at 95%; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    found = binomtest(hits, trials).proportion_ci(CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


def _computed_runs(
    engine: Engine, ids: NDArray[np.int32], whole: NDArray[np.int64], can: NDArray[np.bool_],
    launches: dict[str, Launch], plan: Plan,
) -> dict[str, Any]:  # fmt: skip
    """Two random legal orders of each sampled routing, by the twin."""
    from routeblock.diagnose.twin_sample import Sample

    layer, tokens, block = engine.layer, ids.shape[1], engine.block_size_at(ids.shape[1])
    per_route = 3 * layer.hidden * layer.intermediate
    chosen: list[tuple[int, list[int]]] = []
    spent, rows = 0.0, []
    classes = Classes(layer, launches)
    for row in np.flatnonzero(can)[: plan.sample]:
        parted = parted_experts(whole[row], block, classes)
        cost = 2.0 * per_route * int(whole[row, parted].sum())
        if chosen and spent + cost > plan.macs:
            break
        spent += cost
        chosen.append((int(row), parted))
    for row, parted in chosen:
        sample = Sample(layer, engine.device.architecture, tokens, parted, plan.seed + row)
        rng = np.random.Generator(np.random.PCG64([plan.seed, 3, row]))
        both = [
            sample.rows(align(ids[row], layer.experts, block, rng.permutation(ids[row].size)), launches)
            for _ in range(2)
        ]
        rows.append(_difference(both[0], both[1]))
    return _computed(rows, can)


def _computed_batches(
    engine: Engine, ids: NDArray[np.int32], differs: NDArray[np.bool_], launches: dict[str, Launch],
    alone: dict[str, Launch], plan: Plan,
) -> dict[str, Any]:  # fmt: skip
    """The first token of each sampled routing in its batch and alone, in canonical order, by the twin."""
    from routeblock.diagnose.twin_sample import Sample

    layer, tokens = engine.layer, ids.shape[1]
    block, block_alone = engine.block_size_at(tokens), engine.block_size_at(1)
    per_route = 3 * layer.hidden * layer.intermediate
    most = max(1, int(plan.macs / (per_route * layer.top_k * (block + 1))))
    rows = []
    for row in np.flatnonzero(differs)[: min(plan.sample, most)]:
        own = sorted({int(e) for e in ids[row, 0]})
        sample = Sample(layer, engine.device.architecture, tokens, own, plan.seed + int(row))
        sample.x[1:] = 0  # only the first token's rows are compared
        # In canonical order the first token's routes lie in the first blocks of their experts.
        batch = sample.rows(align(ids[row], layer.experts, block), launches, first_blocks=True)
        single = sample.rows(align(ids[row, :1], layer.experts, block_alone), alone, tokens=1)
        first = {gemm: bits[: layer.top_k] for gemm, bits in batch.items()}
        rows.append(_difference(first, single))
    return _computed(rows, differs)


def parted_experts(row: NDArray[np.int64], block: int, classes: Classes) -> list[int]:
    """The experts of one routing whose blocks are of more than one class."""
    per_expert = -(-row // block)
    _, both = classes(int(per_expert.sum()))
    starts = np.cumsum(per_expert) - per_expert
    return [
        int(e)
        for e in np.flatnonzero(per_expert > 1)
        if len(np.unique(both[starts[e] : starts[e] + per_expert[e]])) > 1
    ]


def _difference(first: dict[str, NDArray[np.uint16]], second: dict[str, NDArray[np.uint16]]) -> dict[str, Any]:
    from routeblock.diagnose.twin_sample import ulps

    return {
        gemm: {
            "elements": int((first[gemm] != second[gemm]).sum()),
            "rows": int((first[gemm] != second[gemm]).any(axis=1).sum()),
            "ulps": ulps(first[gemm], second[gemm]),
        }
        for gemm in first
    }


def _computed(rows: Sequence[dict[str, Any]], can: NDArray[np.bool_]) -> dict[str, Any]:
    changed = sum(any(part["elements"] for part in row.values()) for row in rows)
    low, high = interval(changed, len(rows))
    share, (share_low, share_high) = float(can.mean()), interval(int(can.sum()), can.size)
    found: dict[str, Any] = {"sample": len(rows), "changed": changed}
    if rows:
        found |= {
            "share_that_do": share * changed / len(rows),
            "do_low": share_low * low,
            "do_high": share_high * high,
        }
        for gemm in ("w13", "w2"):
            found[gemm] = {
                "elements_of_a_routing": sum(r[gemm]["elements"] for r in rows) / len(rows),
                "rows_of_a_routing": sum(r[gemm]["rows"] for r in rows) / len(rows),
                "ulps_at_most": max(r[gemm]["ulps"] for r in rows),
            }
    elif not can.any():
        found |= {"share_that_do": 0.0, "do_low": 0.0, "do_high": share_high}
    return found


def write(document: dict[str, Any], out: Path, inputs: Sequence[Path]) -> None:
    """Write a point, sealed."""
    from routeblock.evidence.files import write_json
    from routeblock.evidence.manifest import SUFFIX, seal

    write_json(out, document)
    names = ("gpu", "vllm", "population", "tokens", "seed")
    seal(
        out.with_suffix(SUFFIX), rule="survey_point", outputs=[out], inputs=inputs,
        parameters={name: document[name] for name in names}, modules=[__name__, "routeblock.diagnose.twin_sample"],
    )  # fmt: skip
