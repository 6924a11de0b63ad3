# SPDX-License-Identifier: Apache-2.0
"""The lane on this machine's GPU, with the operators of vLLM's own extension, unpatched."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.cuda.device import MEMORY_MARGIN, Device, open_device, require_torch, split_grid, state
from routeblock.cuda.grid_probe import PROBE_VARIABLE as PROBE
from routeblock.cuda.grid_probe import GridProbe, KernelLaunch
from routeblock.cuda.grid_probe import reexecute as reexecute_with_probe
from routeblock.cuda.operators import (
    ACTIVATION_EXTENSIONS,
    MAX_BLOCKS_PER_SM,
    DevicePlan,
    DeviceWeights,
    VllmOperators,
    find_extension,
    load_weights,
    to_device,
    to_host,
    wheel_version,
)
from routeblock.cuda.operators import ACTIVATION_VARIABLE as ACTIVATION
from routeblock.cuda.operators import EXTENSION_VARIABLE as EXTENSION
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file, sha256_json
from routeblock.evidence.record import READ_BACK
from routeblock.moe.awq import unpack_awq
from routeblock.moe.launches import Launch
from routeblock.moe.routing import AlignedPlan, check_plan
from routeblock.route_block.facts import SURFACES
from routeblock.route_block.fixtures.fixture import LayerFixture
from routeblock.route_block.operating_point import GEMMS
from routeblock.route_block.runs.lane import Computer, Outcome, Request

PRELUDE_HISTORY, PRELUDE_INPUTS = "H1", ("hidden", "topk_weights", "topk_ids")
DEVICE = "cuda"


def open_cuda_lane() -> CudaLane:
    """The lane as the environment describes it.

    $ROUTEBLOCK_EXTENSION and $ROUTEBLOCK_ACTIVATION_EXTENSION name files or folders (default: an installed vllm, and
    the torch form of the activation), $ROUTEBLOCK_PROBE the built grid probe. With a probe this process starts its
    command line again, once, with the probe preloaded. Raises InputError when there is no extension.
    """
    named = {name: Path(os.environ[name]) for name in (EXTENSION, ACTIVATION, PROBE) if os.environ.get(name)}
    extension = find_extension(named.get(EXTENSION))
    activation = find_extension(named[ACTIVATION], ACTIVATION_EXTENSIONS) if ACTIVATION in named else None
    if PROBE in named:
        if not named[PROBE].is_file():
            raise InputError(
                "no such file",
                where=str(named[PROBE]),
                limit=f"{PROBE} names the built grid probe",
                way_out="build it: routeblock gpu build-probe",
            )
        if str(named[PROBE].resolve()) not in os.environ.get("LD_PRELOAD", "").split(":"):
            reexecute_with_probe(named[PROBE], extension)
    return CudaLane(extension, activation, probed=PROBE in named)


def marlin_experts(
    fixture: LayerFixture, gemm: str
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8] | None, NDArray[Any]]]:
    """The experts in use as (q, zeros or None, scales), W13 with gate columns before up columns, one at a time."""
    for projections in fixture.packed(gemm):
        q = np.concatenate([unpack_awq(p.qweight) for p in projections], axis=1)
        zeros = [unpack_awq(p.qzeros) for p in projections if p.qzeros is not None]
        yield (
            q,
            np.concatenate(zeros, axis=1) if zeros else None,
            np.concatenate([p.scales for p in projections], axis=1),
        )


def memory_needed(fixture: LayerFixture) -> int:
    """Bytes of GPU memory that a run takes: packed weights, and a margin."""
    group, experts = fixture.spec["group_size"], len(fixture.experts)
    weights = 0
    for gemm in GEMMS:
        n, k = fixture.shape(gemm)
        groups = 1 if group == -1 else k // group
        weights += experts * (n * k // 2 + groups * (2 * n + n // 2))
    return weights + MEMORY_MARGIN


class CudaLane:
    """One cell on the current CUDA device.

    `probed`: the grid probe is preloaded (see `open_cuda_lane`). Without it only grids that are multiples of the GPU's
    SM count run, and their marker is computed, not recorded.
    """

    status = "observed"
    modules = (__name__, "routeblock.cuda.grid_probe", "routeblock.cuda.gpu_lock")

    def __init__(self, extension: Path, activation: Path | None = None, *, probed: bool = True) -> None:
        self.extension, self.activation, self.probed = extension, activation, probed
        self._loaded: _Loaded | None = None
        self._packed: _Packed | None = None

    def load(self) -> _Loaded:
        """Import torch and load the extension, once; no GPU is touched."""
        if self._loaded is None:
            clock = _Clock()
            require_torch()
            clock.lap("torch")
            operators = VllmOperators(self.extension, self.activation, DEVICE)
            probe = GridProbe(self.extension) if self.probed else None
            binaries = {
                "extension": sha256_file(self.extension),
                "activation": sha256_file(self.activation) if self.activation else None,
                "probe": sha256_file(probe.path) if probe else None,
            }
            clock.lap("extension")
            self._loaded = _Loaded(self.extension, operators, probe, binaries, clock.laps)
        return self._loaded

    def prepare(self, fixture: LayerFixture) -> None:
        """Load the extension and pack the weights on the CPU; no GPU is touched."""
        self.load()
        if self._packed is None or self._packed.fixture is not fixture:
            clock = _Clock()
            weights = {g: load_weights(marlin_experts(fixture, g), len(fixture.experts), "cpu") for g in GEMMS}
            clock.lap("packing")
            self._packed = _Packed(fixture, weights, clock.laps)

    def computer(self) -> Computer:
        """The extension, the probe and this process's GPU, before anything runs there."""
        loaded = self.load()
        device = open_device(0)
        return loaded.computer(device, state(device.uuid).get("driver"))

    def open(self, fixture: LayerFixture, history: str) -> Session:
        """Bring the history about: the device, H1's prelude, then the weights. Raises InputError where it cannot."""
        self.prepare(fixture)
        assert self._packed is not None
        clock = _Clock()
        device = open_device(memory_needed(fixture))
        before = state(device.uuid)
        clock.lap("device")
        # Before any weight reaches the device; kept until the end, never an operand.
        prelude = _prelude(fixture) if history == PRELUDE_HISTORY else []
        clock.lap("prelude")
        weights = {g: packed.to(DEVICE) for g, packed in self._packed.weights.items()}
        clock.lap("weights")
        return Session(self.load(), self._packed, device, prelude, weights, before, clock)

    def run(self, fixture: LayerFixture, request: Request) -> Outcome:
        """Run one cell; raises InputError where this machine cannot, or did not, do what is asked."""
        session = self.open(fixture, request.history)
        plan = session.native_plan() if request.plan is None else request.plan
        session.clock.lap("alignment")
        surfaces, launches = session.layer(plan, request.launches)
        session.clock.lap("layer")
        return Outcome(
            surfaces=surfaces,
            plan=session.read_plan(),
            grids={g: launch.blocks for g, launch in launches.items()},
            prelude=session.has_prelude,
            computer=session.computer(),
            consumption=READ_BACK,
            telemetry={
                **session.telemetry(),
                "kernels": {g: launch.kernel for g, launch in launches.items()},
            },
        )


