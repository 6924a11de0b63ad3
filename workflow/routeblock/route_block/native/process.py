# SPDX-License-Identifier: Apache-2.0
"""One process of the recording: it prepares, says so, waits for its turn, and writes what the alignment gave.

The process that records hands out the turns one at a time, so that no two are on the GPU together and the order is
the protocol's. Times of begin and end are those of this process, from before it touches the GPU to after its last call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.cuda.operators import read_alignment, to_device
from routeblock.evidence.digest import code_digest, sha256_array
from routeblock.evidence.files import write_json
from routeblock.evidence.tensors import save_tensors
from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan
from routeblock.route_block.fixtures.fixture import LayerFixture, load_fixture
from routeblock.route_block.native.protocol import Condition, Protocol, load
from routeblock.route_block.operating_point import GEMMS
from routeblock.route_block.runs.cuda import CudaLane, Session

READY = "ready"
RESULT, PLANS = "result.json", "plans.safetensors"
REPETITION = "repetition"


class Seen:
    """Outcomes by number, in the order in which they first came."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self.calls: list[int] = []

    def add(self, outcome: str) -> bool:
        """Note one call; whether its outcome is a new one."""
        new = outcome not in self.number
        self.calls.append(self.number.setdefault(outcome, len(self.number)))
        return new

    def told(self) -> dict[str, Any]:
        """For JSON: the outcomes, and for each call the number of its own."""
        return {"outcomes": list(self.number), "calls": self.calls}


def serve(lane: CudaLane, fixture_folder: Path, protocol_path: Path, what: str, out: Path) -> None:
    """Prepare, print `ready`, wait for a line on stdin, then do `what` (a history, or `repetition`) and write `out`."""
    fixture, protocol = load_fixture(fixture_folder), load(protocol_path)
    lane.prepare(fixture)
    print(READY, flush=True)
    if not sys.stdin.readline():
        return  # the recording process is gone
    began = time.time_ns()
    session = lane.open(fixture, "H0" if what == REPETITION else what)
    work: Callable[..., dict[str, Any]] = _repetition if what == REPETITION else _history
    found = work(session, fixture, protocol, out)
    write_json(
        out / RESULT,
        {
            "what": what,
            "began_ns": began,
            "ended_ns": time.time_ns(),
            "prelude": session.has_prelude,
            "identity": {"source": code_digest(__name__, *lane.modules), **asdict(session.computer())},
            "telemetry": session.telemetry(),
            **found,
        },
    )


def _history(session: Session, fixture: LayerFixture, protocol: Protocol, out: Path) -> dict[str, Any]:
    plan = protocol.history
    launch = Launch(plan.launch.thread_k, plan.launch.thread_n, session.device.sms * plan.launch.blocks_per_sm)
    plans, finals = Seen(), Seen()
    rows: list[NDArray[np.int32]] = []
    for _ in range(plan.calls):
        aligned = session.native_plan()
        if plans.add(aligned.fingerprint()):
            rows.append(aligned.sorted_token_ids)
        surfaces, _ = session.layer(aligned, dict.fromkeys(GEMMS, launch))
        finals.add(sha256_array(surfaces["final"]))
    save_tensors(out / PLANS, {"sorted_token_ids": np.stack(rows)})
    return {"launch": list(launch), "plans": plans.told(), "finals": finals.told()}


def routing(condition: Condition, fixture: LayerFixture) -> NDArray[np.int32]:
    """The ids that a condition aligns, int32 [tokens, k]."""
    if condition.routing == "one_expert":
        return np.zeros((condition.routes, 1), np.int32)
    return (fixture.topk_ids % condition.experts).astype(np.int32)


def _repetition(session: Session, fixture: LayerFixture, protocol: Protocol, out: Path) -> dict[str, Any]:
    plan = protocol.repetition
    found = []
    for condition in plan.conditions:
        ids = routing(condition, fixture)
        call = _caller(session, condition, to_device(ids, session.operators.device), plan.block_size)
        plans, orders = Seen(), Seen()
        for _ in range(plan.calls):
            aligned = call()
            plans.add(aligned.fingerprint())
            orders.add(sha256_array(aligned.sorted_token_ids))
        found.append({"condition": condition.name, "plans": plans.told(), "orders": orders.told()})
    return {"conditions": found}


def _caller(session: Session, condition: Condition, ids: Any, block_size: int) -> Callable[[], AlignedPlan]:
    import torch

    operators, routes = session.operators, ids.numel()
    if condition.mode == "default_stream":
        return lambda: operators.native_align(ids, condition.experts, block_size)
    buffers = operators.alignment_buffers(routes, condition.experts, block_size)
    stream = torch.cuda.Stream()
    if condition.mode == "side_stream":

        def once() -> AlignedPlan:
            with torch.cuda.stream(stream):
                operators.align_into(buffers, ids, condition.experts)
                return read_alignment(buffers, routes)

        return once
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        operators.align_into(buffers, ids, condition.experts)  # loads the kernels before the capture
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            operators.align_into(buffers, ids, condition.experts)

    def replay() -> AlignedPlan:
        with torch.cuda.stream(stream):
            graph.replay()
            return read_alignment(buffers, routes)

    return replay
