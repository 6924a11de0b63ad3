# SPDX-License-Identifier: Apache-2.0
"""The lane without a GPU: torch on the CPU, and the twin behind the operators' own schemas. Not observed on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from twin_operators import TwinOperators, marlin

from routeblock.cuda import operators as vllm_ops
from routeblock.cuda.device import Device
from routeblock.cuda.grid_probe import KernelLaunch
from routeblock.errors import InputError
from routeblock.evidence.record import READ_BACK
from routeblock.moe.awq import pack_awq
from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan, align
from routeblock.route_block.fixtures.fixture import PackedExpert
from routeblock.route_block.runs import cuda as lane_cuda
from routeblock.route_block.runs.cuda import CudaLane
from routeblock.route_block.runs.lane import Outcome, Request
from routeblock.twin.gemm import moe_gemm
from routeblock.twin.layer import combine, silu_and_mul

SMS, EXPERTS, TOKENS, TOP_K, HIDDEN, INTERMEDIATE, GROUP, BLOCK = 82, 16, 19, 2, 256, 128, 64, 8
LAUNCH = Launch(64, 128, 246)


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """The operators, registered with the schemas that vLLM 0.24 registers."""
    twin = TwinOperators(SMS)
    twin.register()
    yield
    twin.unregister()


class SmallLayer(SimpleNamespace):
    def shape(self, gemm: str) -> tuple[int, int]:
        return (2 * INTERMEDIATE, HIDDEN) if gemm == "w13" else (HIDDEN, INTERMEDIATE)

    def packed(self, gemm: str) -> Iterator[list[PackedExpert]]:
        for q, z, s in self.weights[gemm]:
            cuts = [slice(0, INTERMEDIATE), slice(INTERMEDIATE, None)] if gemm == "w13" else [slice(None)]
            yield [
                PackedExpert(pack_awq(q[:, cut]), None if z is None else pack_awq(z[:, cut]), s[:, cut]) for cut in cuts
            ]

    def stacked(self, gemm: str) -> tuple[Any, Any, Any]:
        q, z, s = zip(*self.weights[gemm], strict=True)
        return np.stack(q), None if z[0] is None else np.stack(z), np.stack(s)


def small_layer(dtype: Any, zero_points: bool) -> SmallLayer:
    rng = np.random.default_rng(7)
    # Few experts in use, so that one has two blocks and the compact rows differ from the ids.
    ids = np.stack([rng.choice([2, 3, 9, 14], TOP_K, replace=False) for _ in range(TOKENS)]).astype(np.int32)
    experts = sorted(set(ids.reshape(-1).tolist()))
    rows = np.full(EXPERTS, -1, np.int32)
    rows[experts] = np.arange(len(experts), dtype=np.int32)

    def expert(k: int, n: int) -> tuple[Any, Any, Any]:
        z = rng.integers(0, 16, (k // GROUP, n), np.uint8) if zero_points else None
        return rng.integers(0, 16, (k, n), np.uint8), z, (rng.random((k // GROUP, n)) * 0.01).astype(dtype)

    return SmallLayer(
        spec={"num_experts": EXPERTS, "block_size": BLOCK, "group_size": GROUP},
        experts=experts,
        expert_rows=rows,
        hidden=rng.standard_normal((TOKENS, HIDDEN)).astype(dtype),
        topk_ids=ids,
        topk_weights=rng.random((TOKENS, TOP_K)).astype(np.float32),
        weights={
            "w13": [expert(HIDDEN, 2 * INTERMEDIATE) for _ in experts],
            "w2": [expert(INTERMEDIATE, HIDDEN) for _ in experts],
        },
    )


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the extension's place, and a machine whose GPU is the CPU."""
    found = tmp_path / "_moe_C_stable_libtorch.abi3.so"
    found.write_bytes(b"an extension")
    monkeypatch.setattr(vllm_ops, "_load", lambda path: None)
    monkeypatch.setattr(lane_cuda, "DEVICE", "cpu")
    monkeypatch.setattr(lane_cuda, "require_torch", lambda: None)
    monkeypatch.setattr(lane_cuda, "open_device", lambda memory: Device("CPU", "none", (9, 0), SMS, 1 << 40))
    monkeypatch.setattr(lane_cuda, "state", lambda uuid: {"driver": "none"})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def run(
    lane: CudaLane, layer: SmallLayer, plan: AlignedPlan | None, history: str = "H0", launch: Launch = LAUNCH
) -> Outcome:
    return lane.run(layer, Request(plan, {"w13": launch, "w2": launch}, history, 1))  # type: ignore[arg-type]


