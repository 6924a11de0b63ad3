# SPDX-License-Identifier: Apache-2.0
"""The alignment kernels of one device: compiled, loaded with cuda-core, launched by the driver. No torch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from routeblock.cuda import nvrtc
from routeblock.cuda.align_variants import PLAIN_SHARED_BYTES, Gpu, Kind, Problem, Variant
from routeblock.cuda.packed_launch import PackedLaunch, Step
from routeblock.errors import InputError

SOURCES = ("align.cu", "align_variants.cuh")
SOURCE, *HEADERS = (Path(__file__).with_name(name) for name in SOURCES)
PARAMETERS = 12  # of every kernel in align.cu
MOST_PREPARED = 4096  # launches kept packed a thread: sizes of batches come and go


def compile_for(gpu: Gpu) -> nvrtc.Cubin:
    """The kernels as machine code. Raises InputError if no NVRTC here compiles for the GPU."""
    return nvrtc.for_architecture(gpu.architecture).compile(SOURCE, gpu.architecture, HEADERS)


class Kernels:
    """The kernels of CUDA device `index`, whose context becomes the current one.

    Raises InputError as `compile_for` does, and without cuda-core.
    """

    def __init__(self, index: int, gpu: Gpu) -> None:
        try:
            from cuda import core
            from cuda.bindings import driver
        except ImportError as e:
            raise InputError(
                f"no cuda-core: {e}",
                where="canonical alignment",
                limit="cuda-core launches the kernels",
                way_out="install envs/cuda13.txt",
            ) from e
        self.index, self.gpu = index, gpu
        self._driver = driver
        core.Device(index).set_current()
        cubin = compile_for(gpu)
        self.cubin_sha256 = cubin.sha256
        self._code = core.ObjectCode.from_cubin(cubin.code)
        self._kernels: dict[str, Any] = {}
        self._shared: dict[str, int] = {}
        self._packed = threading.local()

    def launch(
        self, variant: Variant, problem: Problem, wide: bool, stream: int, arguments: tuple[int, ...], workspace: int
    ) -> None:
        """Enqueue one alignment on the stream with this handle.

        wide: ids are int64. arguments: the pointers and integers that every kernel of align.cu takes; workspace: the
        pointer, for variants that use one.
        """
        launch, slots = self._prepared(variant, problem, wide)
        launch(stream, (*arguments, workspace if slots is None else slots))

    def _prepared(self, variant: Variant, problem: Problem, wide: bool) -> tuple[PackedLaunch, int | None]:
        """The launch of these sizes, packed for this thread, and the last argument where it is no workspace."""
        try:
            kept: dict[tuple[Any, ...], tuple[PackedLaunch, int | None]] = self._packed.of_thread
        except AttributeError:
            kept = self._packed.of_thread = {}
        key = (variant.name, problem.routes, problem.experts, problem.block_size, wide)
        found = kept.get(key)
        if found is None:
            if len(kept) >= MOST_PREPARED:
                kept.clear()
            slots = None if variant.kind is Kind.TILES else variant.slots(problem)
            found = kept[key] = (self._pack(variant, problem, wide), slots)
        return found

    def _pack(self, variant: Variant, problem: Problem, wide: bool) -> PackedLaunch:
        suffix = "i64" if wide else "i32"
        shared = variant.shared_bytes(problem)
        if variant.kind is Kind.TILES:
            stages = {"_count": 4 * 4 * ((problem.experts + 4) // 4), "_scatter": shared}
        else:
            stages = {"": shared}
        return PackedLaunch(
            PARAMETERS,
            [
                Step(
                    int(self._kernel(f"{variant.name}{stage}_{suffix}", size, variant.cluster).handle),
                    variant.parts(problem),
                    variant.threads,
                    size,
                    variant.cluster if variant.kind is Kind.CLUSTER else 1,
                )
                for stage, size in stages.items()
            ],
        )

    def _kernel(self, name: str, shared: int, cluster: int) -> Any:
        """The kernel `name`, allowed to take `shared` bytes a block and `cluster` blocks a cluster."""
        if name not in self._kernels:
            self._kernels[name] = self._code.get_kernel(name)
            if cluster > 8:
                self._set("CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", name, 1)
        if shared > self._shared.get(name, PLAIN_SHARED_BYTES):
            self._set("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", name, shared)
            self._shared[name] = shared
        return self._kernels[name]

    def _set(self, attribute: str, name: str, value: int) -> None:
        driver = self._driver
        handle = driver.CUkernel(int(self._kernels[name].handle))
        (status,) = driver.cuKernelSetAttribute(
            getattr(driver.CUfunction_attribute, attribute), value, handle, driver.CUdevice(self.index)
        )
        if int(status):
            raise RuntimeError(f"cuKernelSetAttribute({attribute}, {value}) for {name}: {status}")
