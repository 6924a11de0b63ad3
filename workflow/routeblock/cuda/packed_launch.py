# SPDX-License-Identifier: Apache-2.0
"""A kernel launch whose parameters are packed once: each call writes pointers into them and hands them to the driver.

For kernels that Python enqueues often, where the host's time counts. cuLaunchKernelEx is called through ctypes with the
interpreter's lock held: no Python object is made for a parameter, and no other thread can come between writing them and
the driver's reading. Layouts of CUlaunchConfig and CUlaunchAttribute: cuda.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Any

_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _driver() -> Any:
    # PyDLL keeps the interpreter's lock during the call.
    return ctypes.PyDLL("libcuda.so.1")


@dataclass(frozen=True)
class Step:
    """A kernel: CUfunction or CUkernel handle, blocks and threads along x, dynamic shared memory, blocks a cluster."""

    function: int
    grid: int
    block: int
    shared_bytes: int = 0
    cluster: int = 1


class PackedLaunch:
    """Kernels that are enqueued one after the other with the same `parameters`, pointers or 32-bit integers.

    Belongs to one thread: calls from two threads would write the same parameters.
    """

    def __init__(self, parameters: int, steps: Sequence[Step]) -> None:
        self._pack = Struct(f"={parameters}q").pack_into
        self._values = ctypes.create_string_buffer(8 * parameters)
        start = ctypes.addressof(self._values)
        # Each value has eight bytes; a kernel reads the first four of an integer, whatever its sign.
        pointers = (ctypes.c_void_p * parameters)(*range(start, start + 8 * parameters, 8))
        self._enqueue = _driver().cuLaunchKernelEx
        self._calls: list[tuple[_Config, tuple[Any, ...]]] = []
        for step in steps:
            config = _Config((step.grid, 1, 1), (step.block, 1, 1), step.shared_bytes)
            if step.cluster > 1:
                attribute = _Attribute(_CLUSTER_DIMENSION)
                attribute.value[:3] = (step.cluster, 1, 1)
                config.attributes = ctypes.pointer(attribute)
                config.attribute_count = 1
            arguments = (ctypes.byref(config), ctypes.c_void_p(step.function), pointers, None)
            self._calls.append((config, arguments))

    def __call__(self, stream: int, values: Sequence[int]) -> None:
        """Enqueue on the stream with this handle, in the current context. Raises RuntimeError if the driver refuses."""
        self._pack(self._values, 0, *values)
        for config, arguments in self._calls:
            config.stream = stream
            if status := self._enqueue(*arguments):
                raise RuntimeError(f"cuLaunchKernelEx: error {status} of the CUDA driver")
