# SPDX-License-Identifier: Apache-2.0
"""q6k_dispatch.cu on one GPU: loaded from a cubin, enqueued on any stream with the driver. torch is not needed.

Nothing waits for the GPU or allocates on it, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from routeblock.cuda import nvrtc
from routeblock.cuda.q6k_plan import Plan, Sizes
from routeblock.errors import InputError

KERNELS = ("dispatch_even", "dispatch_odd", "quantize_even", "quantize_odd", "quantize_q8_1", "read_all", "nothing")
QUANTIZE_THREADS = 128
SOURCES = ("q6k_dispatch.cu", "q6k_machine.cuh")
SOURCE, *HEADERS = (Path(__file__).with_name(name) for name in SOURCES)
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def compile_for(architecture: str) -> nvrtc.Cubin:
    """The kernels as machine code. Raises InputError if no NVRTC here compiles for the architecture."""
    return nvrtc.for_architecture(architecture).compile(SOURCE, architecture, HEADERS)


class Kernels:
    """The kernels of a cubin in the current CUDA context. Raises InputError if it cannot be loaded there.

    `early`: let the products start while the quantisation before them runs (sm_90 and newer; elsewhere no difference).
    """

    def __init__(self, cubin: bytes, names: tuple[str, ...] = KERNELS, *, early: bool = True) -> None:
        from cuda.bindings import driver

        self._driver, self._early = driver, early
        status, self._module = driver.cuModuleLoadData(cubin)
        if int(status):
            raise InputError(
                f"the driver does not load the kernels: {status}",
                where="q6k_dispatch",
                limit="a cubin for this GPU's architecture",
                way_out="build it again: routeblock gpu build-kernels",
            )
        self._functions = {name: self._done(driver.cuModuleGetFunction(self._module, name.encode())) for name in names}
        self._shared: dict[str, int] = {}

    def _done(self, result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(f"CUDA driver: {result[0]}")
        return result[1] if len(result) > 1 else None

    def launch(
        self,
        name: str,
        stream: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: tuple[Any, ...],
        *,
        shared: int = 0,
        early: bool = False,
    ) -> None:
        """Enqueue kernel `name`. arguments: pairs of value and ctypes type."""
        driver = self._driver
        function = self._functions[name]
        if shared > self._shared.get(name, 48 * 1024):
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._done(driver.cuFuncSetAttribute(function, attribute, shared))
            self._shared[name] = shared
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes, config.hStream = shared, driver.CUstream(stream)
        if early:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values, types = zip(*arguments, strict=True)
        self._done(driver.cuLaunchKernelEx(config, function, (values, types), 0))

    def products(
        self, sizes: Sizes, plan: Plan, stream: int, ids: int, weights: int, x: int, quantized: int, out: int
    ) -> None:
        """Enqueue one call. All but sizes and plan are device pointers (`quantized` may be 0 where the plan is fused).

        ids int32 [slots], weights bytes [experts, rows, cols / 256, 210], x float32 [tokens, cols] at a multiple of 16,
        quantized `plan.quantized_bytes(sizes)` bytes, out float32 [slots, rows].
        """
        if not plan.fused:
            pointers = ((x, _POINTER), (quantized, _POINTER), (sizes.blocks, _INT))
            name = f"quantize_{sizes.suffix}"
            self.launch(name, stream, (sizes.tokens, 1, 1), (QUANTIZE_THREADS, 1, 1), pointers)
        numbers = (
            *(sizes.slots, sizes.experts, sizes.top_k, sizes.rows, sizes.blocks),
            *(plan.tile_rows, plan.tiles, plan.slabs, plan.capacity, plan.few, int(plan.fused)),
        )
        arguments = (
            *((p, _POINTER) for p in (ids, weights, x if plan.fused else quantized, out)),
            *((n, _INT) for n in numbers),
        )
        self.launch(
            f"dispatch_{sizes.suffix}",
            stream,
            (plan.grid, 1, 1),
            (plan.threads, 1, 1),
            arguments,
            shared=plan.shared_bytes,
            early=self._early and not plan.fused,
        )

    def nothing(self, sizes: Sizes, plan: Plan, stream: int) -> None:
        """Enqueue the launches of one call of `products`, of a kernel that does nothing."""
        unused = ((0, _INT),)
        if not plan.fused:
            self.launch("nothing", stream, (sizes.tokens, 1, 1), (QUANTIZE_THREADS, 1, 1), unused)
        grid, block, early = (plan.grid, 1, 1), (plan.threads, 1, 1), self._early and not plan.fused
        self.launch("nothing", stream, grid, block, unused, shared=plan.shared_bytes, early=early)

    def quantize_q8_1(self, stream: int, x: int, out: int, values: int) -> None:
        """Enqueue ggml's Q8_1 blocks of float32 [values], a multiple of 32."""
        words = values // 4
        arguments = ((x, _POINTER), (out, _POINTER), (words, _INT))
        self.launch("quantize_q8_1", stream, (-(-words // 256), 1, 1), (256, 1, 1), arguments)
