# SPDX-License-Identifier: Apache-2.0
"""align.cu on a CPU: compiled by the host's C++ compiler over a small form of CUDA, called with numpy arrays."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import routeblock.cuda
from routeblock.cuda.align_variants import Kind, Problem, Variant

HERE = Path(__file__).with_name("emulator")
SOURCES = Path(routeblock.cuda.__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
POISON = -77


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("topk_ids", "expert_map", "sorted_ids", "expert_ids", "post_padded")),
        *(
            (name, ctypes.c_int)
            for name in ("routes", "experts", "block_size", "sorted_size", "blocks_size", "inactive", "slots")
        ),
        ("workspace", ctypes.c_void_p),
    ]


def build(folder: Path) -> ctypes.CDLL:
    """Compile the emulation into `folder` and load it."""
    assert COMPILER
    library = folder / "libalign.so"
    command = [COMPILER, "-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-w", f"-I{SOURCES}", f"-I{HERE}"]
    subprocess.run([*command, "-x", "c++", str(HERE / "align.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _pointer(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def align(
    library: ctypes.CDLL,
    variant: Variant,
    topk_ids: NDArray[Any],
    experts: int,
    block_size: int,
    expert_map: NDArray[np.int32] | None = None,
    *,
    inactive: int = -1,
    spare: int = 5,
    seed: int = 0,
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """sorted_token_ids, expert_ids and num_tokens_post_padded of one call, buffers `spare` larger than needed.

    `seed` shuffles the order in which the threads take turns. Raises AssertionError if a thread writes outside its
    shared memory or beside the buffers.
    """
    ids = np.ascontiguousarray(topk_ids).reshape(-1)
    problem = Problem(ids.size, experts, block_size)
    guard = 64
    outs = [
        np.full(n + 2 * guard, POISON, np.int32)
        for n in (problem.bound + spare, problem.bound // block_size + spare, 1, variant.workspace_ints(problem))
    ]
    inner = [o[guard:-guard] for o in outs]
    work = np.zeros(outs[3].size + 4, np.int32)
    aligned = work[(-work.ctypes.data % 16) // 4 :]
    aligned[:] = POISON
    arguments = _Arguments(
        _pointer(ids),
        _pointer(expert_map),
        *(_pointer(o) for o in inner[:3]),
        *(ids.size, experts, block_size, inner[0].size, inner[1].size, inactive, variant.slots(problem)),
        _pointer(aligned),
    )
    suffix = {4: "i32", 8: "i64"}[ids.itemsize]
    stages = ["_count", "_scatter"] if variant.kind is Kind.TILES else [""]
    for stage in stages:
        shared = 4 * (4 * ((experts + 4) // 4)) if stage == "_count" else variant.shared_bytes(problem)
        name = f"{variant.name}{stage}_{suffix}".encode()
        code = library.emulate(
            name, variant.parts(problem), variant.threads, variant.cluster, shared, seed, ctypes.byref(arguments)
        )
        assert code == 0, (name, code)
    for o in outs[:3]:
        assert (o[:guard] == POISON).all() and (o[-guard:] == POISON).all(), "wrote beside a buffer"
    assert (aligned[variant.workspace_ints(problem) :] == POISON).all(), "wrote beside the workspace"
    return inner[0], inner[1], int(inner[2][0])
