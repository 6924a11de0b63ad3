# SPDX-License-Identifier: Apache-2.0
"""awq_moe.cu on a CPU: compiled by the host's C++ compiler over a small form of CUDA, called with numpy arrays."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import routeblock.cuda
from routeblock.cuda.awq_moe_plan import SUM_THREADS, Gemm, Launch, Plan, Sizes
from routeblock.moe.awq import marlin_pack_zeros, marlin_permute_scales, marlin_repack_weights
from routeblock.moe.routing import AlignedPlan
from routeblock.twin.layer import GemmWeights

HERE = Path(__file__).with_name("emulator")
SOURCES = Path(routeblock.cuda.__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
POISON = 0x7F
GUARD = 256


class _Arguments(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("input", "q", "scales", "zeros", "out", "sorted_token_ids", "expert_ids"),
                *("num_tokens_post_padded", "topk_weights", "ids", "expert_map"),
            )
        ),
        *((name, ctypes.c_int) for name in ("routes", "top_k", "n", "k", "groups", "group_shift", "experts", "tokens")),
    ]


def build(folder: Path, *defines: str) -> ctypes.CDLL:
    """Compile the emulation into `folder` and load it. defines: macros, NAME or NAME=VALUE."""
    assert COMPILER
    library = folder / "libawq.so"
    flags = [
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        "-pthread",
        "-w",
        *(f"-D{d}" for d in defines),
    ]
    command = [COMPILER, *flags, f"-I{SOURCES}", f"-I{HERE}", "-x", "c++", str(HERE / "awq_moe.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def guarded(size: int) -> NDArray[np.uint8]:
    """`size` poisoned bytes at a multiple of 16, with a guard on both sides in `.base`."""
    whole = np.full(size + 2 * GUARD + 16, POISON, np.uint8)
    start = GUARD + -(whole.ctypes.data + GUARD) % 16
    return whole[start : start + size]


def copied(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of `array` as `guarded` has them."""
    copy = guarded(array.nbytes)
    copy[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return copy


def untouched(array: NDArray[np.uint8]) -> bool:
    """Whether the guards of a `guarded` array are whole."""
    whole = array.base
    assert whole is not None
    start = array.ctypes.data - whole.ctypes.data
    return bool((whole[:start] == POISON).all() and (whole[start + array.size :] == POISON).all())


@dataclass(frozen=True)
class Marlin:
    """One GEMM's weights as vLLM holds them: bytes of q, scales and zero points of all experts."""

    q: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    zeros: NDArray[np.uint8] | None


def marlin(weights: GemmWeights) -> Marlin:
    """Pack the twin's weights."""
    zeros = None
    if weights.zeros is not None:
        zeros = copied(np.stack([marlin_pack_zeros(z) for z in weights.zeros]))
    return Marlin(
        copied(np.stack([marlin_repack_weights(q) for q in weights.q])),
        copied(np.stack([marlin_permute_scales(s) for s in weights.scales])),
        zeros,
    )


@dataclass
class Machine:
    """How the emulation runs: order of threads, when copies happen, whose tensor core."""

    library: ctypes.CDLL
    seed: int = 0
    late_copies: bool = False
    architecture: str = "hopper"

    def _run(self, name: str, grid: int, threads: int, shared: int, arguments: _Arguments) -> None:
        hopper = int(self.architecture == "hopper")
        settings = (self.seed, int(self.late_copies), hopper)
        status = self.library.emulate(name.encode(), grid, threads, shared, *settings, ctypes.byref(arguments))
        assert status == 0, (name, status)

    def gemm(
        self,
        sizes: Sizes,
        gemm: Gemm,
        launch: Launch,
        x: NDArray[Any],
        weights: Marlin,
        plan: AlignedPlan,
        topk_weights: NDArray[np.float32],
    ) -> NDArray[Any]:
        """The output [routes, I or H] of one GEMM; rows that nothing was written to hold bytes of `POISON`.

        Raises AssertionError if a thread writes beside a buffer or its shared memory.
        """
        n, k = sizes.shape(gemm)
        width = n // 2 if gemm == "w13" else n
        rows, out = copied(x), guarded(2 * sizes.routes * width)
        ids, experts = np.ascontiguousarray(plan.sorted_token_ids), np.ascontiguousarray(plan.expert_ids)
        total = np.array([plan.num_tokens_post_padded], np.int32)
        used = np.ascontiguousarray(topk_weights)
        zeros = None if weights.zeros is None else weights.zeros.ctypes.data
        arguments = _Arguments(
            rows.ctypes.data, weights.q.ctypes.data, weights.scales.ctypes.data, zeros, out.ctypes.data,
            ids.ctypes.data, experts.ctypes.data, total.ctypes.data, used.ctypes.data, None, None,
            sizes.routes, sizes.top_k, n, k, sizes.groups(gemm), sizes.group_shift(gemm), sizes.experts, sizes.tokens,
        )  # fmt: skip
        self._run(
            f"{gemm}_{sizes.kind}_{launch.form.name}", launch.grid, launch.threads, launch.shared_bytes, arguments
        )
        assert untouched(out)
        return out.view(x.dtype).reshape(sizes.routes, width)

    def sum_routes(
        self,
        sizes: Sizes,
        rows: NDArray[Any],
        ids: NDArray[Any] | None = None,
        expert_map: NDArray[np.int32] | None = None,
    ) -> NDArray[Any]:
        """The sum over top-k of rows [routes, H]. ids: int32 or int64, None where every route has an expert here."""
        source, out = copied(rows), guarded(2 * sizes.tokens * sizes.hidden)
        wide = ids is not None and ids.dtype == np.int64
        experts = sizes.experts if expert_map is None else expert_map.size
        arguments = _Arguments(input=source.ctypes.data, out=out.ctypes.data)
        arguments.ids = None if ids is None else ids.ctypes.data
        arguments.expert_map = None if expert_map is None else expert_map.ctypes.data
        arguments.experts, arguments.tokens, arguments.top_k = experts, sizes.tokens, sizes.top_k
        arguments.n = sizes.hidden
        grid = -(-sizes.tokens * sizes.hidden // 8 // SUM_THREADS)
        name = f"sum_{sizes.kind.split('_')[0]}_i{64 if wide else 32}"
        self._run(name, grid, SUM_THREADS, 0, arguments)
        assert untouched(out)
        return out.view(rows.dtype).reshape(sizes.tokens, sizes.hidden)

    def layer(
        self,
        sizes: Sizes,
        launches: Plan,
        hidden: NDArray[Any],
        topk_ids: NDArray[np.int32],
        topk_weights: NDArray[np.float32],
        w13: Marlin,
        w2: Marlin,
        plan: AlignedPlan,
        expert_map: NDArray[np.int32] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """activation, w2 and final of one layer."""
        activation = self.gemm(sizes, "w13", launches.w13, hidden, w13, plan, topk_weights)
        rows = self.gemm(sizes, "w2", launches.w2, activation, w2, plan, topk_weights)
        final = self.sum_routes(sizes, rows, None if expert_map is None else topk_ids, expert_map)
        return {"activation": activation, "w2": rows, "final": final}