def same_plan(a: AlignedPlan, b: AlignedPlan) -> bool:
    return all(
        np.array_equal(getattr(a, part), getattr(b, part))
        for part in ("sorted_token_ids", "expert_ids", "num_tokens_post_padded", "block_size", "num_routes")
    )


def bits(x: Any) -> Any:
    return np.ascontiguousarray(x).view(np.uint16)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("zero_points", [True, False], ids=["u4", "u4b8"])
@pytest.mark.parametrize("fused", [True, False], ids=["silu_and_mul", "torch"])
def test_the_lane_hands_the_operators_what_the_twin_computes_from(
    extension: Path, dtype: Any, zero_points: bool, fused: bool
) -> None:
    layer = small_layer(dtype, zero_points)
    plan = align(layer.topk_ids, EXPERTS, BLOCK)
    compact = align(layer.topk_ids, EXPERTS, BLOCK, expert_map=layer.expert_rows)
    outcome = run(CudaLane(extension, extension if fused else None, probed=False), layer, plan)
    got = outcome.surfaces
    common = {"architecture": "hopper", "thread_k": 64, "thread_n": 128, "grid": 246, "group_size": GROUP}
    w13 = moe_gemm(layer.hidden, *layer.stacked("w13"), compact, top_k=TOP_K, **common)
    assert (bits(got["w13"]) == bits(w13)).all()
    if fused:
        assert (bits(got["activation"]) == bits(silu_and_mul(w13))).all()
    w2 = moe_gemm(got["activation"], *layer.stacked("w2"), compact, top_k=1, topk_weights=layer.topk_weights, **common)
    assert (bits(got["w2"]) == bits(w2)).all()
    assert (bits(got["final"]) == bits(combine(w2.reshape(TOKENS, TOP_K, -1)))).all()
    assert [x.dtype for x in got.values()] == [np.dtype(dtype)] * 4
    assert same_plan(outcome.plan, plan) and outcome.plan is not plan
    assert outcome.consumption == READ_BACK and outcome.slices is None
    assert outcome.computer.environment["form_activation"].startswith("_C::silu_and_mul" if fused else "torch")


def test_native_records_what_the_alignment_did(extension: Path) -> None:
    layer = small_layer(np.float16, True)
    backwards = align(layer.topk_ids, EXPERTS, BLOCK, np.arange(TOKENS * TOP_K)[::-1])
    lane = CudaLane(extension, probed=False)
    native = run(lane, layer, None)
    assert (native.plan.sorted_token_ids == backwards.sorted_token_ids).all()
    assert native.plan.fingerprint() != align(layer.topk_ids, EXPERTS, BLOCK).fingerprint()
    injected = run(lane, layer, backwards)
    assert all((bits(native.surfaces[n]) == bits(x)).all() for n, x in injected.surfaces.items())


def test_the_prelude_happens_in_h1_alone_before_any_weight(extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = small_layer(np.float16, True)
    plan = align(layer.topk_ids, EXPERTS, BLOCK)
    events: list[str] = []
    real_prelude, real_to = lane_cuda._prelude, vllm_ops.DeviceWeights.to
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))

    def prelude(fixture: Any) -> list[Any]:
        kept = real_prelude(fixture)
        events.append(f"prelude of {[tuple(x.shape) for x in kept]}")
        assert all(
            bool((x.numpy() == getattr(layer, n)).all()) for x, n in zip(kept, lane_cuda.PRELUDE_INPUTS, strict=True)
        )
        return kept

    def to(weights: vllm_ops.DeviceWeights, device: str) -> vllm_ops.DeviceWeights:
        events.append("weights")
        return real_to(weights, device)

    monkeypatch.setattr(lane_cuda, "_prelude", prelude)
    monkeypatch.setattr(vllm_ops.DeviceWeights, "to", to)
    lane = CudaLane(extension, probed=False)
    assert not run(lane, layer, plan, "H0").prelude
    assert events == ["weights", "weights", "synchronize"]
    events.clear()
    assert run(lane, layer, plan, "H1").prelude
    shapes = [(TOKENS, HIDDEN), (TOKENS, TOP_K), (TOKENS, TOP_K)]
    assert events == ["synchronize", f"prelude of {shapes}", "weights", "weights", "synchronize"]


