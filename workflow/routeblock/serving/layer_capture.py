# SPDX-License-Identifier: Apache-2.0
"""One call of vLLM's Marlin MoE path, as the engine makes it: its inputs, its plan and what each kernel wrote.

Facts about `fused_marlin_moe` (names, positions, that it is called with names, that a buffer serves twice) were read
in vLLM 0.24.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

FUSED, GEMM = "fused_marlin_moe", "moe_wna16_marlin_gemm"
# Names in the record, float16 as bits.
INPUTS = ("hidden", "topk_ids", "topk_weights")
PLAN = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded", "block_size")
SURFACES = ("w13", "activation", "w2", "final")

Capture = dict[str, NDArray[Any]]


def _host(x: Any) -> NDArray[Any]:
    import torch

    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.view(torch.int16)
    found: NDArray[Any] = x.detach().clone().cpu().numpy()
    return found


@contextmanager
def captured(module: Any, tokens: int) -> Iterator[Capture]:
    """The first call with so many tokens is kept: the first MoE layer's of the first such step."""
    found: Capture = {}
    fused, operators = getattr(module, FUSED), module.ops
    gemm = getattr(operators, GEMM)
    active = False

    def watched_gemm(*arguments: Any, **named: Any) -> Any:
        out = gemm(*arguments, **named)
        if active:
            surface = "w2" if "w13" in found else "w13"
            found[surface] = _host(out)
            places = (("sorted_token_ids", 11), ("expert_ids", 12), ("num_tokens_post_padded", 13))
            found.update({name: _host(arguments[place]) for name, place in places})
            found["block_size"] = np.array(named["moe_block_size"], np.int32)
        return out

    def watched(*arguments: Any, **named: Any) -> Any:
        nonlocal active
        hidden = named["hidden_states"]
        if found or hidden.shape[0] != tokens:
            return fused(*arguments, **named)
        found["hidden"] = _host(hidden)
        found["topk_ids"] = _host(named["topk_ids"]).astype(np.int32)
        found["topk_weights"] = _host(named["topk_weights"])
        activate = named["activation_func"]

        def watched_activation(kind: Any, out: Any, *rest: Any, **more: Any) -> None:
            activate(kind, out, *rest, **more)
            found["activation"] = _host(out)

        active = True
        try:
            result = fused(*arguments, **(named | {"activation_func": watched_activation}))
        finally:
            active = False
        found["final"] = _host(named["output"])
        count = int(found["num_tokens_post_padded"].reshape(-1)[0])
        found["sorted_token_ids"] = found["sorted_token_ids"][:count]
        found["expert_ids"] = found["expert_ids"][: count // int(found["block_size"])]
        return result

    setattr(module, FUSED, watched)
    setattr(operators, GEMM, watched_gemm)
    try:
        yield found
    finally:
        setattr(module, FUSED, fused)
        setattr(operators, GEMM, gemm)
