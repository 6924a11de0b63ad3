# SPDX-License-Identifier: Apache-2.0
"""The alignments on this machine's GPU: each aligns routing i of a point, alone or with the layer around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from routeblock.alignment_cost.protocol import Arm, LayerPlan, Point
from routeblock.cuda.align import moe_align_block_size, prepare, workspace_size
from routeblock.cuda.align_variants import Problem, serving
from routeblock.cuda.operators import (
    MAX_BLOCKS_PER_SM,
    DevicePlan,
    DeviceWeights,
    VllmOperators,
    padded_length,
    to_host,
)
from routeblock.moe.routing import AlignedPlan

DEVICE = "cuda"
Call = Callable[[int], None]


@dataclass(frozen=True)
class Buffers:
    """What an alignment writes: as long as vLLM makes them."""

    sorted_token_ids: Any
    expert_ids: Any
    num_tokens_post_padded: Any

    def host(self, block_size: int, routes: int) -> AlignedPlan:
        """The plan in the buffers, as far as it is used."""
        used = int(self.num_tokens_post_padded.cpu()[0])
        ids, experts = to_host(self.sorted_token_ids), to_host(self.expert_ids)
        return AlignedPlan(ids[:used], experts[: used // block_size], used, block_size, routes)


def buffers(point: Point) -> Buffers:
    length = padded_length(point.tokens * point.top_k, point.experts, point.block_size)
    made = [
        torch.full((n,), -77, dtype=torch.int32, device=DEVICE) for n in (length, -(-length // point.block_size), 1)
    ]
    return Buffers(*made)


def variant(point: Point) -> str:
    """The canonical variant that serves a point."""
    return serving(Problem(point.tokens * point.top_k, point.experts, point.block_size), prepare(0).gpu).name


def alignments(point: Point, routings: list[NDArray[Any]], out: Buffers) -> dict[Arm, Call]:
    """Each arm as a call that aligns routing i into `out`. All can be captured in a graph."""
    ids = [torch.from_numpy(r).to(DEVICE) for r in routings]
    experts, block, routes = point.experts, point.block_size, point.tokens * point.top_k
    native = torch.ops._moe_C.moe_align_block_size
    need = workspace_size(routes, experts, block, 0)
    space = torch.empty(need, dtype=torch.int32, device=DEVICE) if need else None
    targets = (out.sorted_token_ids, out.expert_ids, out.num_tokens_post_padded)
    edges = torch.arange(experts + 1, dtype=torch.int32, device=DEVICE)
    place = torch.arange(routes, dtype=torch.int64, device=DEVICE)
    firsts = torch.arange(out.expert_ids.numel(), dtype=torch.int64, device=DEVICE) * block

    def sort(i: int) -> None:
        keys, order = torch.sort(ids[i].view(-1), stable=True)
        starts = torch.searchsorted(keys, edges)
        padded = (starts[1:] - starts[:-1] + (block - 1)) // block * block
        ends = torch.cumsum(padded, 0)
        shift = ends - padded - starts[:-1]  # from a route's place among all to its slot
        out.sorted_token_ids.fill_(routes)
        out.sorted_token_ids.scatter_(0, place + shift[keys], order.int())
        owner = torch.searchsorted(ends, firsts, right=True)
        out.expert_ids.copy_(torch.where(owner < experts, owner, -1))
        out.num_tokens_post_padded.copy_(ends[-1:])

    return {
        Arm.NATIVE: lambda i: native(ids[i], experts, block, *targets, None),
        Arm.CANONICAL: lambda i: moe_align_block_size(
            ids[i], experts, block, targets[0], targets[1], targets[2], workspace=space
        ),
        Arm.SORT: sort,
    }


class Layer:
    """A packed layer of the published shape with random weights, its buffers, and the stages behind the alignment."""

    def __init__(self, operators: VllmOperators, plan: LayerPlan, experts: int, seed: int) -> None:
        self.operators, self.plan = operators, plan
        self._random = torch.Generator(DEVICE).manual_seed(seed)
        self._w13 = self._weights(experts, 2 * plan.intermediate, plan.hidden)
        self._w2 = self._weights(experts, plan.hidden, plan.intermediate)
        self._sms = torch.cuda.get_device_properties(0).multi_processor_count
        self._locks = torch.zeros(self._sms * MAX_BLOCKS_PER_SM, dtype=torch.int32, device=DEVICE)

    def _weights(self, experts: int, n: int, k: int) -> DeviceWeights:
        groups = k // self.plan.group_size

        def integers(*shape: int) -> Any:
            size = (*shape[:-1], 4 * shape[-1])
            return torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE, generator=self._random).view(
                torch.int32
            )

        # |weight| <= 15 * 0.004: sums over K stay far below the largest float16.
        scales = torch.rand((experts, groups, n), device=DEVICE, generator=self._random) * 0.003 + 0.001
        return DeviceWeights(integers(experts, k // 16, 2 * n), integers(experts, groups, n // 8), scales.half(), n, k)

    def after(self, point: Point, out: Buffers) -> tuple[Callable[[], None], Any]:
        """The stages behind the alignment of a point as a call, and where they end: float16 [M, hidden]."""
        tokens, k, plan = point.tokens, point.top_k, self.plan
        hidden = torch.rand((tokens, plan.hidden), device=DEVICE, generator=self._random).sub_(0.5).half()
        weights = torch.softmax(torch.rand((tokens, k), device=DEVICE, generator=self._random), dim=1)
        placed = DevicePlan(out.sorted_token_ids, out.expert_ids, out.num_tokens_post_padded, point.block_size)

        def rows(width: int) -> Any:
            return torch.empty((tokens * k, width), dtype=torch.float16, device=DEVICE)

        gate_up, act, routed = rows(2 * plan.intermediate), rows(plan.intermediate), rows(plan.hidden)
        gate, up = gate_up[:, : plan.intermediate], gate_up[:, plan.intermediate :]
        final = torch.empty((tokens, plan.hidden), dtype=torch.float16, device=DEVICE)

        def gemm(a: Any, packed: DeviceWeights, top_k: int, to: Any) -> None:
            self.operators.moe_gemm(
                a,
                packed,
                placed,
                weights,
                top_k=top_k,
                multiply_topk_weights=top_k == 1,
                lock_sms=self._sms,
                out=to,
                locks=self._locks,
            )

        def run() -> None:
            gemm(hidden, self._w13, k, gate_up)
            torch.mul(torch.nn.functional.silu(gate), up, out=act)
            gemm(act, self._w2, 1, routed)
            torch.sum(routed.view(tokens, k, plan.hidden), dim=1, out=final)

        return run, final