@dataclass(frozen=True)
class _Loaded:
    extension: Path
    operators: VllmOperators
    probe: GridProbe | None
    binaries: Mapping[str, str | None]
    seconds: Mapping[str, float]

    def computer(self, device: Device, driver: str | None) -> Computer:
        """SHA-256 over the digests of extension, activation and probe; digests and versions, and the GPU."""
        import torch

        found = {
            **{f"{name}_sha256": digest for name, digest in self.binaries.items()},
            "extension": self.extension.name,
            "vllm": wheel_version(self.extension),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "driver": driver,
            "gpu": device.name,
            "compute_capability": ".".join(map(str, device.capability)),
            "sms": str(device.sms),
            "grid_marker": "recorded by the probe" if self.probe else "computed from the SM count, not recorded",
            **{f"form_{name}": form for name, form in self.operators.forms.items()},
            "schemas": sha256_json(self.operators.schemas),
        }
        known = {name: str(value) if value is not None else "unknown" for name, value in sorted(found.items())}
        return Computer(sha256_json(dict(self.binaries)), known)


@dataclass(frozen=True)
class _Packed:
    fixture: LayerFixture
    weights: Mapping[str, DeviceWeights]
    seconds: Mapping[str, float]


class Session:
    """A history on a device: its prelude happened, the weights are there, nothing has run yet."""

    def __init__(
        self,
        loaded: _Loaded,
        packed: _Packed,
        device: Device,
        prelude: list[Any],
        weights: Mapping[str, DeviceWeights],
        before: Mapping[str, Any],
        clock: _Clock,
    ) -> None:
        self.fixture, self.operators = packed.fixture, loaded.operators
        self.device, self.clock = device, clock
        self._loaded, self._probe, self._prelude = loaded, loaded.probe, prelude
        self._prepared_in = {**loaded.seconds, **packed.seconds}
        self._weights, self._before = weights, before
        self._placed: DevicePlan | None = None

    @property
    def has_prelude(self) -> bool:
        """Whether H1's three tensors are on the device and, read back, still have the fixture's bytes."""
        held = [to_host(tensor) for tensor in self._prelude]
        wanted = [getattr(self.fixture, name) for name in PRELUDE_INPUTS]
        return len(held) == len(wanted) and all(map(_same_bytes, held, wanted))

    def native_plan(self) -> AlignedPlan:
        """What vLLM's own alignment makes of the routing now. Raises InputError if it is no legal plan."""
        spec = self.fixture.spec
        plan = self.operators.native_align(
            to_device(self.fixture.topk_ids, DEVICE), spec["num_experts"], spec["block_size"]
        )
        return check_plan(plan, self.fixture.topk_ids, spec["num_experts"], where="native alignment")

    def layer(
        self, plan: AlignedPlan, launches: Mapping[str, Launch]
    ) -> tuple[dict[str, NDArray[Any]], dict[str, KernelLaunch]]:
        """The four surfaces under a plan, and the launches that there really were."""
        self._placed = placed = self.operators.device_plan(plan, self.fixture.expert_rows)
        surfaces, found = _layer(
            self.operators, self.fixture, placed, self._weights, launches, self.device, self._probe
        )
        host = {name: to_host(x) for name, x in surfaces.items()}
        _mark_unrouted(host, plan)
        return host, found

    def read_plan(self) -> AlignedPlan:
        """The plan that lies in the buffers which both GEMMs of the last layer read, with global expert ids."""
        if self._placed is None:
            raise InputError("no layer ran", where="lane cuda", limit="a plan is read back after it", way_out="run one")
        return self.operators.host_plan(self._placed, self.fixture.expert_rows, self.fixture.topk_ids.size)

    def computer(self) -> Computer:
        """What computes in this session."""
        return self._loaded.computer(self.device, self._before.get("driver"))

    def telemetry(self) -> dict[str, Any]:
        """Times, and the state of the GPU when the session began and now."""
        return {
            "seconds": {**{f"prepare_{name}": s for name, s in self._prepared_in.items()}, **self.clock.laps},
            "gpu_uuid": self.device.uuid,
            "gpu_before": dict(self._before),
            "gpu_after": state(self.device.uuid),
            "sm_count_answers": self._probe.answers if self._probe else 0,
        }


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def _prelude(fixture: LayerFixture) -> list[Any]:
    """H1's treatment: three CUDA tensors like the inputs, filled with them, one synchronise."""
    import torch

    hosts = [to_device(getattr(fixture, name), "cpu") for name in PRELUDE_INPUTS]
    kept = [torch.empty(host.shape, dtype=host.dtype, device=DEVICE) for host in hosts]
    for tensor, host in zip(kept, hosts, strict=True):
        tensor.copy_(host)
    torch.cuda.synchronize()
    return kept


