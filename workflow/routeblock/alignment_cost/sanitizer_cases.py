# SPDX-License-Identifier: Apache-2.0
"""Every alignment variant at hostile sizes: what a sanitizer watches, and a check of bits besides.

A process of its own without torch, so that a sanitizer sees little else. Every buffer is an allocation of its own, of
the smallest size allowed, and is never filled: initcheck must see each entry written before it is read back.
Run as `python -m routeblock.alignment_cost.sanitizer_cases`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.cuda.align_kernels import Kernels
from routeblock.cuda.align_variants import VARIANTS, Gpu, Kind, Problem, Variant
from routeblock.moe.routing import align

SEED = 20250702
EXPERTS = (128, 257)
MOST = 20_000  # routes of a case


class Device:
    """CUDA device 0 with buffers of exact size."""

    def __init__(self) -> None:
        from cuda import core
        from cuda.bindings import driver

        device = core.Device(0)
        device.set_current()
        self._driver, self.stream = driver, device.create_stream()
        self._kept: list[int] = []
        (shared,) = self._done(
            driver.cuDeviceGetAttribute(
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, driver.CUdevice(0)
            )
        )
        major, minor = device.compute_capability
        self.kernels = Kernels(0, Gpu((major, minor), shared))

    def _done(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        if int(result[0]):
            raise RuntimeError(f"CUDA driver: {result[0]}")
        return result[1:]

    def allocate(self, size: int) -> int:
        """The address of `size` bytes, at least 4."""
        (address,) = self._done(self._driver.cuMemAlloc(max(size, 4)))
        self._kept.append(int(address))
        return int(address)

    def upload(self, array: NDArray[Any]) -> int:
        """The address of a copy of `array`."""
        address = self.allocate(array.nbytes)
        if array.nbytes:
            self._done(self._driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
            self._done(self._driver.cuCtxSynchronize())  # the copy is not of our stream
        return address

    def download(self, address: int, count: int) -> NDArray[np.int32]:
        """`count` int32, after all work of the stream."""
        self.stream.sync()
        array = np.empty(count, np.int32)
        if count:
            self._done(self._driver.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
        return array

    def free(self) -> None:
        """Free every buffer."""
        for address in self._kept:
            self._done(self._driver.cuMemFree(address))
        self._kept.clear()


def equal(device: Device, variant: Variant, ids: NDArray[Any], experts: int, block: int, with_map: bool) -> bool:
    """Whether one call gives the reference's bits, in buffers as small as they may be."""
    problem = Problem(ids.size, experts, block)
    rng = np.random.default_rng(SEED)
    held = rng.random(experts) < 0.5
    local = np.where(held, np.cumsum(held) - 1, -1).astype(np.int32) if with_map else np.arange(experts, dtype=np.int32)
    seen = np.where((ids < 0) | (ids >= experts), -1, ids)
    want = align(seen[:, None], experts, block, expert_map=local)

    sizes = (problem.bound, problem.bound // block, 1)
    outs = [device.allocate(4 * n) for n in sizes]
    topk = device.upload(ids)
    expert_map = device.upload(local) if with_map else 0
    workspace = device.allocate(4 * variant.workspace_ints(problem))
    arguments = (topk, expert_map, *outs, ids.size, experts, block, sizes[0], sizes[1], -1)
    device.kernels.launch(variant, problem, ids.itemsize == 8, int(device.stream.handle), arguments, workspace)
    got = [device.download(address, n) for address, n in zip(outs, sizes, strict=True)]
    device.free()
    expected = np.full(sizes[0], ids.size, np.int32), np.full(sizes[1], -1, np.int32)
    expected[0][: want.num_tokens_post_padded] = want.sorted_token_ids
    expected[1][: want.num_blocks] = want.expert_ids
    same = all(np.array_equal(a, b) for a, b in zip(got[:2], expected, strict=True))
    return same and int(got[2][0]) == want.num_tokens_post_padded


def cases(gpu: Gpu) -> Iterator[tuple[Variant, NDArray[Any], int, int, bool]]:
    """Variant, ids, experts, block size, with an expert map: none, few, many and as many routes as it takes."""
    rng = np.random.default_rng(SEED)
    for variant in VARIANTS.values():
        full = variant.capacity or 3 * variant.threads * variant.items
        for experts in EXPERTS:
            for number, routes in enumerate((0, 5, full // 2 + 1, full)):
                block = 64 if routes > 1024 else 8
                if not variant.takes(Problem(routes, experts, block), gpu):
                    continue
                ids = rng.integers(0, experts, min(routes, MOST)).astype(np.int64 if number % 2 else np.int32)
                if ids.size > 3:
                    ids[1:3] = -1, experts
                yield variant, ids, experts, block, number % 2 == (variant.kind is Kind.CLUSTER)


def main() -> int:
    """Exit code 1 if a case differs."""
    device = Device()
    number, wrong = 0, []
    for variant, ids, experts, block, with_map in cases(device.kernels.gpu):
        number += 1
        if not equal(device, variant, ids, experts, block, with_map):
            wrong.append(f"{variant.name}: {ids.size} routes {ids.dtype}, {experts} experts, block {block}")
    for line in wrong:
        print(line)
    print(f"{number} cases, {len(wrong)} differences")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