def test_without_the_probe_only_multiples_of_the_sm_count_run(extension: Path) -> None:
    layer = small_layer(np.float16, True)
    plan = align(layer.topk_ids, EXPERTS, BLOCK)
    lane = CudaLane(extension, probed=False)
    outcome = run(lane, layer, plan, launch=Launch(64, 128, 2 * SMS))
    assert outcome.grids == {"w13": 2 * SMS, "w2": 2 * SMS}
    assert "not recorded" in outcome.computer.environment["grid_marker"]
    with pytest.raises(InputError, match=r"only multiples of 82 SMs.*build-probe"):
        run(lane, layer, plan, launch=Launch(64, 128, 80))


class FakeProbe:
    """Records the launches that it is told to."""

    answers = 2

    def __init__(self, path: Path, launches: list[KernelLaunch]) -> None:
        self.path = path
        self.launches = launches
        self.answered: list[int | None] = []

    def answer(self, sms: int | None) -> None:
        self.answered.append(sms)

    def take(self) -> list[KernelLaunch]:
        return self.launches if self.answered and len(self.answered) % 2 == 0 else []


def test_the_grid_marker_is_the_recorded_grid(extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = small_layer(np.float16, True)
    plan = align(layer.topk_ids, EXPERTS, BLOCK)
    other = KernelLaunch((3, 1, 1), (256, 1, 1), 0, "_ZN4vllm5otherEv")
    probe = FakeProbe(extension, [other, marlin(64, 128, 246)])
    monkeypatch.setattr(lane_cuda, "GridProbe", lambda path: probe)
    outcome = run(CudaLane(extension), layer, plan)
    assert outcome.grids == {"w13": 246, "w2": 246}
    assert outcome.computer.environment["grid_marker"] == "recorded by the probe"
    assert probe.answered == [None] * 4  # 246 is 3 x 82: the truth is answered


@pytest.mark.parametrize(
    "launches",
    [[], [marlin(64, 128, 245)], [marlin(128, 64, 246)], [marlin(64, 128, 246)] * 2],
    ids=["none", "another grid", "other thread sizes", "two"],
)
def test_another_launch_than_asked_for_fails_the_run(
    extension: Path, monkeypatch: pytest.MonkeyPatch, launches: list[KernelLaunch]
) -> None:
    layer = small_layer(np.float16, True)
    monkeypatch.setattr(lane_cuda, "GridProbe", lambda path: FakeProbe(extension, launches))
    with pytest.raises(InputError, match=r"w13: the probe recorded .*on 246 blocks was asked for"):
        run(CudaLane(extension), layer, align(layer.topk_ids, EXPERTS, BLOCK))


def test_another_sm_count_is_answered_during_the_gemm_and_taken_back(
    extension: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = small_layer(np.float16, True)
    probe = FakeProbe(extension, [marlin(64, 128, 80)])
    monkeypatch.setattr(lane_cuda, "GridProbe", lambda path: probe)
    run(CudaLane(extension), layer, align(layer.topk_ids, EXPERTS, BLOCK), launch=Launch(64, 128, 80))
    assert probe.answered == [80, None, 80, None]


def test_a_row_that_the_kernel_did_not_write_fails_the_run(extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = small_layer(np.float16, True)
    real = vllm_ops.VllmOperators.moe_gemm

    def forget(self: Any, *arguments: Any, **named: Any) -> Any:
        out = real(self, *arguments, **named)
        if named["top_k"] == 1:
            out[5] = float("nan")
        return out

    monkeypatch.setattr(vllm_ops.VllmOperators, "moe_gemm", forget)
    with pytest.raises(InputError, match="w2: route 5 was not written"):
        run(CudaLane(extension, probed=False), layer, align(layer.topk_ids, EXPERTS, BLOCK))


def test_an_expert_that_is_not_loaded_is_refused(extension: Path) -> None:
    layer = small_layer(np.float16, True)
    plan = align(np.where(layer.topk_ids == layer.experts[0], 0, layer.topk_ids), EXPERTS, BLOCK)
    with pytest.raises(InputError, match=r"the plan uses expert 0.*weights of 4 experts are loaded"):
        run(CudaLane(extension, probed=False), layer, plan)


def test_a_probe_that_is_named_and_missing_is_refused(extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lane_cuda.EXTENSION, str(extension))
    monkeypatch.setenv(lane_cuda.PROBE, str(extension.with_name("no_probe.so")))
    with pytest.raises(InputError, match=r"no such file.*build-probe"):
        lane_cuda.open_cuda_lane()


def test_the_plan_of_a_run_is_what_lies_in_the_devices_buffers_after_it(
    extension: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane that puts another plan on the device than it was asked to reports the other one."""
    layer = small_layer(np.float16, True)
    asked = align(layer.topk_ids, EXPERTS, BLOCK)
    other = align(layer.topk_ids, EXPERTS, BLOCK, np.arange(TOKENS * TOP_K)[::-1])
    real = vllm_ops.VllmOperators.device_plan
    monkeypatch.setattr(vllm_ops.VllmOperators, "device_plan", lambda self, plan, rows: real(self, other, rows))
    outcome = run(CudaLane(extension, probed=False), layer, asked)
    assert same_plan(outcome.plan, other) and not same_plan(outcome.plan, asked)


def test_buffers_that_a_kernel_wrote_into_are_reported_as_they_are(
    extension: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = small_layer(np.float16, True)
    plan = align(layer.topk_ids, EXPERTS, BLOCK)
    real = vllm_ops.VllmOperators.combine

    def write(self: Any, routed: Any, tokens: int) -> Any:
        session_plan[0].sorted_token_ids[0] += 1
        return real(self, routed, tokens)

    session_plan: list[vllm_ops.DevicePlan] = []
    placing = vllm_ops.VllmOperators.device_plan

    def place(self: Any, *arguments: Any) -> vllm_ops.DevicePlan:
        session_plan.append(placing(self, *arguments))
        return session_plan[-1]

    monkeypatch.setattr(vllm_ops.VllmOperators, "device_plan", place)
    monkeypatch.setattr(vllm_ops.VllmOperators, "combine", write)
    outcome = run(CudaLane(extension, probed=False), layer, plan)
    assert outcome.plan.sorted_token_ids[0] == plan.sorted_token_ids[0] + 1
    monkeypatch.setattr(
        vllm_ops.VllmOperators,
        "combine",
        lambda self, routed, tokens: session_plan[-1].num_tokens_post_padded.fill_(3) and real(self, routed, tokens),
    )
    with pytest.raises(InputError, match=r"the plan's buffers hold 3 rows.*whole blocks of 8"):
        run(CudaLane(extension, probed=False), layer, plan)


def test_a_prelude_whose_bytes_are_not_the_fixtures_is_not_reported(
    extension: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = small_layer(np.float16, True)
    real = lane_cuda._prelude

    def spoiled(fixture: Any) -> list[Any]:
        kept = real(fixture)
        kept[0][0, 0] += 1
        return kept

    monkeypatch.setattr(lane_cuda, "_prelude", spoiled)
    assert not run(CudaLane(extension, probed=False), layer, None, "H1").prelude


def test_what_is_going_to_compute_is_known_before_a_run_and_is_what_the_run_reports(extension: Path) -> None:
    lane = CudaLane(extension, probed=False)
    expected = lane.computer()
    layer = small_layer(np.float16, True)
    assert run(lane, layer, align(layer.topk_ids, EXPERTS, BLOCK)).computer == expected
