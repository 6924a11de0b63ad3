# SPDX-License-Identifier: Apache-2.0
"""q6k_dispatch.cu on a CPU: compiled by the host's C++ compiler over a small form of CUDA, called with numpy arrays."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import routeblock.cuda
from routeblock.cuda.q6k_plan import Plan, Sizes, quantized_bytes

HERE = Path(__file__).with_name("emulator")
SOURCES = Path(routeblock.cuda.__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
POISON = 0x7F
GUARD = 256


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ids", "weights", "source", "out")),
        *(
            (name, ctypes.c_int)
            for name in (
                *("slots", "experts", "top_k", "rows", "blocks"),
                *("tile_rows", "tiles", "slabs", "capacity", "few", "fused"),
            )
        ),
    ]


def build(folder: Path) -> ctypes.CDLL:
    """Compile the emulation into `folder` and load it."""
    assert COMPILER
    library = folder / "libq6k.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w"]
    command = [COMPILER, *flags, f"-I{SOURCES}", f"-I{HERE}", "-x", "c++", str(HERE / "q6k_dispatch.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _aligned(size: int) -> NDArray[np.uint8]:
    """`size` poisoned bytes at a multiple of 16, with a guard on both sides in `.base`."""
    whole = np.full(size + 2 * GUARD + 16, POISON, np.uint8)
    start = GUARD + -(whole.ctypes.data + GUARD) % 16
    return whole[start : start + size]


def _untouched(array: NDArray[np.uint8]) -> bool:
    whole = array.base
    assert whole is not None
    start = array.ctypes.data - whole.ctypes.data
    return bool((whole[:start] == POISON).all() and (whole[start + array.size :] == POISON).all())


def products(
    library: ctypes.CDLL,
    sizes: Sizes,
    launch: Plan,
    ids: NDArray[np.int32],
    x: NDArray[np.float32],
    weights: NDArray[np.uint8],
    seed: int = 0,
) -> NDArray[np.float32]:
    """The output float32 [slots, rows] of one call; what nothing was written to holds bytes of `POISON`.

    Raises AssertionError if a thread writes beside a buffer or its shared memory.
    """
    copy = _aligned(weights.nbytes)
    copy[:] = weights.reshape(-1)
    out = _aligned(4 * sizes.slots * sizes.rows)
    inputs = _aligned(x.nbytes)
    inputs[:] = x.reshape(-1).view(np.uint8)
    source = inputs
    numbers = (sizes.slots, sizes.experts, sizes.top_k, sizes.rows, sizes.blocks)
    chosen = (launch.tile_rows, launch.tiles, launch.slabs, launch.capacity, launch.few, int(launch.fused))

    def run(name: str, grid: int, threads: int, shared: int, to: NDArray[Any]) -> None:
        pointers = (ids.ctypes.data, copy.ctypes.data, source.ctypes.data, to.ctypes.data)
        arguments = _Arguments(*pointers, *numbers, *chosen)
        full = f"{name}_{sizes.suffix}".encode()
        assert library.emulate(full, grid, threads, shared, seed, ctypes.byref(arguments)) == 0

    if not launch.fused:
        quantized = _aligned(quantized_bytes(sizes))
        run("quantize", sizes.tokens, 64, 0, quantized)
        assert _untouched(quantized)
        source = quantized
    run("dispatch", launch.grid, launch.threads, launch.shared_bytes, out)
    assert _untouched(out)
    return out.view(np.float32).reshape(sizes.slots, sizes.rows)
