# SPDX-License-Identifier: Apache-2.0
"""The scorer's own account of which rows can differ between two arms, from the stored plans and the launches alone.

It walks the CUDA blocks one by one (`block_walk`) and shares no code with the prediction, which it checks: a prediction
by which everything can differ would be right whatever the runs say.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from routeblock.route_block.scorer.block_walk import slices_by_tile
from routeblock.route_block.scorer.inputs import GEMMS, PREDICTION, SURFACES, Arm, Study
from routeblock.route_block.scorer.reasons import Finding, Reason

Launch = tuple[int, int, int]
Classes = dict[tuple[Arm, str], NDArray[np.intp]]


def check_rows(study: Study) -> Iterator[Finding]:
    """Pairs whose predicted routes or rows are not those that the CUDA blocks give; call it on a consistent prediction.

    Both directions count: a row too few is a wrong prediction, a row too many one that cannot fail.
    """
    classes = _classes(study)
    for pair in study.prediction.pairs:
        changed = {
            g: np.flatnonzero(classes[pair.first, g] != classes[pair.second, g]).astype(int).tolist() for g in GEMMS
        }
        later = sorted({*changed["w13"], *changed["w2"]})
        rows = {
            "w13": changed["w13"],
            "activation": changed["w13"],
            "w2": later,
            "final": sorted({route // study.spec.top_k for route in later}),
        }
        for what, stated, found in (
            *((f"routes changed at {g}", pair.changed_signature.get(g), changed[g]) for g in GEMMS),
            *((f"rows of {s}", pair.rows[s], rows[s]) for s in SURFACES),
        ):
            if stated != found:
                detail = f"{pair.name}: {what}: {_count(stated)} predicted, the CUDA blocks give {len(found)}"
                odd = sorted(set(stated or ()) ^ set(found))[:8]
                yield Finding(PREDICTION, Reason.PREDICTION_ROWS, f"{detail}; they differ in {odd}")
                break


def _count(rows: list[int] | None) -> str:
    return "none" if rows is None else str(len(rows))


def _classes(study: Study) -> Classes:
    """For each arm and GEMM the class of each route, int [routes]: one number for one way of being computed."""
    numbers: dict[Hashable, int] = {}
    of_blocks: dict[tuple[str, int, Launch], NDArray[np.intp]] = {}
    found: Classes = {}
    for arm, plan in study.arms.items():
        owners = np.array(plan.owners(), np.intp)
        for gemm in GEMMS:
            at = gemm, int(plan.expert_ids.size), study.launch(arm[0], gemm)
            if at not in of_blocks:
                of_blocks[at] = _block_classes(study, *at, numbers)
            found[arm, gemm] = of_blocks[at][owners]
    return found


def shape_of(study: Study, gemm: str) -> tuple[int, int]:
    """(N, K) of a GEMM of the fixture."""
    hidden, intermediate = study.spec.hidden, study.spec.intermediate
    return (2 * intermediate, hidden) if gemm == "w13" else (hidden, intermediate)


def slices_of(study: Study, gemm: str, blocks: int, launch: Launch) -> list[frozenset[tuple[int, int]]]:
    """For each tile of a GEMM the K-tiles [first, one past the last] of its slices, by a walk over the CUDA blocks."""
    thread_k, thread_n, grid = launch
    n, k = shape_of(study, gemm)
    return slices_by_tile(blocks * (n // thread_n), k // thread_k, grid, study.spec.group_size, thread_k)


def _block_classes(
    study: Study, gemm: str, blocks: int, launch: Launch, numbers: dict[Hashable, int]
) -> NDArray[np.intp]:
    thread_k, thread_n, _ = launch
    pieces = slices_of(study, gemm, blocks, launch)
    n_tiles = len(pieces) // blocks if blocks else 0
    # Thread sizes belong to it: they set which warps share a sum.
    kinds = [(thread_k, thread_n, tuple(pieces[b * n_tiles : (b + 1) * n_tiles])) for b in range(blocks)]
    return np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds], np.intp)
