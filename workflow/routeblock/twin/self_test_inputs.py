# SPDX-License-Identifier: Apache-2.0
"""The inputs of the recorded outputs in fixtures/golden, drawn from seeds so that they need not be stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

EXPERTS, TOKENS, TOP_K, HIDDEN, INTERMEDIATE, GROUP, BLOCK = 128, 21, 8, 2048, 768, 128, 8
SEED = 3621
DTYPES: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Case:
    """One recorded GEMM: shapes, formats and launch (thread_k, thread_n, grid). group_size -1: one scale a column."""

    tokens: int
    top_k: int
    experts: int
    k: int
    n: int
    group_size: int
    block_size: int
    dtype: str
    has_zero_points: bool
    launch: tuple[int, int, int]
    fp32_reduce: bool = True
    scale_range: tuple[float, float] = (0.002, 0.008)
    input_scale: float = 0.5


CASES = {
    "b16_f16_u4": Case(40, 4, 8, 1024, 512, 128, 16, "f16", True, (64, 128, 396)),
    "b64_bf16_u4b8": Case(128, 4, 8, 1024, 512, 128, 64, "bf16", False, (64, 128, 264)),
    "b8_f16_u4_g32": Case(21, 8, 32, 1024, 768, 32, 8, "f16", True, (64, 128, 528)),
}
CORNERS = {
    "subnormal_f16_u4": Case(12, 4, 8, 512, 256, 128, 8, "f16", True, (64, 128, 132), True, (2e-8, 4e-6), 400.0),
    "column_f16_u4b8": Case(12, 4, 8, 512, 256, -1, 8, "f16", False, (64, 128, 132)),
    "column_bf16_u4b8": Case(40, 4, 8, 512, 256, -1, 16, "bf16", False, (64, 128, 132)),
    "halfreduce_f16_u4": Case(21, 8, 32, 2048, 256, 128, 8, "f16", True, (64, 128, 264), False),
    "manyslices_f16_u4": Case(6, 2, 4, 4096, 256, 128, 8, "f16", True, (64, 128, 264)),
    "wide128_f16_u4": Case(21, 8, 32, 1024, 512, 128, 8, "f16", True, (128, 128, 132)),
}
ORDERS = {"stable": "st", "rev": "rv"}
# One group over K, by the number that seeds the recording: recorded by digest only.
_ONE_GROUP = (30, 4, 20, 256, 1536, 256, 8)
ONE_GROUP = {
    0: Case(*_ONE_GROUP, "f16", False, (64, 128, 132)),
    1: Case(*_ONE_GROUP, "f16", False, (128, 64, 132)),
    2: Case(*_ONE_GROUP, "bf16", False, (64, 128, 132)),
    4: Case(*_ONE_GROUP, "f16", True, (64, 128, 132)),
    6: Case(*_ONE_GROUP, "bf16", True, (64, 128, 132)),
}


@dataclass(frozen=True)
class GemmInputs:
    """ids int32 [M, k], q uint8 [E, K, N], z uint8 and s float32 [E, groups, N], x float32 [M, K], before any cast."""

    ids: NDArray[np.int32]
    q: NDArray[np.uint8]
    z: NDArray[np.uint8]
    s: NDArray[np.float32]
    x: NDArray[np.float32]

    def arrays(self) -> list[NDArray[Any]]:
        """In the order in which inputs.sha256 hashes them."""
        return [self.ids, self.q, self.z, self.s, self.x]


def _choose(rng: np.random.Generator, case: Case) -> NDArray[np.int32]:
    return np.stack([rng.choice(case.experts, case.top_k, replace=False) for _ in range(case.tokens)]).astype(np.int32)


def case_inputs(name: str) -> GemmInputs:
    """Inputs of one of `CASES`."""
    case = CASES[name]
    rng = np.random.default_rng([11, len(name), case.k, case.block_size])
    ids = _choose(rng, case)
    groups = case.k // case.group_size
    q = rng.integers(0, 16, (case.experts, case.k, case.n), dtype=np.uint8)
    z = rng.integers(4, 12, (case.experts, groups, case.n), dtype=np.uint8)
    s = (rng.random((case.experts, groups, case.n)) * 0.006 + 0.002).astype(np.float32)
    return GemmInputs(ids, q, z, s, (rng.standard_normal((case.tokens, case.k)) * 0.5).astype(np.float32))


def corner_inputs(name: str) -> GemmInputs:
    """Inputs of one of `CORNERS`."""
    case = CORNERS[name]
    thread_k, thread_n, _ = case.launch
    seed = [23, case.k, case.n, case.block_size, thread_k, thread_n, case.tokens, int(case.fp32_reduce)]
    rng = np.random.default_rng(seed)
    groups = 1 if case.group_size == -1 else case.k // case.group_size
    low, high = case.scale_range
    ids = _choose(rng, case)
    q = rng.integers(0, 16, (case.experts, case.k, case.n), dtype=np.uint8)
    z = rng.integers(0, 16, (case.experts, groups, case.n), dtype=np.uint8)
    s = (low + (high - low) * rng.random((case.experts, groups, case.n))).astype(np.float32)
    return GemmInputs(ids, q, z, s, (rng.standard_normal((case.tokens, case.k)) * case.input_scale).astype(np.float32))


def one_group_inputs(number: int) -> tuple[GemmInputs, NDArray[np.int64]]:
    """Inputs of one of `ONE_GROUP`, and the arrival order of its recording in a random order."""
    case = ONE_GROUP[number]
    rng = np.random.default_rng([7777, number, 77])
    p = rng.dirichlet(np.full(case.experts, 0.7)) + 1e-4
    p /= p.sum()
    ids = np.stack([rng.choice(case.experts, case.top_k, replace=False, p=p) for _ in range(case.tokens)])
    q = rng.integers(0, 16, (case.experts, case.k, case.n), dtype=np.uint8)
    z = rng.integers(0, 16, (case.experts, 1, case.n), dtype=np.uint8)
    s = np.exp(rng.uniform(np.log(2e-4), np.log(4e-2), (case.experts, 1, case.n))).astype(np.float32)
    x = rng.standard_normal((case.tokens, case.k)) * np.exp(rng.normal(0, 1, (case.tokens, 1)))
    rng.random((case.tokens, case.top_k))  # top-k weights, which these recordings do not use
    return GemmInputs(ids.astype(np.int32), q, z, s, x.astype(np.float32)), rng.permutation(ids.size)


def combine_rows(top_k: int) -> NDArray[np.float32]:
    """float32 [64, top_k, 256] of many magnitudes, cast to the dtype before it is summed."""
    rng = np.random.default_rng([31, top_k])
    rows = rng.standard_normal((64, top_k, 256)) * 2.0 ** rng.integers(-9, 9, (64, top_k, 256))
    return np.asarray(rows, np.float32)


def layer_routing() -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """topk_ids int32 [21, 8] and normalised topk_weights float32 [21, 8] of the recorded layer."""
    rng = np.random.default_rng(SEED)
    p = np.exp(rng.normal(0, 1.9, EXPERTS))
    p /= p.sum()
    ids = np.stack([rng.choice(EXPERTS, TOP_K, replace=False, p=p) for _ in range(TOKENS)]).astype(np.int32)
    weights = rng.random((TOKENS, TOP_K)).astype(np.float32) + 0.05
    weights /= weights.sum(1, keepdims=True)
    return ids, weights.astype(np.float32)


def layer_hidden() -> NDArray[np.float16]:
    """float16 [21, 2048] of the recorded layer."""
    return (np.random.default_rng([SEED, 77]).standard_normal((TOKENS, HIDDEN)) * 0.5).astype(np.float16)


def layer_expert(gemm: str, expert: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float16]]:
    """q uint8 [K, N], zero points uint8 [K/128, N], scales float16 [K/128, N] of one expert of the recorded layer."""
    which, k, n = {"w13": (1, HIDDEN, 2 * INTERMEDIATE), "w2": (2, INTERMEDIATE, HIDDEN)}[gemm]
    rng = np.random.default_rng([which, expert, k, n])
    q = rng.integers(0, 16, (k, n), dtype=np.uint8)
    z = rng.integers(5, 11, (k // GROUP, n), dtype=np.uint8)
    return q, z, (rng.random((k // GROUP, n)) * 0.006 + 0.002).astype(np.float16)


def layer_weights(gemm: str, experts: list[int]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float16]]:
    """The weights of several experts, stacked."""
    q, z, s = zip(*(layer_expert(gemm, e) for e in experts), strict=True)
    return np.stack(q), np.stack(z), np.stack(s)


def arrival(order: str, routes: int) -> NDArray[np.int64]:
    """`stable` or `rev`: the order in which routes take slots inside their expert."""
    return np.arange(routes)[:: 1 if order == "stable" else -1]
