# SPDX-License-Identifier: Apache-2.0
"""Does a job's output keep its bits when other jobs join the batch? The same tokens first in ever larger batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from routeblock.evidence.digest import sha256_array
from routeblock.q6k_dispatch import fixture
from routeblock.q6k_dispatch.fixture import Jobs
from routeblock.q6k_dispatch.protocol import Protocol, Role, Shape, Side

SIDES = (Side.AUTO, Side.DP4A, Side.TENSOR, Side.VLLM_VEC, Side.VLLM_BATCHED, Side.LLAMA_CPP)


def jobs(protocol: Protocol, tokens: int) -> Jobs:
    """The first `tokens` tokens of the largest batch."""
    plan = protocol.batch_bits
    most = max(plan.tokens)
    whole = fixture.make(
        Shape(Role.TUNED, most * protocol.top_k, plan.pool, plan.rows, plan.cols, protocol.top_k), protocol.seed
    )
    slots = tokens * protocol.top_k
    shape = Shape(Role.TUNED, slots, plan.pool, plan.rows, plan.cols, protocol.top_k)
    return Jobs(shape, whole.ids[:slots], np.ascontiguousarray(whole.x[:tokens]))


def run(gpu: Any, protocol: Protocol) -> list[dict[str, Any]]:
    """Per side and batch the digest of the first token's outputs, on a GPU (see `gpu_session.Gpu`)."""
    from routeblock.q6k_dispatch.gpu_session import Session

    there = gpu.sides()
    found = []
    for tokens in protocol.batch_bits.tokens:
        session = Session(gpu, jobs(protocol, tokens))
        for side in (s for s in SIDES if s in there):
            first = np.ascontiguousarray(session.output(side)[: protocol.top_k])
            found.append({"side": str(side), "tokens": tokens, "sha256": sha256_array(first)})
        session.close()
    return found
