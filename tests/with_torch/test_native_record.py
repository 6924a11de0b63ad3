# SPDX-License-Identifier: Apache-2.0
"""The records of native alignment and of the operator without a GPU: torch on the CPU, the twin behind the schemas."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_lane_cuda import SMS, extension, operators, small_layer  # noqa: F401

from routeblock.cuda.device import Device
from routeblock.evidence.digest import sha256_array
from routeblock.evidence.tensors import load_tensors
from routeblock.moe.routing import AlignedPlan
from routeblock.route_block.gpu import operator_cases as cases
from routeblock.route_block.gpu import operator_record
from routeblock.route_block.native import process
from routeblock.route_block.runs.cuda import CudaLane
from routeblock.twin.gemm import moe_gemm

PROTOCOL = Path(__file__).parents[2] / "fixtures" / "protocols" / "native.json"


@pytest.fixture
def few_calls(tmp_path: Path) -> Path:
    plan = json.loads(PROTOCOL.read_bytes())
    plan["history"]["calls"] = plan["repetition"]["calls"] = 3
    plan["history"]["launch"] = {"thread_k": 64, "thread_n": 128, "blocks_per_sm": 3}
    eager = [c for c in plan["repetition"]["conditions"] if c["mode"] == "default_stream" and c.get("routes", 0) <= 256]
    plan["repetition"]["conditions"] = eager
    path = tmp_path / "native.json"
    path.write_text(json.dumps(plan))
    return path


@pytest.mark.parametrize("what", ["H0", "H1"])
def test_a_process_notes_every_call_and_each_plan_once(
    extension: Path,  # noqa: F811
    few_calls: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    layer = small_layer(np.float16, True)
    monkeypatch.setattr(process, "load_fixture", lambda folder: layer)
    monkeypatch.setattr(process, "to_device", lambda x, device: torch.from_numpy(x))
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    process.serve(CudaLane(extension, probed=False), tmp_path, few_calls, what, tmp_path)
    told = json.loads((tmp_path / process.RESULT).read_bytes())
    assert told["prelude"] is (what == "H1") and told["began_ns"] < told["ended_ns"]
    assert told["plans"]["calls"] == told["finals"]["calls"] == [0, 0, 0]
    rows = load_tensors(tmp_path / process.PLANS)["sorted_token_ids"]
    assert rows.shape[0] == len(told["plans"]["outcomes"]) == 1


def test_conditions_are_counted_each_by_itself(
    extension: Path,  # noqa: F811
    few_calls: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "load_fixture", lambda folder: small_layer(np.float16, True))
    monkeypatch.setattr(process, "to_device", lambda x, device: torch.from_numpy(x))
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    process.serve(CudaLane(extension, probed=False), tmp_path, few_calls, process.REPETITION, tmp_path)
    told = json.loads((tmp_path / process.RESULT).read_bytes())["conditions"]
    assert len(told) == 5 and all(c["plans"]["calls"] == c["orders"]["calls"] == [0, 0, 0] for c in told)


def test_without_a_turn_nothing_is_done(
    extension: Path,  # noqa: F811
    few_calls: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "load_fixture", lambda folder: small_layer(np.float16, True))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    process.serve(CudaLane(extension, probed=False), tmp_path, few_calls, "H0", tmp_path)
    assert not (tmp_path / process.RESULT).exists()


@pytest.fixture
def rig(extension: Path, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    monkeypatch.setenv(operator_record.EXTENSION_VARIABLE, str(extension))
    monkeypatch.setattr(operator_record, "DEVICE", "cpu")
    monkeypatch.setattr(operator_record, "open_device", lambda memory: Device("CPU", "none", (9, 0), SMS, 1 << 40))
    return operator_record._Rig()


def test_one_group_is_recorded_as_the_twin_computes_it(rig: Any) -> None:
    case = next(c for c in cases.one_group() if c.dtype == "float16" and c.zero_points)
    found = operator_record._outputs(rig, case)
    drawn = cases.draw(case)
    for order in cases.ORDERS:
        ours = moe_gemm(
            drawn.x, drawn.q, drawn.zeros, drawn.scales, drawn.plan(case, order), top_k=case.top_k,
            architecture="hopper", thread_k=case.thread_k, thread_n=case.thread_n, grid=case.launch(SMS).grid,
            group_size=case.group_size, topk_weights=drawn.topk_weights if case.multiply else None,
        )  # fmt: skip
        assert found[order] == sha256_array(ours)


def test_a_missing_expert_reads_what_lies_before_the_weights(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that reads there, as the recorded operator does: rows come out as those of the expert before."""
    seen: list[AlignedPlan] = []
    monkeypatch.setattr(rig.operators, "moe_gemm", lambda *a, **k: seen.append(a[2]) or torch.zeros((48, 512)).half())
    found = operator_record._missing(rig, operator_record.BEHIND)
    assert found["routes"] == sorted(cases.draw(cases.MISSING).plan(cases.MISSING, "stable").members(0) + [
        r for b in (1, 2) for r in cases.draw(cases.MISSING).plan(cases.MISSING, "stable").members(b)
    ])  # fmt: skip
    assert (seen[0].expert_rows[:3] == -1).all() and found["outcome"] == "returned"
