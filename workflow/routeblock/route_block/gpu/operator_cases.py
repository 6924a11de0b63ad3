# SPDX-License-Identifier: Apache-2.0
"""Single GEMMs that a GPU records and the twin computes again: drawn from numbers, so that nothing need be stored.

`launches`: every thread size, block size and number of blocks per SM, to see which the operator takes. `one_group`:
random shapes and launches whose K is one quantisation group. `missing_expert`: a block whose expert id is -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from routeblock.moe.devices import DEVICES
from routeblock.moe.launches import Launch
from routeblock.moe.partition import BLOCK_SIZES, thread_sizes
from routeblock.moe.routing import AlignedPlan, align
from routeblock.moe.shared_memory import available, shared_memory

SEED = 20261201
DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# One module of compiled kernels each: a process a kind, because the first launch compiles it.
KINDS = tuple((zero_points, dtype) for zero_points in (True, False) for dtype in DTYPES)
ORDERS = ("stable", "random")
ONE_GROUP_CASES = 48
BLOCKS_PER_SM = (1, 2, 3, 4)
LAUNCH_GROUPS = (-1, 32, 128)
GPU = DEVICES["H200"]  # whose shared memory decides which launches `one_group` draws


@dataclass(frozen=True)
class Case:
    """One GEMM; `group_size` -1: one scale per column. `blocks_per_sm` times the GPU's SMs is the grid."""

    name: str
    tokens: int
    top_k: int
    experts: int
    k: int
    n: int
    group_size: int
    block_size: int
    dtype: str
    zero_points: bool
    thread_k: int
    thread_n: int
    blocks_per_sm: int
    multiply: bool  # by the top-k weights
    seed: tuple[int, ...]

    def launch(self, sms: int) -> Launch:
        """Thread sizes and grid on a GPU of `sms` SMs."""
        return Launch(self.thread_k, self.thread_n, sms * self.blocks_per_sm)

    @property
    def kind(self) -> tuple[bool, str]:
        """Weight type and dtype."""
        return self.zero_points, self.dtype


@dataclass(frozen=True)
class Inputs:
    """ids int32 [M, k], weights float32 [M, k], q uint8 [E, K, N], zeros uint8 [E, groups, N] or None, scales and x of
    the case's dtype, and the two orders of arrival.
    """

    ids: NDArray[np.int32]
    topk_weights: NDArray[np.float32]
    q: NDArray[np.uint8]
    zeros: NDArray[np.uint8] | None
    scales: NDArray[Any]
    x: NDArray[Any]
    arrival: dict[str, NDArray[np.int64]]

    def plan(self, case: Case, order: str) -> AlignedPlan:
        """The plan of one of `ORDERS`."""
        return align(self.ids, case.experts, case.block_size, self.arrival[order])


def draw(case: Case) -> Inputs:
    """The inputs of a case."""
    rng, dtype = np.random.default_rng([SEED, *case.seed]), DTYPES[case.dtype]
    groups = 1 if case.group_size == -1 else case.k // case.group_size
    p = rng.dirichlet(np.full(case.experts, 0.7)) + 1e-4
    p /= p.sum()
    ids = np.stack([rng.choice(case.experts, case.top_k, replace=False, p=p) for _ in range(case.tokens)])
    q = rng.integers(0, 16, (case.experts, case.k, case.n), dtype=np.uint8)
    zeros = rng.integers(0, 16, (case.experts, groups, case.n), dtype=np.uint8)
    scales = np.exp(rng.uniform(np.log(2e-4), np.log(4e-2), (case.experts, groups, case.n)))
    x = rng.standard_normal((case.tokens, case.k)) * np.exp(rng.normal(0, 1, (case.tokens, 1)))
    weights = rng.random((case.tokens, case.top_k)).astype(np.float32) + np.float32(0.05)
    orders = (np.arange(ids.size), rng.permutation(ids.size))
    return Inputs(
        ids.astype(np.int32),
        weights,
        q,
        zeros if case.zero_points else None,
        scales.astype(np.float32).astype(dtype),
        x.astype(np.float32).astype(dtype),
        dict(zip(ORDERS, orders, strict=True)),
    )


def one_group() -> Iterator[Case]:
    """Random cases with one group over K, as many of each kind, on launches that an H200 takes."""
    for number in range(ONE_GROUP_CASES):
        rng = np.random.default_rng([SEED, 1, number])
        zero_points, dtype = KINDS[number % len(KINDS)]
        block_size = int(rng.choice(BLOCK_SIZES))
        k = int(rng.choice((128, 256)))
        sizes = thread_sizes(block_size)
        fitting = [
            (*size, blocks)
            for size in sizes
            for blocks in BLOCKS_PER_SM
            if shared_memory(*size, block_size, -1, zero_points) <= available(GPU, blocks)
        ]
        thread_k, thread_n, blocks = fitting[int(rng.integers(len(fitting)))]
        yield Case(
            name=f"one_group {number}",
            tokens=int(rng.integers(20, 90)),
            top_k=4,
            experts=int(rng.integers(6, 20)),
            k=k,
            n=int(rng.choice((512, 768, 1536))),
            group_size=k,
            block_size=block_size,
            dtype=dtype,
            zero_points=zero_points,
            thread_k=thread_k,
            thread_n=thread_n,
            blocks_per_sm=blocks,
            multiply=bool(rng.integers(2)),
            seed=(1, number),
        )


def launches() -> Iterator[Case]:
    """Every launch that there is a kernel for, at both weight types and three groupings, in float16."""
    number = 0
    for block_size in BLOCK_SIZES:
        for thread_k, thread_n in thread_sizes(block_size):
            for blocks in BLOCKS_PER_SM:
                for group_size in LAUNCH_GROUPS:
                    for zero_points in (True, False):
                        yield Case(
                            name=f"launch {number}",
                            tokens=24,
                            top_k=2,
                            experts=6,
                            k=512,
                            n=512,
                            group_size=group_size,
                            block_size=block_size,
                            dtype="float16",
                            zero_points=zero_points,
                            thread_k=thread_k,
                            thread_n=thread_n,
                            blocks_per_sm=blocks,
                            multiply=False,
                            seed=(2, number % 6),
                        )
                        number += 1


MISSING = Case("missing expert", 24, 2, 6, 512, 512, 128, 8, "float16", True, 64, 128, 1, False, (3, 0))
MISSING_BLOCK = 1


def without_expert(plan: AlignedPlan) -> AlignedPlan:
    """The plan with expert id -1 in block `MISSING_BLOCK`."""
    experts = plan.expert_ids.copy()
    experts[MISSING_BLOCK] = -1
    return AlignedPlan(plan.sorted_token_ids, experts, plan.num_tokens_post_padded, plan.block_size, plan.num_routes)


EXPERT_MAP_LOCAL = (1, 2, 4)  # experts that a rank of `MISSING` holds: of the rest the alignment must make no block


def expert_map() -> NDArray[np.int32]:
    """int32 [experts]: global to local id, or -1."""
    found = np.full(MISSING.experts, -1, np.int32)
    found[list(EXPERT_MAP_LOCAL)] = np.arange(len(EXPERT_MAP_LOCAL), dtype=np.int32)
    return found
