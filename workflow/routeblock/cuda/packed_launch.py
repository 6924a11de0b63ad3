# SPDX-License-Identifier: Apache-2.0
"""A kernel launch whose parameters are packed once: each call writes pointers into them and hands them to the driver.

For kernels that Python enqueues often, where the host's time counts. cuLaunchKernelEx is called through ctypes with the
interpreter's lock held: no Python object is made for a parameter, and no other thread can come between writing them and
the driver's reading. Layouts of CUlaunchConfig and CUlaunchAttribute: cuda.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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


class PackedLaunch:
    """One launch of `function` (CUfunction or CUkernel handle) with `parameters` pointers or 32-bit integers.

    grid, block: blocks and threads along x; shared_bytes: dynamic shared memory of a block; cluster: blocks a cluster,
    1 for none. Belongs to one thread: calls from two threads would write the same parameters.
    """

    def __init__(
        self, function: int, parameters: int, *, grid: int, block: int, shared_bytes: int, cluster: int = 1
    ) -> None:
        self._pack = Struct(f"={parameters}q").pack_into
        self._values = ctypes.create_string_buffer(8 * parameters)
        start = ctypes.addressof(self._values)
        # Each value has eight bytes; the kernel reads the first four of an integer, whatever its sign.
        self._pointers = (ctypes.c_void_p * parameters)(*range(start, start + 8 * parameters, 8))
        self._config = _Config((grid, 1, 1), (block, 1, 1), shared_bytes)
        if cluster > 1:
            self._attribute = _Attribute(_CLUSTER_DIMENSION)
            self._attribute.value[:3] = (cluster, 1, 1)
            self._config.attributes = ctypes.pointer(self._attribute)
            self._config.attribute_count = 1
        self._arguments = (ctypes.byref(self._config), ctypes.c_void_p(function), self._pointers, None)
        self._enqueue = _driver().cuLaunchKernelEx

    def __call__(self, stream: int, values: Sequence[int]) -> None:
        """Enqueue on the stream with this handle, in the current context. Raises RuntimeError if the driver refuses."""
        self._pack(self._values, 0, *values)
        self._config.stream = stream
        if status := self._enqueue(*self._arguments):
            raise RuntimeError(f"cuLaunchKernelEx: error {status} of the CUDA driver")
