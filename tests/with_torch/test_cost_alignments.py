# SPDX-License-Identifier: Apache-2.0
"""The alignments and their check on a CPU, with the reference behind the names of the GPU's operators. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small import COMMITTED

from routeblock.alignment_cost import alignments, gpu_session
from routeblock.alignment_cost.protocol import Arm, Campaign, Point, load, points
from routeblock.alignment_cost.study import stage
from routeblock.moe.routing import AlignedPlan, align

PROTOCOL = load(COMMITTED)
Edit = Callable[[AlignedPlan], AlignedPlan]


def write(plan: AlignedPlan, sorted_ids: Any, expert_ids: Any, total: Any) -> None:
    sorted_ids.fill_(plan.num_routes)
    sorted_ids[: plan.num_tokens_post_padded] = torch.from_numpy(plan.sorted_token_ids)
    expert_ids.fill_(-1)
    expert_ids[: plan.num_blocks] = torch.from_numpy(plan.expert_ids)
    total[0] = plan.num_tokens_post_padded


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put the reference in place of both kernels; the native one in the order of arrival, last route first."""

    def stand_in(native: Edit = lambda p: p, canonical: Edit = lambda p: p) -> None:
        def native_op(ids: Any, experts: int, block: int, a: Any, b: Any, c: Any, expert_map: None) -> None:
            routing = ids.numpy()
            write(native(align(routing, experts, block, np.arange(routing.size)[::-1])), a, b, c)

        def ours(ids: Any, experts: int, block: int, a: Any, b: Any, c: Any, *, workspace: None) -> None:
            write(canonical(align(ids.numpy(), experts, block)), a, b, c)

        monkeypatch.setattr(torch.ops, "_moe_C", SimpleNamespace(moe_align_block_size=native_op), raising=False)
        monkeypatch.setattr(alignments, "moe_align_block_size", ours)
        monkeypatch.setattr(alignments, "workspace_size", lambda *_: 0)
        monkeypatch.setattr(alignments, "variant", lambda _: "staged_512x1b")
        monkeypatch.setattr(alignments, "DEVICE", "cpu")

    return stand_in


def session(point: Point, layer: Any = None) -> gpu_session.GpuSession:
    return gpu_session.GpuSession(stage(point, PROTOCOL, None), None, layer, PROTOCOL)  # type: ignore[arg-type]


SMALL = [p for p in points(PROTOCOL, Campaign.OPERATOR) if p.tokens in (1, 21, 64, 512)]


@pytest.mark.parametrize("point", SMALL, ids=lambda p: f"{p.experts}-{p.top_k}-{p.tokens}")
def test_the_sort_arm_is_a_whole_canonical_alignment(on_cpu: Callable[..., None], point: Point) -> None:
    on_cpu()
    found = session(point)
    checked = found.check()
    assert not checked.wrong and len(checked.facts["canonical_sha256"]) == 4
    ids, experts = found._out.sorted_token_ids.numpy(), found._out.expert_ids.numpy()
    used = int(found._out.num_tokens_post_padded[0])
    assert (ids[used:] == point.tokens * point.top_k).all() and (experts[used // point.block_size :] == -1).all()


def lose_a_route(plan: AlignedPlan) -> AlignedPlan:
    changed = plan.sorted_token_ids.copy()
    changed[0] = changed[plan.block_size]
    return AlignedPlan(changed, plan.expert_ids, plan.num_tokens_post_padded, plan.block_size, plan.num_routes)


def last_first(plan: AlignedPlan) -> AlignedPlan:
    """A legal plan in another order: two routes of the first block change places."""
    changed = plan.sorted_token_ids.copy()
    first = plan.members(0)
    changed[0], changed[len(first) - 1] = changed[len(first) - 1], changed[0]
    return AlignedPlan(changed, plan.expert_ids, plan.num_tokens_post_padded, plan.block_size, plan.num_routes)


def test_a_wrong_plan_is_found_and_another_order_is_native_s_right(on_cpu: Callable[..., None]) -> None:
    point = next(p for p in SMALL if p.tokens == 512)
    on_cpu(native=lose_a_route)
    assert session(point).check().wrong == {Arm.NATIVE}
    on_cpu(native=last_first)
    assert not session(point).check().wrong
    on_cpu(canonical=last_first)
    assert session(point).check().wrong == {Arm.CANONICAL}


class Gemms:
    """Stands for the packed GEMM: every output row is the mean of its input row, scaled by the route's weight."""

    def moe_gemm(self, a: Any, weights: Any, plan: Any, topk_weights: Any, **given: Any) -> None:
        rows = a.float().mean(dim=1, keepdim=True).repeat_interleave(given["top_k"], 0)
        if given["multiply_topk_weights"]:
            rows = rows * topk_weights.reshape(-1, 1)
        assert given["out"].shape == (rows.shape[0], weights.n) and a.shape[1] == weights.k
        assert weights.q.shape[1:] == (weights.k // 16, 2 * weights.n)
        assert weights.zeros.shape[1:] == (weights.k // 128, weights.n // 8)
        assert weights.scales.shape[1:] == (weights.k // 128, weights.n)
        given["out"].copy_(rows.expand(-1, weights.n))


def test_the_layer_runs_its_stages_into_its_own_buffers(
    on_cpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu()
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4), raising=False
    )
    layer = alignments.Layer(Gemms(), PROTOCOL.layer, 2, 1)  # type: ignore[arg-type]
    point = next(p for p in points(PROTOCOL, Campaign.LAYER) if p.tokens == 4)
    checked = session(point, layer).check()
    assert not checked.wrong
    assert len(set(checked.facts["final_sha256"].values())) == 1  # these rows do not depend on the plan