def _layer(
    operators: VllmOperators,
    fixture: LayerFixture,
    placed: DevicePlan,
    weights: Mapping[str, DeviceWeights],
    asked: Mapping[str, Launch],
    device: Device,
    probe: GridProbe | None,
) -> tuple[dict[str, Any], dict[str, KernelLaunch]]:
    import torch

    tokens, top_k = fixture.topk_ids.shape
    topk_weights = to_device(fixture.topk_weights, DEVICE)
    launches: dict[str, KernelLaunch] = {}

    def gemm(name: str, a: Any, routes_per_row: int) -> Any:
        out, launches[name] = launch_gemm(
            name,
            asked[name],
            operators,
            a,
            weights[name],
            placed,
            topk_weights,
            top_k=routes_per_row,
            device=device,
            probe=probe,
        )
        return out

    w13 = gemm("w13", to_device(fixture.hidden, DEVICE), top_k)
    activation = operators.silu_and_mul(w13)
    w2 = gemm("w2", activation, 1)
    final = operators.combine(w2, tokens)
    torch.cuda.synchronize()
    return dict(zip(SURFACES, (w13, activation, w2, final), strict=True)), launches


def launch_gemm(
    name: str,
    launch: Launch,
    operators: VllmOperators,
    a: Any,
    weights: DeviceWeights,
    plan: DevicePlan,
    topk_weights: Any,
    *,
    top_k: int,
    device: Device,
    probe: GridProbe | None,
) -> tuple[Any, KernelLaunch]:
    """One GEMM of the layer on the grid asked for: W2 multiplies the top-k weights in. Returns output and real launch.

    Raises InputError when the grid needs a probe that is not there, and when another launch was recorded.
    """
    sms, blocks_per_sm = split_grid(launch.grid, device.sms, MAX_BLOCKS_PER_SM)
    if probe is None and sms != device.sms:
        raise InputError(
            f"grid {launch.grid} of {name}",
            where="lane cuda",
            limit=f"without the grid probe only multiples of {device.sms} SMs can be launched",
            way_out=f"build the probe (routeblock gpu build-probe) and name it in {PROBE}",
        )
    if probe is not None:
        probe.take()
        probe.answer(None if sms == device.sms else sms)
    out = operators.moe_gemm(
        a,
        weights,
        plan,
        topk_weights,
        top_k=top_k,
        multiply_topk_weights=name == "w2",
        thread_k=launch.thread_k,
        thread_n=launch.thread_n,
        blocks_per_sm=blocks_per_sm,
        lock_sms=max(sms, device.sms),
    )
    if probe is None:
        threads = launch.thread_k * launch.thread_n // 64
        return out, KernelLaunch((sms * blocks_per_sm, 1, 1), (threads, 1, 1), 0, "")
    probe.answer(None)
    found = [x for x in probe.take() if x.thread_sizes is not None]
    if [(x.thread_sizes, x.blocks) for x in found] != [((launch.thread_k, launch.thread_n), launch.grid)]:
        seen = ", ".join(f"{x.thread_sizes} on {x.blocks}" for x in found) or "no launch"
        raise InputError(
            f"{name}: the probe recorded {seen}",
            where="lane cuda",
            limit=f"one launch of {(launch.thread_k, launch.thread_n)} on {launch.grid} blocks was asked for",
            way_out="this version of the extension launches otherwise: use vllm 0.24.0",
        )
    return out, found[0]


def _same_bytes(held: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return held.dtype == wanted.dtype and held.shape == wanted.shape and held.tobytes() == wanted.tobytes()


def _mark_unrouted(surfaces: dict[str, NDArray[Any]], plan: AlignedPlan) -> None:
    """Routes without a block here get zero rows; any other row must have been written."""
    routed = plan.block_of() >= 0
    for name in GEMMS:
        rows = surfaces[name]
        rows[~routed] = 0
        unwritten = np.isnan(rows[routed].astype(np.float32)).all(axis=1)
        if unwritten.any():
            raise InputError(
                f"{name}: route {int(np.flatnonzero(routed)[int(np.flatnonzero(unwritten)[0])])} was not written",
                where="lane cuda",
                limit="the kernel writes one row a route",
                way_out="report this version of the extension",
            )
