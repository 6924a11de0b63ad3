# SPDX-License-Identifier: Apache-2.0
"""awq_moe.cu on one GPU: loaded from a cubin, enqueued on any stream with the driver. Only `Layer` needs torch.

Nothing waits for the GPU or allocates on it, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock.cuda import nvrtc
from routeblock.cuda.awq_moe_plan import FORMS, SUM_COLUMNS, SUM_THREADS, Gemm, Launch, Plan, Sizes
from routeblock.errors import InputError

KINDS = ("f16_u4", "f16_u4b8", "bf16_u4", "bf16_u4b8")  # see `Sizes.kind`
SOURCES = (
    "awq_moe.cu",
    "awq_machine.cuh",
    "awq_moe_f16_u4.cu",
    "awq_moe_f16_u4b8.cu",
    "awq_moe_bf16_u4.cu",
    "awq_moe_bf16_u4b8.cu",
)
FOLDER = Path(__file__).parent
HEADERS = tuple(FOLDER / name for name in SOURCES[:2])
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90")
ACTIVATION_THREADS = 256
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_PLAIN_SHARED_BYTES = 48 * 1024


def compile_for(architecture: str, kind: str) -> nvrtc.Cubin:
    """The kernels of one dtype and weight type as machine code, half a minute.

    Raises InputError if no NVRTC here compiles for the architecture.
    """
    library = nvrtc.for_architecture(architecture)
    if architecture == "sm_90":  # with what only this very architecture has: registers move between warps
        library.architectures = (*library.architectures, "sm_90a")
        architecture = "sm_90a"
    return library.compile(FOLDER / f"awq_moe_{kind}.cu", architecture, HEADERS)


@dataclass(frozen=True)
class Weights:
    """Device pointers of one GEMM's weights, as vLLM's Marlin path holds them.

    q int32 [E, K/16, 2N]; scales 16-bit [E, groups, N]; zeros int32 [E, groups, N/8], or 0 for uint4b8. Addresses are
    multiples of 16.
    """

    q: int
    scales: int
    zeros: int = 0


@dataclass(frozen=True)
class Routes:
    """Device pointers of a plan, as moe_align_block_size fills them, with blocks of `Plan.block_size`."""

    sorted_token_ids: int
    expert_ids: int
    num_tokens_post_padded: int


class Kernels:
    """The kernels of one kind's cubin in the current CUDA context. Raises InputError if it cannot be loaded there.

    `early`: let a kernel start while the one before it runs (sm_90 and newer; elsewhere no difference).
    """

    def __init__(self, cubin: bytes, *, early: bool = True) -> None:
        from cuda.bindings import driver

        self._driver, self._early = driver, early
        status, self._module = driver.cuModuleLoadData(cubin)
        if int(status):
            raise InputError(
                f"the driver does not load the kernels: {status}",
                where="awq_moe",
                limit="a cubin for this GPU's architecture",
                way_out="compile it again",
            )
        self._functions: dict[str, Any] = {}
        self._shared: dict[str, int] = {}

    def _done(self, result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(f"CUDA driver: {result[0]}")
        return result[1] if len(result) > 1 else None

    def launch(
        self,
        name: str,
        stream: int,
        grid: int,
        threads: int,
        arguments: tuple[tuple[int, Any], ...],
        *,
        shared: int = 0,
        early: bool = False,
    ) -> None:
        """Enqueue kernel `name`. arguments: pairs of value and ctypes type."""
        driver = self._driver
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._done(driver.cuModuleGetFunction(self._module, name.encode()))
        if shared > self._shared.get(name, _PLAIN_SHARED_BYTES):
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._done(driver.cuFuncSetAttribute(function, attribute, shared))
            self._shared[name] = shared
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, driver.CUstream(stream)
        if early and self._early:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values, types = zip(*arguments, strict=True)
        self._done(driver.cuLaunchKernelEx(config, function, (values, types), 0))

    def gemm(
        self,
        sizes: Sizes,
        gemm: Gemm,
        launch: Launch,
        stream: int,
        x: int,
        weights: Weights,
        routes: Routes,
        topk_weights: int,
        out: int,
        *,
        early: bool = True,
    ) -> None:
        """Enqueue W13 with its activation, or W2 with the top-k weights. Pointers are device addresses.

        x: 16-bit [M, H] for W13, its output for W2; topk_weights float32 [M, k] (W2); out 16-bit [routes, I] or
        [routes, H]: rows of routes that the plan does not have are left alone. early: for W2 the kernel before must be
        W13, which has waited for the plan.
        """
        n, k = sizes.shape(gemm)
        if (weights.zeros != 0) != sizes.zero_points:
            raise InputError(
                f"zero points {'given' if weights.zeros else 'missing'}",
                where="awq_moe",
                limit=f"these sizes say {'uint4' if sizes.zero_points else 'uint4b8'}",
                way_out="pass what the layer has",
            )
        pointers = (
            x, weights.q, weights.scales, weights.zeros, out, routes.sorted_token_ids, routes.expert_ids,
            routes.num_tokens_post_padded, topk_weights,
        )  # fmt: skip
        numbers = (sizes.routes, sizes.top_k, n, k, sizes.groups(gemm), sizes.group_shift(gemm))
        arguments = (*((p, _POINTER) for p in pointers), *((i, _INT) for i in numbers))
        self.launch(
            f"{gemm}_{sizes.kind}_{launch.form.name}",
            stream,
            launch.grid,
            launch.threads,
            arguments,
            shared=launch.shared_bytes,
            early=early,
        )

    def sum_routes(
        self,
        sizes: Sizes,
        stream: int,
        rows: int,
        out: int,
        *,
        topk_ids: int = 0,
        wide_ids: bool = False,
        expert_map: int = 0,
        global_experts: int = 0,
        early: bool = True,
    ) -> None:
        """Enqueue the sum of rows [routes, H] over top-k into out [M, H].

        topk_ids int32, or int64 with wide_ids: pass them where a route may have no expert here; it counts as zero.
        """
        grid = -(-sizes.tokens * (sizes.hidden // SUM_COLUMNS) // SUM_THREADS)
        pointers = ((p, _POINTER) for p in (rows, out, topk_ids, expert_map))
        numbers = ((i, _INT) for i in (global_experts, sizes.tokens, sizes.top_k, sizes.hidden))
        name = f"sum_{sizes.kind.split('_')[0]}_i{64 if wide_ids else 32}"
        self.launch(name, stream, grid, SUM_THREADS, (*pointers, *numbers), early=early)

    def activate(self, dtype: str, stream: int, gate_up: int, out: int, rows: int, half: int) -> None:
        """Enqueue the activation alone: 16-bit gate_up [rows, 2 * half] to out [rows, half]; half is even."""
        grid = -(-rows * (half // 2) // ACTIVATION_THREADS)
        arguments = ((gate_up, _POINTER), (out, _POINTER), (rows, _INT), (half, _INT))
        name = f"activate_{'f16' if dtype == 'float16' else 'bf16'}"
        self.launch(name, stream, grid, ACTIVATION_THREADS, arguments)

    def read_experts(
        self,
        stream: int,
        splits: int,
        weights: Weights,
        parts: tuple[int, int, int],
        experts: int,
        count: int,
        sink: int,
    ) -> None:
        """Enqueue a kernel that reads the listed experts' bytes, `splits` blocks of threads each.

        experts: int32 [count] on the device; parts: bytes of one expert's q, scales and zeros; sink: int32 [1].
        """
        pointers = (weights.q, weights.scales, weights.zeros, experts)
        numbers = (count, *parts)
        arguments = (*((p, _POINTER) for p in pointers), *((i, _INT) for i in numbers), (sink, _POINTER))
        self.launch("read_experts", stream, splits * count, 512, arguments)

    def nothing(self, stream: int, launch: Launch, *, early: bool) -> None:
        """Enqueue a kernel that does nothing, launched as `launch` is."""
        self.launch(
            "nothing", stream, launch.grid, launch.threads, ((0, _INT),), shared=launch.shared_bytes, early=early
        )


@dataclass
class Buffers:
    """What a call writes, torch tensors on one device; made once for sizes and plan, used by any number of calls."""

    sorted_token_ids: Any
    expert_ids: Any
    num_tokens_post_padded: Any
    activation: Any
    rows: Any
    final: Any
    workspace: Any

    @classmethod
    def make(cls, sizes: Sizes, plan: Plan, device: Any, global_experts: int | None = None) -> Buffers:
        """Buffers for calls of these sizes."""
        import torch

        from routeblock.cuda import align
        from routeblock.cuda.align_variants import Problem

        experts = global_experts or sizes.experts
        dtype = getattr(torch, sizes.dtype)
        padded = Problem(sizes.routes, experts, plan.block_size).bound
        needed = align.workspace_size(sizes.routes, experts, plan.block_size, torch.device(device).index or 0)

        def ints(count: int) -> Any:
            return torch.empty((max(count, 4),), dtype=torch.int32, device=device)

        return cls(
            ints(padded),
            ints(padded // plan.block_size),
            ints(1),
            torch.empty((sizes.routes, sizes.intermediate), dtype=dtype, device=device),
            torch.empty((sizes.routes, sizes.hidden), dtype=dtype, device=device),
            torch.empty((sizes.tokens, sizes.hidden), dtype=dtype, device=device),
            ints(needed),
        )

    @property
    def routes(self) -> Routes:
        return Routes(
            self.sorted_token_ids.data_ptr(), self.expert_ids.data_ptr(), self.num_tokens_post_padded.data_ptr()
        )


@dataclass
class Layer:
    """One layer's weights with the kernels that serve it; torch tensors, on torch's current stream."""

    kernels: Kernels
    w13: Any  # a `vllm_ops.DeviceWeights`
    w2: Any

    @staticmethod
    def pointers(weights: Any) -> Weights:
        """Addresses of a `vllm_ops.DeviceWeights`."""
        zeros = 0 if weights.zeros is None else weights.zeros.data_ptr()
        return Weights(weights.q.data_ptr(), weights.scales.data_ptr(), zeros)

    def align(self, sizes: Sizes, plan: Plan, buffers: Buffers, topk_ids: Any, expert_map: Any = None) -> None:
        """Enqueue the canonical alignment."""
        from routeblock.cuda import align

        align.moe_align_block_size(
            topk_ids,
            sizes.experts if expert_map is None else expert_map.numel(),
            plan.block_size,
            buffers.sorted_token_ids,
            buffers.expert_ids,
            buffers.num_tokens_post_padded,
            expert_map,
            workspace=buffers.workspace,
        )

    def gemms(
        self, sizes: Sizes, plan: Plan, buffers: Buffers, hidden: Any, topk_weights: Any, *, early: bool = False
    ) -> None:
        """Enqueue W13 with the activation and W2 with the top-k weights, for the plan in the buffers. early: of W13."""
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        routes, activation = buffers.routes, buffers.activation.data_ptr()
        weights = topk_weights.data_ptr()
        w13 = self.pointers(self.w13)
        self.kernels.gemm(
            sizes, "w13", plan.w13, stream, hidden.data_ptr(), w13, routes, weights, activation, early=early
        )
        self.kernels.gemm(
            sizes, "w2", plan.w2, stream, activation, self.pointers(self.w2), routes, weights, buffers.rows.data_ptr()
        )

    def forward(
        self,
        sizes: Sizes,
        plan: Plan,
        buffers: Buffers,
        hidden: Any,
        topk_ids: Any,
        topk_weights: Any,
        expert_map: Any = None,
    ) -> Any:
        """Enqueue a whole call; returns `buffers.final`, [M, H].

        hidden [M, H], topk_ids int32 or int64 [M, k], topk_weights float32 [M, k], expert_map int32 [global experts] or
        None: contiguous, on one device.
        """
        import torch

        self.align(sizes, plan, buffers, topk_ids, expert_map)
        self.gemms(sizes, plan, buffers, hidden, topk_weights, early=True)
        self.kernels.sum_routes(
            sizes,
            torch.cuda.current_stream().cuda_stream,
            buffers.rows.data_ptr(),
            buffers.final.data_ptr(),
            topk_ids=0 if expert_map is None else topk_ids.data_ptr(),
            wide_ids=topk_ids.element_size() == 8,
            expert_map=0 if expert_map is None else expert_map.data_ptr(),
            global_experts=0 if expert_map is None else expert_map.numel(),
        )
        return buffers.final


def form_names() -> tuple[str, ...]:
    """Names of the tilings that are compiled."""
    return tuple(FORMS)
