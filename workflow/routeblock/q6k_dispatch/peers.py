# SPDX-License-Identifier: Apache-2.0
"""What others have for the same jobs: vllm-gguf-plugin's operators through torch, llama.cpp's through ggml's C API."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from routeblock.cuda import align
from routeblock.errors import InputError

GGML_F32, GGML_Q6_K, GGML_I32 = 0, 14, 26  # enum ggml_type
CONTEXT_BYTES = 1 << 20


class Plugin:
    """The operators of `_C_gguf.abi3.so` at `path`. Raises InputError if it does not load."""

    def __init__(self, path: Path) -> None:
        try:
            torch.ops.load_library(str(path))
        except OSError as e:
            raise InputError(
                f"does not load: {str(e).splitlines()[0]}",
                where=str(path),
                limit="the extension of vllm-gguf-plugin 0.0.3 beside torch 2.11",
                way_out="install envs/peers.txt",
            ) from e
        self._ops = torch.ops._C_gguf
        self.block_size = int(self._ops.ggml_moe_get_block_size(GGML_Q6_K))

    def vec(self, x: Any, weights: Any, ids: Any, rows: int) -> Any:
        """float32 [tokens * top_k, rows]; ids int32 [tokens, top_k], none negative: it would read out of bounds."""
        return self._ops.ggml_moe_a8_vec(x, weights, ids, ids.shape[1], GGML_Q6_K, rows, ids.shape[0])


class Batched:
    """`ggml_moe_a8` behind the canonical alignment, with buffers for one shape."""

    def __init__(self, plugin: Plugin, ids: Any, experts: int) -> None:
        self._plugin, self._ids, self._experts = plugin, ids, experts
        block, routes = plugin.block_size, ids.numel()
        bound = min(routes * block, routes + experts * (block - 1)) // block * block
        buffers = (bound, bound // block, 1, max(4, align.workspace_size(routes, experts, block, ids.device.index)))
        self._out = [torch.empty(n, dtype=torch.int32, device=ids.device) for n in buffers]

    def __call__(self, x: Any, weights: Any, rows: int) -> Any:
        sorted_ids, expert_ids, padded, workspace = self._out
        align.moe_align_block_size(
            self._ids, self._experts, self._plugin.block_size, sorted_ids, expert_ids, padded, workspace=workspace
        )
        tokens, top_k = self._ids.shape
        return self._plugin._ops.ggml_moe_a8(x, weights, sorted_ids, expert_ids, padded, GGML_Q6_K, rows, top_k, tokens)


class _InitParameters(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class LlamaCpp:
    """ggml's CUDA backend from `libggml-base.so` and `libggml-cuda.so` in `folder`.

    CUDA's own libraries must already be in the process (torch brings them). Raises InputError if it does not load.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
            self._cuda = ctypes.CDLL(str(folder / "libggml-cuda.so"), mode=ctypes.RTLD_GLOBAL)
            self._cuda.ggml_backend_cuda_init.restype = ctypes.c_void_p
        except (OSError, AttributeError) as e:
            raise InputError(
                f"does not load: {e}",
                where=str(folder),
                limit="ggml's libraries of @node-llama-cpp/linux-x64-cuda 3.14.5 beside CUDA 13",
                way_out="leave llama.cpp out",
            ) from e
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        for name, result, arguments in (
            ("ggml_init", pointer, [_InitParameters]),
            ("ggml_free", None, [pointer]),
            ("ggml_new_tensor_3d", pointer, [pointer, ctypes.c_int, integer, integer, integer]),
            ("ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, integer, integer]),
            ("ggml_mul_mat_id", pointer, [pointer] * 4),
            ("ggml_new_graph", pointer, [pointer]),
            ("ggml_build_forward_expand", None, [pointer, pointer]),
            ("ggml_backend_alloc_ctx_tensors", pointer, [pointer, pointer]),
            ("ggml_backend_buffer_free", None, [pointer]),
            ("ggml_backend_tensor_set", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
            ("ggml_backend_tensor_get", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
            ("ggml_backend_graph_compute", ctypes.c_int, [pointer, pointer]),
        ):
            function = getattr(self._base, name)
            function.restype, function.argtypes = result, arguments
        self.backend = self._cuda.ggml_backend_cuda_init(0)
        if not self.backend:
            raise InputError(
                "no CUDA backend", where=str(folder), limit="a GPU that ggml takes", way_out="leave llama.cpp out"
            )

    def open(
        self, weights: NDArray[np.uint8], x: NDArray[np.float32], ids: NDArray[np.int32], nodes: int
    ) -> LlamaShape:
        """Jobs of one shape on the device: weights uint8 [experts, rows, blocks, 210], ids int32 [tokens, top_k]."""
        return LlamaShape(self, weights, x, ids, nodes)


class LlamaShape:
    """One shape: two ggml graphs of independent nodes, `nodes` and three times as many."""

    def __init__(
        self, ggml: LlamaCpp, weights: NDArray[np.uint8], x: NDArray[np.float32], ids: NDArray[np.int32], nodes: int
    ) -> None:
        self._ggml, self.nodes = ggml, nodes
        base = ggml._base
        experts, rows, blocks, _ = weights.shape
        tokens, top_k = ids.shape
        self._shape = (tokens * top_k, rows)
        self._context = base.ggml_init(_InitParameters(CONTEXT_BYTES, None, True))
        a = base.ggml_new_tensor_3d(self._context, GGML_Q6_K, 256 * blocks, rows, experts)
        b = base.ggml_new_tensor_3d(self._context, GGML_F32, 256 * blocks, 1, tokens)
        c = base.ggml_new_tensor_2d(self._context, GGML_I32, top_k, tokens)
        self._outs = [base.ggml_mul_mat_id(self._context, a, b, c) for _ in range(3 * nodes)]
        self._buffer = base.ggml_backend_alloc_ctx_tensors(self._context, ggml.backend)
        given: tuple[tuple[int, NDArray[Any]], ...] = ((a, weights), (b, x), (c, ids))
        for tensor, array in given:
            whole = np.ascontiguousarray(array)
            base.ggml_backend_tensor_set(tensor, whole.ctypes.data, 0, whole.nbytes)
        self._graphs = []
        for count in (nodes, 3 * nodes):
            graph = base.ggml_new_graph(self._context)
            for out in self._outs[:count]:
                base.ggml_build_forward_expand(graph, out)
            self._graphs.append(graph)

    def _run(self, graph: int) -> float:
        begin = time.perf_counter()
        status = self._ggml._base.ggml_backend_graph_compute(self._ggml.backend, graph)
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute: {status}")
        return (time.perf_counter() - begin) * 1e6

    def warm_up(self, times: int) -> None:
        """Run both graphs; ggml may capture them in the meantime."""
        for _ in range(times):
            for graph in self._graphs:
                self._run(graph)

    def node_us(self) -> float:
        """Microseconds of one node."""
        few, many = (self._run(graph) for graph in self._graphs)
        return (many - few) / (2 * self.nodes)

    def output(self) -> NDArray[np.float32]:
        """float32 [tokens * top_k, rows] of the first node."""
        self._run(self._graphs[0])
        out = np.empty(self._shape, np.float32)
        self._ggml._base.ggml_backend_tensor_get(self._outs[0], out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        """Free what the shape holds."""
        self._ggml._base.ggml_backend_buffer_free(self._buffer)
        self._ggml._base.ggml_free(self._context)
