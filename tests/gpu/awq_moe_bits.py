# SPDX-License-Identifier: Apache-2.0
"""Bits of awq_moe.cu on this machine's GPU. One command:

    python tests/gpu/awq_moe_bits.py [--calls N] [--twin N] [--seed S] [--golden FOLDER] [--cubins FOLDER] [--out FILE]

Random calls over shapes, dtypes, weight types, groups, orders of routes and grids: every form of a launch must give the
bytes of the one that serves the size, and at least eight tokens of each call, alone, the bytes that they have in the
batch. `--twin` of the calls are held against the twin, every surface. Also: torch.sum against the twin's sum, and the
activation against the recorded table for all 65,536 values. Prints one line a check; exits 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from routeblock.cuda import awq_moe, awq_moe_plan
from routeblock.cuda.awq_moe_plan import FORMS, Plan, Sizes
from routeblock.cuda.operators import DeviceWeights, to_host
from routeblock.moe.awq import marlin_unpack_weights, marlin_unpack_zeros, marlin_unpermute_scales
from routeblock.moe.routing import align
from routeblock.twin.gemm import moe_gemm
from routeblock.twin.layer import GemmWeights, combine, silu_and_mul

DEVICE = "cuda"
CALLS_A_LAYER = 60
ALONE = 8  # tokens of a call that are computed alone
TWIN_PRODUCTS = 60_000_000  # multiply-accumulates of a call that the twin is asked for
GROUPS = (32, 64, 128, -1)


@dataclass(frozen=True)
class Drawn:
    """A layer's weights, random in the packed form itself: every nibble is a legal weight."""

    sizes: Sizes  # of one token
    w13: DeviceWeights
    w2: DeviceWeights


def draw_layer(rng: np.random.Generator, generator: torch.Generator, kinds: list[str], twin: bool) -> Drawn:
    """Shapes that stages and tiles divide, and some that they do not. The twin wants hidden sizes of 128."""
    step = 128 if twin else 64
    while True:
        hidden, inter = int(rng.integers(1, 9)) * step, int(rng.integers(1, 9)) * 64
        group = int(rng.choice(GROUPS))
        if group == -1 or (hidden % group == 0 and inter % group == 0):
            break
    experts = int(rng.choice([1, 2, 4, 8, 16, 40]))
    kind = str(rng.choice(kinds))
    dtype = "float16" if kind.startswith("f16") else "bfloat16"
    top_k = int(rng.integers(1, min(experts, 10) + 1))
    sizes = Sizes(1, top_k, experts, hidden, inter, group, dtype, kind.endswith("_u4"))
    return Drawn(sizes, *(draw_weights(sizes, gemm, generator) for gemm in ("w13", "w2")))


