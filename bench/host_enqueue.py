# SPDX-License-Identifier: Apache-2.0
"""Host time of enqueueing one alignment from Python: canonical order over vLLM's own, on a GPU.

    python bench/host_enqueue.py EXTENSION [--repetitions N] [OUT.json]

EXTENSION: vLLM's MoE extension (_moe_C_stable_libtorch.abi3.so). Two scopes, each at 14 numbers of tokens, 128 experts,
top-8, the block size that the fused path takes: `operator`, into given buffers; `wrapper`, with the allocations that
vLLM's Python function and the plug-in make. A repetition times 50 calls of each side, in an order that rotates, behind
a kernel that keeps the GPU busy, so that nothing waits for it. Shown: medians, the ratio of canonical to native with a
95% percentile bootstrap interval over repetitions, and native against itself, which says how far to trust it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = (1, 2, 4, 8, 16, 21, 32, 64, 128, 256, 512, 1024, 4096, 16384)
EXPERTS, TOP_K, CALLS, WARM_UPS = 128, 8, 50, 5
BLOCK_SIZES = (8, 16, 32, 48, 64)


def fused_block_size(tokens: int) -> int:
    """As `fused_marlin_moe` chooses it: the first whose blocks are less than nine tenths empty on average."""
    return next((b for b in BLOCK_SIZES if tokens * TOP_K / EXPERTS / b < 0.9), BLOCK_SIZES[-1])


def sides(tokens: int, seed: int) -> dict[str, dict[str, Callable[[], None]]]:
    """By scope, each side as a call."""
    import torch

    from routeblock.cuda.align import moe_align_block_size, workspace_size
    from routeblock.vllm_plugin.alignment import CanonicalAlignment

    block, routes = fused_block_size(tokens), tokens * TOP_K
    random = np.random.default_rng(seed)
    ids = torch.from_numpy(
        np.stack([random.choice(EXPERTS, TOP_K, replace=False) for _ in range(tokens)]).astype(np.int32)
    ).to("cuda")
    native = torch.ops._moe_C.moe_align_block_size
    length = routes + EXPERTS * (block - 1)
    length = min(length, routes * block) if routes < EXPERTS else length

    def empty(n: int) -> Any:
        return torch.empty((n,), dtype=torch.int32, device=ids.device)

    given = (empty(length), empty(-(-length // block)), empty(1))
    need = workspace_size(routes, EXPERTS, block, 0)
    space = empty(need) if need else None

    ours = CanonicalAlignment(native)

    def wrapped() -> None:
        # The work of vLLM 0.24.0's Python function: three buffers, one operator.
        made = (empty(length), empty(-(-length // block)), empty(1))
        native(ids, EXPERTS, block, *made, None)

    return {
        "operator": {
            "native": lambda: native(ids, EXPERTS, block, *given, None),
            "native_again": lambda: native(ids, EXPERTS, block, *given, None),
            "canonical": lambda: moe_align_block_size(ids, EXPERTS, block, *given, workspace=space),
        },
        "wrapper": {
            "native": wrapped,
            "native_again": wrapped,
            "canonical": lambda: ours(ids, block, EXPERTS, None, False, False) and None,
        },
    }


def timed(calls: dict[str, Callable[[], None]], repetitions: int) -> dict[str, list[float]]:
    """Microseconds a call, by side, one value a repetition."""
    import torch

    names = list(calls)
    found: dict[str, list[float]] = {name: [] for name in names}
    for r in range(-WARM_UPS, repetitions):
        turn = names[r % len(names) :] + names[: r % len(names)]
        for name in turn[:: 1 if r % 2 else -1]:
            torch.cuda._sleep(8_000_000)
            call, begin = calls[name], time.perf_counter()
            for _ in range(CALLS):
                call()
            spent = time.perf_counter() - begin
            torch.cuda.synchronize()
            if r >= 0:
                found[name].append(spent / CALLS * 1e6)
    return found


def ratio(one: list[float], other: list[float], seed: int) -> tuple[float, float, float]:
    """Median of paired ratios, and its 95% percentile bootstrap interval."""
    ratios = np.array(one) / np.array(other)
    drawn = np.random.default_rng(seed).choice(ratios, (4000, ratios.size))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of one alignment: canonical over native")
    parser.add_argument("extension", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--repetitions", type=int, default=60)
    asked = parser.parse_args()
    import torch

    torch.ops.load_library(str(asked.extension))
    rows = []
    print(f"{'scope':10}{'M':>7}{'native us':>11}{'canonical us':>14}{'ratio':>8}  interval        native over itself")
    for tokens in TOKENS:
        for scope, calls in sides(tokens, tokens).items():
            times = timed(calls, asked.repetitions)
            against = ratio(times["canonical"], times["native"], 1)
            itself = ratio(times["native_again"], times["native"], 1)
            middle = {name: float(np.median(values)) for name, values in times.items()}
            print(
                f"{scope:10}{tokens:7}{middle['native']:11.2f}{middle['canonical']:14.2f}{against[0]:8.3f}"
                f"  [{against[1]:.3f}, {against[2]:.3f}]  {itself[0]:.3f} [{itself[1]:.3f}, {itself[2]:.3f}]"
            )
            rows.append({"scope": scope, "tokens": tokens, "times_us": times, "ratio": against, "floor": itself})
    if asked.out:
        asked.out.write_text(json.dumps({"calls": CALLS, "warm_ups": WARM_UPS, "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
