# SPDX-License-Identifier: Apache-2.0
"""Canonical alignment on this machine's GPU against the CPU reference, bit for bit.

10,000 random routings, every variant at the edges of its capacity, degenerate routings, refused calls, and 10,000
repeated calls each at several sizes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from routeblock.cuda.align import moe_align_block_size, prepare, workspace_size
from routeblock.cuda.align_variants import VARIANTS, Problem, serving
from routeblock.errors import InputError
from routeblock.moe.partition import BLOCK_SIZES
from routeblock.moe.routing import AlignedPlan, align, block_size_for

POISON = -77
ROUTINGS = 10_000
BATCH = 250
EXPERTS = (1, 2, 3, 8, 16, 31, 60, 64, 72, 100, 128, 160, 255, 256, 300, 384, 512, 1000, 1024)
OTHER_BLOCKS = (1, 3, 7, 128, 200, 1024)


def canonical(
    ids: NDArray[Any], experts: int, block: int, expert_map: NDArray[np.int32] | None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The used part of sorted_token_ids and expert_ids: by the reference, or by formula where it has no such block."""
    whole = np.arange(experts, dtype=np.int32) if expert_map is None else expert_map
    seen = np.where((ids < 0) | (ids >= experts), -1, ids)
    if block in BLOCK_SIZES:
        plan = align(seen[:, None], experts, block, expert_map=whole)
        return plan.sorted_token_ids, plan.expert_ids
    here = (seen >= 0) & (whole[np.clip(seen, 0, None)] >= 0)
    rows: list[Any] = []
    owners: list[int] = []
    for e in np.unique(seen[here]):
        routes = np.flatnonzero(here & (seen == e))
        blocks = -(-routes.size // block)
        rows.append(np.pad(routes, (0, blocks * block - routes.size), constant_values=ids.size))
        owners += [int(whole[e])] * blocks
    return np.concatenate(rows or [np.zeros(0)]).astype(np.int32), np.array(owners, np.int32)


class DiffersError(Exception):
    """A bit that is not the reference's, or a bad call that was not refused."""


class Pool:
    """One device buffer that many calls write into, read back at once; the calls' inputs likewise."""

    def __init__(self) -> None:
        self.out = torch.empty(1 << 24, dtype=torch.int32, device="cuda")
        self.workspace = torch.empty(1 << 20, dtype=torch.int32, device="cuda")
        self.clear()

    def clear(self) -> None:
        self.out.fill_(POISON)
        self.workspace.fill_(POISON)
        self.used = 0
        self.pending: list[tuple[Any, ...]] = []

    def _take(self, size: int, offset: int = 0) -> Any:
        begin = self.used + 8 + offset  # a gap that nobody may write
        self.used = -(-(begin + size) // 4) * 4
        return self.out[begin : begin + size]

    def call(
        self,
        ids: NDArray[Any],
        experts: int,
        block: int,
        expert_map: NDArray[Any] | None = None,
        *,
        variant: str | None = None,
        spare: int = 0,
        offset: int = 0,
        inactive: int = -1,
    ) -> None:
        problem = Problem(ids.size, experts, block)
        if self.used + 2 * problem.bound + 64 > self.out.numel() - 1024:
            self.flush()
        sizes = (problem.bound + spare, problem.bound // block + spare, 1)
        outs = sorted_ids, expert_ids, total = [self._take(n, offset) for n in sizes]
        on_device = torch.from_numpy(ids).cuda()
        map_on_device = None if expert_map is None else torch.from_numpy(expert_map).cuda()
        moe_align_block_size(
            on_device,
            experts,
            block,
            sorted_ids,
            expert_ids,
            total,
            map_on_device,
            inactive=inactive,
            workspace=self.workspace,
            variant=variant,
        )
        places = [(o.storage_offset(), o.numel()) for o in outs]
        self.pending.append((ids, experts, block, expert_map, variant, inactive, places))

    def flush(self) -> None:
        """Compare every pending call, whole buffers and the gaps between them."""
        host = self.out[: self.used + 64].cpu().numpy()
        touched = np.zeros(host.size, bool)
        for ids, experts, block, expert_map, variant, inactive, places in self.pending:
            want_ids, want_experts = canonical(ids, experts, block, expert_map)
            got_ids, got_experts, got_total = (host[a : a + n] for a, n in places)
            for a, n in places:
                touched[a : a + n] = True
            expected = np.full(got_ids.size, ids.size, np.int32)
            expected[: want_ids.size] = want_ids
            expected_experts = np.full(got_experts.size, inactive, np.int32)
            expected_experts[: want_experts.size] = want_experts
            same = (
                int(got_total[0]) == want_ids.size
                and np.array_equal(got_ids, expected)
                and np.array_equal(got_experts, expected_experts)
            )
            if not same:
                raise DiffersError(
                    f"{ids.size} routes {ids.dtype}, {experts} experts, block {block}, map "
                    f"{expert_map is not None}, variant {variant}: "
                    f"total {int(got_total[0])}, expected {want_ids.size}; "
                    f"first slot {np.flatnonzero(got_ids != expected)[:3]}, "
                    f"first block {np.flatnonzero(got_experts != expected_experts)[:3]}"
                )
        if not (host[~touched] == POISON).all():
            raise DiffersError("an entry between the buffers was written")
        self.clear()


def draw(rng: np.random.Generator, routes: int, experts: int) -> NDArray[Any]:
    """Expert ids of `routes` routes, from even to all on few experts."""
    kind = rng.integers(0, 5)
    if kind == 0:
        ids = rng.integers(0, experts, routes)
    elif kind == 4:
        ids = np.full(routes, rng.integers(0, experts))
    else:
        ids = rng.permutation(experts)[(experts * rng.random(routes) ** (1 + 2 * kind)).astype(np.int64)]
    return ids.astype(np.int64 if rng.random() < 0.3 else np.int32)


def draw_map(rng: np.random.Generator, experts: int) -> NDArray[Any]:
    """One rank's expert map, in order or shuffled, of some, all or no experts."""
    held = rng.random(experts) < rng.choice([0.0, 0.125, 0.5, 1.0])
    local = np.cumsum(held) - 1
    if rng.random() < 0.5:
        local = rng.permutation(max(int(held.sum()), 1))[np.clip(local, 0, None)]
    return np.where(held, local, -1).astype(np.int32)


def random_routings(pool: Pool) -> dict[str, Any]:
    rng = np.random.default_rng(20250701)
    gpu = prepare(0).gpu
    used: Counter[str] = Counter()
    for n in range(ROUTINGS):
        experts = int(rng.choice(EXPERTS))
        top_k = int(rng.integers(1, 11))
        tokens = int(2 ** rng.uniform(0, 12.5))
        if n % 200 == 0:
            tokens, top_k = int(rng.choice([8192, 16384, 20000])), 8
        if n % 2:
            block = block_size_for(tokens, top_k, experts)
        else:
            block = int(rng.choice(OTHER_BLOCKS if n % 20 == 0 and tokens < 300 else BLOCK_SIZES))
        ids = draw(rng, tokens * top_k, experts)
        if rng.random() < 0.1:
            ids[rng.integers(0, ids.size, 4)] = np.array([-1, experts, -(2**31), 2**31 - 1])
        expert_map = draw_map(rng, experts) if rng.random() < 0.25 else None
        problem = Problem(ids.size, experts, block)
        fitting = [v.name for v in VARIANTS.values() if v.takes(problem, gpu)]
        variant = None if n % 2 else str(rng.choice(fitting))
        used[variant or serving(problem, gpu).name] += 1
        pool.call(ids, experts, block, expert_map, variant=variant, spare=int(rng.integers(0, 9)), offset=n % 4)
        if n % BATCH == BATCH - 1:
            pool.flush()
    pool.flush()
    return {"routings": ROUTINGS, "variants": dict(sorted(used.items()))}


def edges(pool: Pool) -> dict[str, Any]:
    """Every variant: empty, one route, full, one short, whole warps, one expert, none, E not a multiple of 32."""
    rng = np.random.default_rng(7)
    gpu = prepare(0).gpu
    count = 0
    for v in VARIANTS.values():
        full = v.capacity or 3 * v.threads * v.items
        for routes in sorted({0, 1, 31, 32, 33, full // 2 + 1, full - 1, full}):
            for experts in (1, 8, 33, 64, 128, 200, 256, 1024):
                block = int(rng.choice(BLOCK_SIZES))
                if not v.takes(Problem(routes, experts, block), gpu):
                    continue
                for ids in (rng.integers(0, experts, routes), np.full(routes, experts - 1), np.full(routes, -1)):
                    kind = np.int64 if count % 2 else np.int32
                    pool.call(ids.astype(kind), experts, block, variant=v.name, spare=count % 5, inactive=count % 3 - 1)
                    count += 1
                nobody = np.full(experts, -1, np.int32)
                pool.call(np.zeros(routes, np.int32), experts, block, nobody, variant=v.name)
                count += 1
    pool.flush()
    return {"calls": count}


def larger_than_a_cluster(pool: Pool) -> dict[str, Any]:
    rng = np.random.default_rng(9)
    sizes = []
    for routes, experts in ((131_073, 128), (400_000, 256), (1_000_001, 64)):
        pool.call(rng.integers(0, experts, routes).astype(np.int32), experts, 64)
        pool.flush()
        sizes.append(routes)
    return {"routes": sizes}


def refused() -> dict[str, Any]:
    """Each call must raise, and must not have launched: the buffers keep their poison."""
    ids = torch.zeros((21, 8), dtype=torch.int32, device="cuda")
    whole = torch.arange(128, dtype=torch.int32, device="cuda")

    def buffers(sorted_size: int = 1064, blocks: int = 133, device: str = "cuda") -> list[Any]:
        return [torch.full((n,), POISON, dtype=torch.int32, device=device) for n in (sorted_size, blocks, 1)]

    many = torch.zeros(200_000, dtype=torch.int32, device="cuda")
    cases: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "map too short": ((ids, 128, 8, *buffers(), whole[:127]), {}),
        "map too long": ((ids, 127, 8, *buffers(), whole), {}),
        "map int64": ((ids, 128, 8, *buffers(), whole.long()), {}),
        "map on the CPU": ((ids, 128, 8, *buffers(), whole.cpu()), {}),
        "block size 0": ((ids, 128, 0, *buffers()), {}),
        "block size -8": ((ids, 128, -8, *buffers()), {}),
        "1,025 experts": ((ids, 1025, 8, *buffers(9000, 2000)), {}),
        "0 experts": ((ids, 0, 8, *buffers()), {}),
        "ids not contiguous": ((ids.t(), 128, 8, *buffers()), {}),
        "ids on the CPU": ((ids.cpu(), 128, 8, *buffers()), {}),
        "ids int16": ((ids.short(), 128, 8, *buffers()), {}),
        "sorted_token_ids small": ((ids, 128, 8, *buffers(1063)), {}),
        "expert_ids small": ((ids, 128, 8, *buffers(1064, 132)), {}),
        "outputs on the CPU": ((ids, 128, 8, *buffers(device="cpu")), {}),
        "no workspace": ((many, 128, 64, *buffers(300_000, 5000)), {}),
        "workspace small": ((many, 128, 64, *buffers(300_000, 5000)), {"workspace": torch.zeros_like(whole)}),
        "no such variant": ((ids, 128, 8, *buffers()), {"variant": "fast"}),
        "variant too small": ((many, 128, 64, *buffers(300_000, 5000)), {"variant": "staged_512x1b"}),
    }
    said = {}
    for name, (arguments, keywords) in cases.items():
        try:
            moe_align_block_size(*arguments, **keywords)
        except InputError as e:
            said[name] = str(e)
        else:
            raise DiffersError(f"{name} was not refused")
        torch.cuda.synchronize()
        for out in arguments[3:6]:
            if not bool((out == POISON).all()):
                raise DiffersError(f"{name} was refused after a launch")
    return said


def repeated() -> dict[str, Any]:
    """10,000 calls each, by graph replay, on poisoned buffers: every one must give the first one's bytes."""
    rng = np.random.default_rng(3)
    found = {}
    for tokens in (1, 21, 64, 256, 1024, 4096, 16384, 20000):
        ids = np.argsort(rng.random((tokens, 128)), axis=1)[:, :8].astype(np.int32)
        block = block_size_for(tokens, 8, 128)
        bound = Problem(ids.size, 128, block).bound
        on_device = torch.from_numpy(ids).cuda()
        space = torch.empty(max(4, workspace_size(ids.size, 128, block, 0)), dtype=torch.int32, device="cuda")
        whole = torch.empty(bound + bound // block + 1, dtype=torch.int32, device="cuda")
        outs = (whole[:bound], whole[bound : bound + bound // block], whole[-1:])
        bad = torch.zeros((), dtype=torch.int64, device="cuda")

        moe_align_block_size(on_device, 128, block, outs[0], outs[1], outs[2], workspace=space)
        first = whole.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                whole.fill_(POISON)
                moe_align_block_size(on_device, 128, block, outs[0], outs[1], outs[2], workspace=space)
                bad += (whole != first).any()
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
        host = first.cpu().numpy()
        plan = AlignedPlan(host[:bound], host[bound:-1], int(host[-1]), block, ids.size)
        want = align(ids, 128, block)
        if int(bad) or plan.fingerprint() != want.fingerprint():
            raise DiffersError(f"{int(bad)} of 10,000 repeated calls at M={tokens}")
        found[str(tokens)] = {"calls": 10_000, "different": int(bad), "fingerprint": plan.fingerprint()}
    return found


CHECKS: dict[str, Callable[[Pool], dict[str, Any]]] = {
    "edges": edges,
    "random": random_routings,
    "larger": larger_than_a_cluster,
    "refused": lambda pool: refused(),
    "repeated": lambda pool: repeated(),
}


def check(progress: Callable[[str], None]) -> dict[str, Any]:
    """Run all checks on CUDA device 0 and tell what they covered; `differs` stays empty if every bit is right."""
    began = time.perf_counter()
    kernels = prepare(0)
    told: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "cubin_sha256": kernels.cubin_sha256, "differs": ""}
    pool = Pool()
    for name, run in CHECKS.items():
        try:
            told[name] = run(pool)
        except DiffersError as e:
            told["differs"] = f"{name}: {e}"
            break
        progress(f"{name}: equal, {time.perf_counter() - began:.1f} s")
    return told
