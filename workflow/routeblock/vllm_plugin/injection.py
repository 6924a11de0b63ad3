# SPDX-License-Identifier: Apache-2.0
"""A plan injected at vLLM's alignment: for an examination, off unless ROUTEBLOCK_INJECTED_ARRIVALS is set.

Atomics let routes of an expert arrive in any order. Here the order is given, so that the engine computes with a plan
that is known: `canonical`, `reversed`, or `random:SEED`. Every call reads ids on the host and waits for the GPU: this
costs time, and cannot be captured into a graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.errors import InputError
from routeblock.moe.routing import AlignedPlan
from routeblock.moe.routing import align as aligned

VARIABLE = "ROUTEBLOCK_INJECTED_ARRIVALS"


def arrivals(word: str, routes: int) -> NDArray[np.int64] | None:
    """The order in which `routes` routes arrive, by its word; None: ascending. Raises InputError for another word."""
    kind, _, seed = word.partition(":")
    if word == "canonical":
        return None
    if word == "reversed":
        return np.arange(routes, dtype=np.int64)[::-1]
    if kind == "random" and seed.isascii() and seed.isdigit() and int(seed) < 2**63:
        return np.random.Generator(np.random.PCG64(int(seed))).permutation(routes)
    raise InputError(
        f"{word!r} is no order of arrival",
        where=VARIABLE,
        limit="canonical, reversed, or random:SEED with a number",
        way_out="choose one of them, or unset the variable",
    )


class InjectedAlignment:
    """What stands for vLLM's `moe_align_block_size`; `own` is vLLM's, for calls that have an expert map.

    Raises InputError where a graph is captured.
    """

    def __init__(self, own: Any, word: str) -> None:
        arrivals(word, 1)
        self.own, self.word = own, word

    def plan(self, ids: NDArray[np.int32], block_size: int, num_experts: int) -> AlignedPlan:
        """The plan of a routing: int32 [tokens, top-k]."""
        return aligned(ids, num_experts, block_size, arrivals(self.word, ids.size))

    def __call__(self, topk_ids: Any, block_size: int, num_experts: int, *rest: Any, **named: Any) -> Any:
        import torch

        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise InputError(
                "a plan cannot be injected into a graph",
                where=VARIABLE,
                limit="the engine runs eager",
                way_out="start vLLM with --enforce-eager, or unset the variable",
            )
        if (rest and rest[0] is not None) or named.get("expert_map") is not None:
            return self.own(topk_ids, block_size, num_experts, *rest, **named)
        plan = self.plan(topk_ids.cpu().numpy().astype(np.int32), block_size, num_experts)

        def there(values: NDArray[np.int32]) -> Any:
            return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(topk_ids.device)

        total = np.array([plan.num_tokens_post_padded], np.int32)
        return there(plan.sorted_token_ids), there(plan.expert_ids), there(total)
