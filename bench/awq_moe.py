# SPDX-License-Identifier: Apache-2.0
"""Times of awq_moe.cu on this machine's GPU beside vLLM's Marlin, beside reading the weights, and beside itself.

    ROUTEBLOCK_EXTENSION=FILE python bench/awq_moe.py [--tokens 1,8,64] [--shape E,K,H,I] [--type u4|u4b8]
        [--dtype float16] [--group 128] [--out FILE] [--cubin FILE] [--forms T,U,tiles,stages,resident ...] [--sweep]

Graph replay: a graph holds one call for each of COPIES sets of weights in turn, each with a routing of its own
(uniform, distinct experts), so that L2 holds no layer. Before a series every arm is run uncaptured and its graph twice.
A series is SERIES replays; arms take turns inside a round, so all see the same machine; the time is the median over
replays, per call. `ours again` is the same graph captured a second time: what it differs by is noise. Marlin: the
operator's own launch, vLLM's block size, W13 and W2 without activation, or (`layer`) native alignment, GEMMs, an
activation kernel with vLLM's bits (the one of awq_moe.cu: the extension that has vLLM's own is another file) and
torch.sum. Reading: the used experts' weights, scales and zero points once, two launches. Without the extension Marlin
is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from routeblock.cuda import awq_moe, awq_moe_plan
from routeblock.cuda.awq_moe_plan import Form, Plan, Sizes
from routeblock.cuda.operators import MAX_BLOCKS_PER_SM, DevicePlan, DeviceWeights, VllmOperators, padded_length

COPIES = 10
SERIES = 9
DEVICE = "cuda"
TOKENS = (1, 2, 4, 8, 16, 21, 32, 64, 128, 256, 512, 1024, 4096, 16384)


def weights_of(sizes: Sizes, gemm: Any) -> DeviceWeights:
    """Random packed words: every nibble is a legal weight; scales keep the layer's values finite."""
    n, k = sizes.shape(gemm)
    groups = sizes.groups(gemm)

    def words(*shape: int) -> Any:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE)

    scales = ((torch.rand((sizes.experts, groups, n), device=DEVICE) * 0.8 + 0.2) / (20 * k) ** 0.5).to(
        getattr(torch, sizes.dtype)
    )
    zeros = words(sizes.experts, groups, n // 8) if sizes.zero_points else None
    return DeviceWeights(words(sizes.experts, k // 16, 2 * n), zeros, scales, n, k)


class Problem:
    """One number of tokens: inputs and a routing for each copy of the weights."""

    def __init__(self, sizes: Sizes, layers: list[awq_moe.Layer], seed: int) -> None:
        self.sizes, self.layers = sizes, layers
        rng = np.random.default_rng(seed)
        self.hidden = torch.randn((sizes.tokens, sizes.hidden), device=DEVICE).to(getattr(torch, sizes.dtype))
        draws = [np.argsort(rng.random((sizes.tokens, sizes.experts)), 1)[:, : sizes.top_k] for _ in layers]
        self.ids = [torch.from_numpy(np.ascontiguousarray(d.astype(np.int32))).to(DEVICE) for d in draws]
        self.used = [torch.from_numpy(np.unique(d).astype(np.int32)).to(DEVICE) for d in draws]
        self.weights = torch.rand((sizes.tokens, sizes.top_k), device=DEVICE)


class Ours:
    """Calls of our kernels; a plan in the buffers for each copy."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        device = torch.device(DEVICE, 0)
        self.buffers = [awq_moe.Buffers.make(problem.sizes, plan, device) for _ in problem.layers[:1]]
        shared = self.buffers[0]
        for _ in problem.layers[1:]:
            made = awq_moe.Buffers.make(replace(problem.sizes, hidden=64, intermediate=64, group_size=-1), plan, device)
            self.buffers.append(replace(made, activation=shared.activation, rows=shared.rows, final=shared.final))
        for layer, buffers, ids in zip(problem.layers, self.buffers, problem.ids, strict=True):
            layer.align(problem.sizes, plan, buffers, ids)

    def gemms(self, i: int) -> None:
        p = self.problem
        p.layers[i].gemms(p.sizes, self.plan, self.buffers[i], p.hidden, p.weights)

    def layer(self, i: int) -> None:
        p = self.problem
        p.layers[i].forward(p.sizes, self.plan, self.buffers[i], p.hidden, p.ids[i], p.weights)


class Marlin:
    """Calls of vLLM's operators as its fused path makes them."""

    def __init__(self, problem: Problem, operators: VllmOperators, processors: int) -> None:
        self.problem, self.operators, self.processors = problem, operators, processors
        sizes = problem.sizes
        each = sizes.routes / sizes.experts
        self.block = next((b for b in (8, 16, 32, 48, 64) if each / b < 0.9), 64)
        length = padded_length(sizes.routes, sizes.experts, self.block)
        dtype = getattr(torch, sizes.dtype)

        def ints(count: int) -> Any:
            return torch.empty((count,), dtype=torch.int32, device=DEVICE)

        self.plans = [
            DevicePlan(ints(length), ints(-(-length // self.block)), ints(1), self.block) for _ in problem.layers
        ]
        self.gate_up = torch.empty((sizes.routes, 2 * sizes.intermediate), dtype=dtype, device=DEVICE)
        self.activation = torch.zeros((sizes.routes, sizes.intermediate), dtype=dtype, device=DEVICE)
        self.rows = torch.empty((sizes.routes, sizes.hidden), dtype=dtype, device=DEVICE)
        self.final = torch.empty((sizes.tokens, sizes.hidden), dtype=dtype, device=DEVICE)
        self.locks = torch.zeros((processors * MAX_BLOCKS_PER_SM,), dtype=torch.int32, device=DEVICE)
        for i in range(len(self.plans)):
            self.align(i)

    def align(self, i: int) -> None:
        plan, sizes = self.plans[i], self.problem.sizes
        torch.ops._moe_C.moe_align_block_size(
            self.problem.ids[i], sizes.experts, self.block, plan.sorted_token_ids, plan.expert_rows,
            plan.num_tokens_post_padded, None,
        )  # fmt: skip

    def first(self, i: int) -> None:
        p = self.problem
        self.operators.moe_gemm(
            p.hidden, p.layers[i].w13, self.plans[i], p.weights, top_k=p.sizes.top_k, multiply_topk_weights=False,
            lock_sms=self.processors, out=self.gate_up, locks=self.locks,
        )  # fmt: skip

    def second(self, i: int) -> None:
        p = self.problem
        self.operators.moe_gemm(
            self.activation, p.layers[i].w2, self.plans[i], p.weights, top_k=1, multiply_topk_weights=True,
            lock_sms=self.processors, out=self.rows, locks=self.locks,
        )  # fmt: skip

    def gemms(self, i: int) -> None:
        self.first(i)
        self.second(i)

    def layer(self, i: int) -> None:
        sizes = self.problem.sizes
        self.align(i)
        self.first(i)
        self.problem.layers[i].kernels.activate(
            sizes.dtype, torch.cuda.current_stream().cuda_stream, self.gate_up.data_ptr(), self.activation.data_ptr(),
            sizes.routes, sizes.intermediate,
        )  # fmt: skip
        self.second(i)
        torch.sum(self.rows.view(sizes.tokens, sizes.top_k, sizes.hidden), dim=1, out=self.final)


def reading(problem: Problem, processors: int, sink: Any) -> Callable[[int], None]:
    def call(i: int) -> None:
        layer, used = problem.layers[i], problem.used[i]
        stream = torch.cuda.current_stream().cuda_stream
        for weights in (layer.w13, layer.w2):
            parts = tuple(
                0 if x is None else x[0].numel() * x.element_size() for x in (weights.q, weights.scales, weights.zeros)
            )
            layer.kernels.read_experts(
                stream,
                max(1, 8 * processors // used.numel()),
                layer.pointers(weights),
                parts,
                used.data_ptr(),
                used.numel(),
                sink.data_ptr(),
            )

    return call


def launching(problem: Problem, plan: Plan) -> Callable[[int], None]:
    def call(_: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for launch in (plan.w13, plan.w2):
            problem.layers[0].kernels.nothing(stream, launch, early=True)

    return call


class Graph:
    """A graph of one call for each copy."""

    def __init__(self, call: Callable[[int], None], rounds: int) -> None:
        self.calls = COPIES * rounds
        for i in range(COPIES):
            call(i)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for i in range(self.calls):
                call(i % COPIES)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(2):
            self.replay()

    def replay(self) -> float:
        """Microseconds a call."""
        self._events[0].record()
        self._graph.replay()
        self._events[1].record()
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) * 1000 / self.calls


def measure(graphs: dict[str, Graph]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(SERIES):
        for name, graph in graphs.items():
            times[name].append(graph.replay())
    return times


def every_plan(sizes: Sizes, processors: int) -> dict[str, Plan]:
    """All pairs of forms of one block size that are worth a try."""
    found = {}
    forms = list(awq_moe_plan.FORMS.values())
    each = sizes.routes / sizes.experts
    for a in forms:
        for b in forms:
            if a.tokens == b.tokens and each / 6 < a.tokens and (a.tokens <= 8 or each >= a.tokens / 16):
                plan = Plan(
                    awq_moe_plan.launch(sizes, "w13", a, "sm_90", processors),
                    awq_moe_plan.launch(sizes, "w2", b, "sm_90", processors),
                )
                found[f"{a.name}/{b.name}"] = plan
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--shape", default="128,8,2048,768", help="experts, top-k, hidden, intermediate")
    parser.add_argument("--type", choices=("u4", "u4b8"), default="u4")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--cubin", type=Path)
    parser.add_argument("--forms", nargs="*", default=[], help="instead of those of awq_moe_plan.py")
    parser.add_argument("--sweep", action="store_true", help="the two GEMMs in every form, nothing else")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.forms:
        forms = [Form(*map(int, text.split(","))) for text in options.forms]
        awq_moe_plan.FORMS.clear()
        awq_moe_plan.FORMS.update({form.name: form for form in forms})
    torch.manual_seed(1)
    torch.zeros(1, device=DEVICE)
    properties = torch.cuda.get_device_properties(0)
    processors = properties.multi_processor_count
    extension = os.environ.get("ROUTEBLOCK_EXTENSION")
    operators = VllmOperators(Path(extension)) if extension and not options.sweep else None
    experts, top_k, hidden, inter = map(int, options.shape.split(","))
    base = Sizes(1, top_k, experts, hidden, inter, options.group, options.dtype, options.type == "u4")
    architecture = f"sm_{properties.major}{properties.minor}"
    code = options.cubin.read_bytes() if options.cubin else awq_moe.compile_for(architecture, base.kind).code
    kernels = awq_moe.Kernels(code)
    layers = [awq_moe.Layer(kernels, weights_of(base, "w13"), weights_of(base, "w2")) for _ in range(COPIES)]
    sink = torch.zeros((4,), dtype=torch.int32, device=DEVICE)
    results = []
    for tokens in map(int, options.tokens.split(",")):
        sizes = replace(base, tokens=tokens)
        problem = Problem(sizes, layers, tokens)
        rounds = 2 if tokens <= 512 else 1
        chosen = awq_moe_plan.plan(sizes, multiprocessors=processors)
        calls: dict[str, Callable[[int], None]] = {}
        if options.sweep:
            calls |= {name: Ours(problem, plan).gemms for name, plan in every_plan(sizes, processors).items()}
        else:
            ours = Ours(problem, chosen)
            calls |= {"ours": ours.gemms, "ours again": ours.gemms, "ours, layer": ours.layer}
            if operators:
                marlin = Marlin(problem, operators, processors)
                calls |= {"marlin": marlin.gemms, "marlin, layer": marlin.layer}
            calls |= {"reading": reading(problem, processors, sink), "launching": launching(problem, chosen)}
        times = measure({name: Graph(call, rounds) for name, call in calls.items()})
        medians = {name: statistics.median(values) for name, values in times.items()}
        form = f"{chosen.w13.form.name}/{chosen.w2.form.name}"
        results.append({"tokens": tokens, "form": form, "times_us": times, "used": [u.numel() for u in problem.used]})
        print(f"M={tokens} [{form}] " + "  ".join(f"{name} {value:.1f}" for name, value in medians.items()), flush=True)
    if options.out:
        told = {"device": properties.name, "shape": options.shape, "type": options.type, "dtype": options.dtype}
        options.out.write_text(json.dumps({**told, "group": options.group, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