def draw_weights(sizes: Sizes, gemm: Any, generator: torch.Generator) -> DeviceWeights:
    n, k = sizes.shape(gemm)
    groups = sizes.groups(gemm)

    def words(*shape: int) -> Any:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device=DEVICE, generator=generator).to(
            torch.int32
        )

    scales = torch.rand((sizes.experts, groups, n), device=DEVICE, generator=generator) * 0.8 + 0.2
    scales = (
        scales
        / (20 * k) ** 0.5
        * torch.where(torch.rand(scales.shape, device=DEVICE, generator=generator) < 0.1, -1, 1)
    )
    zeros = words(sizes.experts, groups, n // 8) if sizes.zero_points else None
    return DeviceWeights(words(sizes.experts, k // 16, 2 * n), zeros, scales.to(getattr(torch, sizes.dtype)), n, k)


def draw_tokens(rng: np.random.Generator, call: int) -> int:
    """A third has 64 tokens and more, one in eighteen 1,024 and more."""
    if call % 18 == 0:
        return int(rng.integers(1024, 1400))
    if call % 3 == 0:
        return int(rng.integers(64, 300))
    return int(rng.integers(1, 64))


def plans_of(sizes: Sizes, processors: int) -> list[Plan]:
    """Every pair of forms of one block size."""
    found = []
    for block in awq_moe_plan.BLOCK_SIZES:
        units = [form.units for form in FORMS.values() if form.tokens == block]
        found += [
            awq_moe_plan.plan(sizes, multiprocessors=processors, block_size=block, w13_units=u, w2_units=u)
            for u in units
        ]
    return found


class Runner:
    """Calls of one process, every buffer filled with a pattern before."""

    def __init__(self, kernels: dict[str, awq_moe.Kernels], processors: int) -> None:
        self.kernels, self.processors = kernels, processors

    def run(
        self, layer: awq_moe.Layer, sizes: Sizes, plan: Plan, x: Any, ids: Any, weights: Any, order: Any = None
    ) -> tuple[Any, Any, Any]:
        """activation, w2 rows, final. order: a permutation of the routes, in which they stand inside their experts."""
        buffers = awq_moe.Buffers.make(sizes, plan, torch.device(DEVICE, torch.cuda.current_device()))
        for surface in (buffers.activation, buffers.rows, buffers.final):
            surface.view(torch.int16).fill_(0x7FFF)
        if order is None:
            layer.forward(sizes, plan, buffers, x, ids, weights)
            return buffers.activation, buffers.rows, buffers.final
        aligned = align(to_host(ids), sizes.experts, plan.block_size, order)
        for target, source in (
            (buffers.sorted_token_ids, aligned.sorted_token_ids),
            (buffers.expert_ids, aligned.expert_ids),
        ):
            target[: source.size].copy_(torch.from_numpy(source))
        buffers.num_tokens_post_padded[:1] = aligned.num_tokens_post_padded
        layer.gemms(sizes, plan, buffers, x, weights)
        stream = torch.cuda.current_stream().cuda_stream
        self.kernels[sizes.kind].sum_routes(sizes, stream, buffers.rows.data_ptr(), buffers.final.data_ptr())
        return buffers.activation, buffers.rows, buffers.final


def same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a.view(torch.int16), b.view(torch.int16)))


def twin_weights(weights: DeviceWeights) -> GemmWeights:
    q, scales = to_host(weights.q), to_host(weights.scales)
    zeros = None if weights.zeros is None else np.stack([marlin_unpack_zeros(z) for z in to_host(weights.zeros)])
    return GemmWeights(
        np.stack([marlin_unpack_weights(x) for x in q]), zeros, np.stack([marlin_unpermute_scales(s) for s in scales])
    )


def against_twin(runner: Runner, layer: awq_moe.Layer, sizes: Sizes, inputs: Any, unpacked: Any) -> bool:
    """Whether all surfaces have the twin's bytes. One group in a GEMM is a scale a column, for it alone."""
    x, ids, weights = inputs
    plan = align(to_host(ids), sizes.experts, 8)

    def gemm(name: Any, rows: Any, top_k: int, own: GemmWeights, topk_weights: Any) -> Any:
        group_size = sizes.group_size if sizes.groups(name) > 1 else -1
        return moe_gemm(
            rows, *own, plan, top_k=top_k, architecture="hopper", thread_k=64, thread_n=128, grid=1,
            group_size=group_size, topk_weights=topk_weights, full_k=True,
        )  # fmt: skip

    activation = silu_and_mul(gemm("w13", to_host(x), sizes.top_k, unpacked[0], None))
    routed = gemm("w2", activation, 1, unpacked[1], to_host(weights))
    want = (activation, routed, combine(routed.reshape(sizes.tokens, sizes.top_k, -1)))
    chosen = awq_moe_plan.plan(sizes, multiprocessors=runner.processors)
    got = runner.run(layer, sizes, chosen, x, ids, weights)
    pairs = ((to_host(surface), surface_wanted) for surface, surface_wanted in zip(got, want, strict=True))
    return all(np.array_equal(a.view(np.uint16), b.view(np.uint16)) for a, b in pairs)


def inputs_of(rng: np.random.Generator, generator: torch.Generator, sizes: Sizes) -> tuple[Any, Any, Any]:
    dtype = getattr(torch, sizes.dtype)
    x = torch.randn((sizes.tokens, sizes.hidden), device=DEVICE, generator=generator).to(dtype)
    skew = rng.random(sizes.experts) ** float(rng.choice([0, 1, 4]))  # from even to one crowded expert
    keys = np.log(-np.log(rng.random((sizes.tokens, sizes.experts)))) - np.log(skew + 1e-9)
    ids = torch.from_numpy(np.argsort(keys, 1)[:, : sizes.top_k].astype(np.int32)).to(DEVICE)
    weights = torch.rand((sizes.tokens, sizes.top_k), device=DEVICE, generator=generator)
    return x, ids.contiguous(), weights


def random_calls(runner: Runner, calls: int, twins: int, seed: int, limit_s: float) -> dict[str, Any]:
    """Counts of what was run and of what differed. Stops early, and says so, after `limit_s` seconds."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    start = time.perf_counter()
    layers = -(-calls // CALLS_A_LAYER)
    twins_a_layer = -(-twins // layers)
    for number in range(layers):
        if time.perf_counter() - start > limit_s:
            break
        drawn = draw_layer(rng, generator, list(runner.kernels), twin=number % 2 == 0)
        layer = awq_moe.Layer(runner.kernels[drawn.sizes.kind], drawn.w13, drawn.w2)
        base = drawn.sizes
        counts[f"{base.kind}, group {base.group_size}"] += CALLS_A_LAYER
        unpacked = None
        for call in range(min(CALLS_A_LAYER, calls - number * CALLS_A_LAYER)):
            sizes = replace(base, tokens=draw_tokens(rng, call))
            inputs = inputs_of(rng, generator, sizes)
            x, ids, weights = inputs
            chosen = awq_moe_plan.plan(sizes, multiprocessors=runner.processors)
            reference = runner.run(layer, sizes, chosen, *inputs)
            counts["calls"] += 1
            counts["calls of 64 tokens and more"] += sizes.tokens >= 64
            counts["calls of 1,024 tokens and more"] += sizes.tokens >= 1024
            counts[f"served by {chosen.w13.form.name}/{chosen.w2.form.name}"] += 1
            told = f"seed {seed}, layer {number}, call {call}: {sizes}"
            forms = plans_of(sizes, runner.processors)
            for plan in [forms[int(i)] for i in rng.permutation(len(forms))[:2]]:
                grids = [int(rng.integers(1, launch.grid + 1)) for launch in (plan.w13, plan.w2)]
                changed = Plan(replace(plan.w13, grid=grids[0]), replace(plan.w2, grid=grids[1]))
                order = rng.permutation(sizes.routes) if sizes.routes <= 4096 else None
                got = runner.run(layer, sizes, changed, *inputs, order)
                counts[f"form {plan.w13.form.name}"] += 1
                counts["calls in another order"] += order is not None
                if not all(same(a, b) for a, b in zip(got, reference, strict=True)):
                    wrong.append(f"{told}: {plan.w13.form.name} on {grids}")
            single = replace(sizes, tokens=1)
            alone = awq_moe_plan.plan(single, multiprocessors=runner.processors)
            for token in rng.permutation(sizes.tokens)[:ALONE]:
                one = slice(int(token), int(token) + 1)
                got = runner.run(layer, single, alone, x[one], ids[one], weights[one])
                counts["tokens alone"] += 1
                if not same(got[2], reference[2][one]):
                    wrong.append(f"{told}: token {token} alone")
            products = 3 * sizes.routes * sizes.hidden * sizes.intermediate
            if (
                number % 2 == 0
                and counts["calls against the twin"] < (number + 2) * twins_a_layer
                and products < TWIN_PRODUCTS
            ):
                unpacked = unpacked or (twin_weights(drawn.w13), twin_weights(drawn.w2))
                counts["calls against the twin"] += 1
                if not against_twin(runner, layer, sizes, inputs, unpacked):
                    wrong.append(f"{told}: twin")
        if number % 20 == 19:
            print(f"{counts['calls']} calls, {len(wrong)} wrong, {time.perf_counter() - start:.0f} s", flush=True)
    return {"counts": dict(counts), "wrong": wrong, "seconds": time.perf_counter() - start}


def torch_sums() -> dict[str, Any]:
    """torch.sum over top-k against the twin's, by dtype, top-k and shape."""
    wrong = []
    generator = torch.Generator(DEVICE).manual_seed(3)
    cases = [
        (k, m, n) for k in (1, 2, 4, 6, 8, 10) for m, n in ((1, 2048), (3, 64), (64, 256), (700, 2048), (4096, 512))
    ]
    for dtype in (torch.float16, torch.bfloat16):
        for k, m, n in cases:
            rows = torch.randn((m, k, n), device=DEVICE, generator=generator).to(dtype)
            want = combine(to_host(rows))
            if not np.array_equal(to_host(torch.sum(rows, dim=1)).view(np.uint16), want.view(np.uint16)):
                wrong.append(f"{dtype}, top-k {k}, [{m}, {n}]")
    return {"cases": 2 * len(cases), "wrong": wrong}


def activation_table(kernels: awq_moe.Kernels, golden: Path) -> dict[str, int]:
    """How many gate values, of all 65,536 and of recorded pairs, have another activation than the recorded one."""
    recorded = np.load(golden / "h200_silu_and_mul.npz")
    stream = torch.cuda.current_stream().cuda_stream
    wrong = {}
    for name, dtype in (("f16", "float16"), ("bf16", "bfloat16")):
        one = np.uint16(0x3C00 if name == "f16" else 0x3F80)
        gates = np.arange(65536, dtype=np.uint16).reshape(-1, 256)
        cases = {
            "table": (gates, np.full_like(gates, one), recorded[f"silu_{name}"]),
            "pairs": tuple(recorded[f"pair_{part}_{name}"].view(np.uint16) for part in ("g", "u", "o")),
        }
        for case, (gate, up, want) in cases.items():
            gate_up = torch.from_numpy(np.concatenate([gate, up], 1).view(np.int16)).to(DEVICE)
            out = torch.empty(gate.shape, dtype=torch.int16, device=DEVICE)
            kernels.activate(dtype, stream, gate_up.data_ptr(), out.data_ptr(), *gate.shape)
            got, want = out.cpu().numpy().view(np.uint16).reshape(-1), want.view(np.uint16).reshape(-1)
            wrong[f"{name} {case}"] = int((got != want).sum())
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--twin", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=400, help="seconds for the random calls")
    parser.add_argument("--golden", type=Path, default=Path(__file__).resolve().parents[2] / "fixtures" / "golden")
    parser.add_argument("--cubins", type=Path, help="a folder of KIND.cubin; else they are compiled here")
    parser.add_argument("--kinds", default=",".join(awq_moe.KINDS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.cuda.init()
    properties = torch.cuda.get_device_properties(0)
    torch.zeros(1, device=DEVICE)
    kernels = {}
    for kind in options.kinds.split(","):
        architecture = f"sm_{properties.major}{properties.minor}"
        given = options.cubins and options.cubins / f"{kind}.cubin"
        kernels[kind] = awq_moe.Kernels(given.read_bytes() if given else awq_moe.compile_for(architecture, kind).code)
    runner = Runner(kernels, properties.multi_processor_count)
    result: dict[str, Any] = {"device": properties.name}
    if options.golden.is_dir():
        result["activation, values that differ"] = activation_table(next(iter(runner.kernels.values())), options.golden)
        print(result["activation, values that differ"], flush=True)
    result["torch.sum"] = torch_sums()
    print(f"torch.sum: {result['torch.sum']}", flush=True)
    result["random"] = random_calls(runner, options.calls, options.twin, options.seed, options.limit)
    for name, count in sorted(result["random"]["counts"].items()):
        print(f"{count:8} {name}")
    for line in result["random"]["wrong"][:20]:
        print(f"WRONG {line}")
    print(f"{len(result['random']['wrong'])} wrong in {result['random']['seconds']:.0f} s")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))
    bad = result["random"]["wrong"] or any(result.get("activation, values that differ", {}).values())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
