# SPDX-License-Identifier: Apache-2.0
"""Do the four surfaces of a run belong together? What needs no GEMM is computed again, here, in numpy.

Written apart from `twin.layer`, which the twin's runs use. The forms are those of recorded H200 outputs of vLLM's
silu_and_mul and of torch.sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.route_block.scorer.inputs import bits
from routeblock.route_block.scorer.reasons import Reason

ACCUMULATORS = 4


def faults_of(surfaces: Mapping[str, NDArray[Any]], top_k: int) -> Iterator[tuple[Reason, str]]:
    """What is wrong between the surfaces of one run (float16 or bfloat16, shapes as audited); compared in bits."""
    odd = {name: _first_row(~np.isfinite(x.astype(np.float32))) for name, x in surfaces.items()}
    infinite = [f"row {row} of {name}" for name, row in odd.items() if row is not None]
    if infinite:
        yield Reason.NOT_FINITE, f"{infinite[0]} holds an infinity or NaN"
        return
    row = _first_row(bits(surfaces["activation"]) != bits(_silu_and_mul(surfaces["w13"])))
    if row is not None:
        yield Reason.ACTIVATION_NOT_OF_W13, f"row {row} is not silu(gate) * up of its row of w13"
    row = _first_row(bits(surfaces["final"]) != bits(_sum_of_routes(surfaces["w2"], top_k)))
    if row is not None:
        yield Reason.FINAL_NOT_OF_W2, f"row {row} is not the sum of the {top_k} rows of w2 of its token"


def _first_row(wrong: NDArray[Any]) -> int | None:
    rows = np.flatnonzero(wrong.any(axis=1))
    return int(rows[0]) if rows.size else None


@cache
def _silu_of_all(dtype: np.dtype[Any]) -> NDArray[Any]:
    """silu of each of the 65536 values of a 16-bit dtype, by its bits."""
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        e = np.exp(-x.astype(np.float64)).astype(np.float32)
        return np.asarray((x / (np.float32(1) + e)).astype(dtype))


def _silu_and_mul(w13: NDArray[Any]) -> NDArray[Any]:
    half = w13.shape[1] // 2
    gate = _silu_of_all(w13.dtype)[bits(w13)[:, :half]]
    # The float32 product of two 16-bit values is exact up to float32's range, so the one rounding is the last.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray((gate.astype(np.float32) * w13[:, half:].astype(np.float32)).astype(w13.dtype))


def _sum_of_routes(w2: NDArray[Any], top_k: int) -> NDArray[Any]:
    """Route i of a token goes to float32 accumulator i mod 4; these are added in order and rounded once."""
    routes = w2.reshape(-1, top_k, w2.shape[1])
    sums = [np.zeros((routes.shape[0], w2.shape[1]), np.float32) for _ in range(ACCUMULATORS)]
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(top_k):
            sums[i % ACCUMULATORS] += routes[:, i].astype(np.float32)
        a0, a1, a2, a3 = sums
        return np.asarray((((a0 + a1) + a2) + a3).astype(w2.dtype))
