# SPDX-License-Identifier: Apache-2.0
"""The kernels at hostile sizes: what a sanitizer watches, and a check of bits besides.

A process of its own without torch; every buffer is an allocation of its own, of the exact size, and is never filled.
Run as `python -m routeblock.q6k_dispatch.sanitizer_cases CUBIN`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.cuda.q6k_dispatch import Kernels
from routeblock.cuda.q6k_plan import Products, Sizes, Tuning, plan, quantized_bytes
from routeblock.moe import q6k
from routeblock.moe.q6k_segments import dot

SEED = 20250713
SIZES = (
    Sizes(16, 3, 8, 48, 512),
    Sizes(40, 2, 1, 32, 512),
    Sizes(6, 9, 2, 40, 1024),
    Sizes(5, 2, 1, 16, 1536),
    Sizes(4, 2, 2, 16, 256),
    Sizes(3, 2, 1, 24, 768),
    Sizes(3, 2, 1, 7, 512),
    Sizes(9, 40, 1, 80, 2048),
)
TUNINGS = (Tuning(4, 64, 1, 8, 4, True), Tuning(8, 32, 2, 32, 1, False))


class Device:
    """CUDA device 0 with buffers of exact size."""

    def __init__(self, cubin: bytes) -> None:
        from cuda import core
        from cuda.bindings import driver

        device = core.Device(0)
        device.set_current()
        self._driver, self.stream = driver, device.create_stream()
        major, minor = device.compute_capability
        self.architecture = f"sm_{major}{minor}"
        self.kernels = Kernels(cubin)
        self._kept: list[int] = []

    def _done(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        if int(result[0]):
            raise RuntimeError(f"CUDA driver: {result[0]}")
        return result[1:]

    def allocate(self, size: int) -> int:
        """The address of `size` bytes."""
        (address,) = self._done(self._driver.cuMemAlloc(size))
        self._kept.append(int(address))
        return int(address)

    def upload(self, array: NDArray[Any]) -> int:
        """The address of a copy of `array`."""
        address = self.allocate(array.nbytes)
        self._done(self._driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
        self._done(self._driver.cuCtxSynchronize())
        return address

    def rows(self, address: int, which: NDArray[np.intp], length: int) -> NDArray[np.float32]:
        """float32 [which, length] of a buffer of such rows, after all work of the stream."""
        self.stream.sync()
        out = np.empty((which.size, length), np.float32)
        for i, row in enumerate(which):
            self._done(self._driver.cuMemcpyDtoH(out[i].ctypes.data, address + 4 * length * int(row), 4 * length))
        return out

    def free(self) -> None:
        """Free every buffer."""
        for address in self._kept:
            self._done(self._driver.cuMemFree(address))
        self._kept.clear()


def cases() -> Iterator[tuple[Sizes, Tuning, Products]]:
    """Every size, tuning and path."""
    for sizes in SIZES:
        for tuning in TUNINGS:
            for path in Products:
                yield sizes, tuning, path


def equal(device: Device, sizes: Sizes, tuning: Tuning, path: Products) -> bool:
    """Whether one call gives the model's bits at every active slot."""
    rng = np.random.default_rng(SEED)
    ids = rng.integers(0, sizes.experts, sizes.slots).astype(np.int32)
    ids[[0, 2]] = -1, sizes.experts
    x = rng.standard_normal((sizes.tokens, sizes.cols)).astype(np.float32)
    weights = q6k.random_q6k(np.random.PCG64(SEED), (sizes.experts, sizes.rows, sizes.blocks))
    launch = plan(sizes, tuning, path, architecture=device.architecture)
    on_ids, on_weights, on_x = (device.upload(array) for array in (ids, weights, x))
    quantized = 0 if launch.fused else device.allocate(quantized_bytes(sizes))
    out = device.allocate(4 * sizes.slots * sizes.rows)
    device.kernels.products(sizes, launch, int(device.stream.handle), on_ids, on_weights, on_x, quantized, out)
    active = np.flatnonzero((ids >= 0) & (ids < sizes.experts))
    got = device.rows(out, active, sizes.rows)
    device.free()
    activations = q6k.quantize_q8_1(x)
    want = np.stack([dot(weights[ids[s]], activations[s // sizes.top_k][None]) for s in active])
    return np.array_equal(got.view(np.uint32), want.view(np.uint32))


def main(arguments: list[str]) -> int:
    """Exit code 1 if a case differs."""
    device = Device(Path(arguments[0]).read_bytes())
    number, wrong = 0, []
    for case in cases():
        number += 1
        if not equal(device, *case):
            wrong.append(str(case))
    for line in wrong:
        print(line)
    print(f"{number} cases, {len(wrong)} differences")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
