# SPDX-License-Identifier: Apache-2.0
"""What canonical alignment costs on this machine's GPU, by graph replay. One command, about a minute:

    PYTHONPATH=workflow ROUTEBLOCK_EXTENSION=FILE python tests/gpu/align_time.py [RESULT.json]

Arms: vLLM's own alignment (atomics), twice, so that A/A stands beside A/B; every variant of ours that takes the size;
torch.sort(stable=True) of the ids alone, less than an alignment needs; an empty kernel, the floor of a launch. Each arm
is a graph of CALLS calls over several routings; arms take turns, and one number is the time of one replay over CALLS.
Exploration for the table of variants: the study of the cost is `routeblock.alignment_cost`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from routeblock.cuda import nvrtc
from routeblock.cuda.align import moe_align_block_size, prepare
from routeblock.cuda.align_variants import VARIANTS, Problem, serving
from routeblock.moe.routing import block_size_for

CALLS = 40
ROUTINGS = 4
ROUNDS = 25
TOKENS = (1, 2, 4, 8, 16, 21, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# (experts, top_k, tokens)
POINTS = (
    *((128, 8, m) for m in TOKENS),
    *((e, k, m) for e, k in ((8, 2), (64, 8), (256, 8), (128, 2)) for m in (1, 21, 64, 256, 1024, 4096)),
)


def empty_kernel() -> Callable[[], None]:
    loaded = prepare(0)
    core = loaded._core
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cu")
        source.write_text('extern "C" __global__ void empty() {}\n')
        cubin = nvrtc.for_architecture(loaded.gpu.architecture).compile(source, loaded.gpu.architecture)
    code = core.ObjectCode.from_cubin(cubin.code)
    kernel = code.get_kernel("empty")
    config = core.LaunchConfig(grid=1, block=128)

    def call() -> None:
        _ = code
        core.launch(core.Stream.from_handle(torch.cuda.current_stream().cuda_stream), config, kernel)

    return call


def capture(call: Callable[[int], None]) -> torch.cuda.CUDAGraph:
    for i in range(ROUTINGS):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i % ROUTINGS)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def arms_at(experts: int, top_k: int, tokens: int, empty: Callable[[], None]) -> dict[str, Callable[[int], None]]:
    rng = np.random.default_rng(tokens)
    block = block_size_for(tokens, top_k, experts)
    drawn = [np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32) for _ in range(ROUTINGS)]
    ids = [torch.from_numpy(np.ascontiguousarray(d)).cuda() for d in drawn]
    problem = Problem(tokens * top_k, experts, block)
    length = problem.routes + experts * (block - 1)
    if problem.routes < experts:
        length = min(problem.routes * block, length)
    outs = [torch.empty(n, dtype=torch.int32, device="cuda") for n in (length, -(-length // block), 1)]
    space = torch.empty(1 << 20, dtype=torch.int32, device="cuda")
    keys = [i.view(-1) for i in ids]
    sort_out = (torch.empty_like(keys[0]), torch.empty(problem.routes, dtype=torch.int64, device="cuda"))
    native_op = torch.ops._moe_C.moe_align_block_size

    def native(i: int) -> None:
        native_op(ids[i], experts, block, *outs, None)

    def ours(name: str) -> Callable[[int], None]:
        return lambda i: moe_align_block_size(ids[i], experts, block, *outs, workspace=space, variant=name)

    arms: dict[str, Callable[[int], None]] = {
        "native": native,
        "native again": native,
        "sort": lambda i: torch.sort(keys[i], stable=True, out=sort_out),
        "empty": lambda i: empty(),
    }
    gpu = prepare(0).gpu
    for v in VARIANTS.values():
        # A variant made for much larger sizes only costs time here.
        if v.takes(problem, gpu) and (v.capacity is None or v.capacity <= max(4096, 16 * problem.routes)):
            arms[v.name] = ours(v.name)
    return arms


def measure(arms: dict[str, Callable[[int], None]]) -> dict[str, list[float]]:
    """Microseconds a call, one value a round, arms in turn, every second round backwards."""
    graphs = {name: capture(call) for name, call in arms.items()}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    values: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(ROUNDS + 2):
        for name in list(graphs) if turn % 2 else reversed(list(graphs)):
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                values[name].append(start.elapsed_time(end) * 1000 / CALLS)
    return values


def main() -> None:
    began = time.perf_counter()
    torch.ops.load_library(os.environ["ROUTEBLOCK_EXTENSION"])
    loaded = prepare(0)
    empty = empty_kernel()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cubin_sha256": loaded.cubin_sha256,
        "calls_per_replay": CALLS,
        "rounds": ROUNDS,
        "points": [],
    }
    for experts, top_k, tokens in POINTS:
        block = block_size_for(tokens, top_k, experts)
        values = measure(arms_at(experts, top_k, tokens, empty))
        medians = {name: statistics.median(v) for name, v in values.items()}
        chosen = serving(Problem(tokens * top_k, experts, block), loaded.gpu).name
        result["points"].append(
            {
                "experts": experts,
                "top_k": top_k,
                "tokens": tokens,
                "block_size": block,
                "serving": chosen,
                "median_us": {name: round(m, 3) for name, m in medians.items()},
                "lowest_us": {name: round(min(v), 3) for name, v in values.items()},
            }
        )
        base = medians["native"]
        mine = sorted((m, n) for n, m in medians.items() if n in VARIANTS)
        print(
            f"E={experts} k={top_k} M={tokens} b={block}: native {base:.2f} again {medians['native again'] / base:.3f} "
            f"sort {medians['sort']:.2f} empty {medians['empty']:.2f} "
            f"serving {chosen} {medians.get(chosen, float('nan')) / base:.2f} | "
            + " ".join(f"{n} {m / base:.2f}" for m, n in mine[:6]),
            flush=True,
        )
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
