# SPDX-License-Identifier: Apache-2.0
"""Canonical alignment on the GPU, for torch tensors: the contract of vLLM's `moe_align_block_size`, without its race.

Order inside an expert is by route id, so the result depends on the routing alone. Experts stand in the order of their
global ids, as in `routeblock.moe.routing.align`. Nothing here waits for the GPU or allocates on it, so a call can be
captured in a CUDA graph; only the first call for a device compiles and loads the kernels (`prepare` does it ahead).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from routeblock.cuda.align_kernels import Kernels
from routeblock.cuda.align_variants import MAX_EXPERTS, VARIANTS, Gpu, Problem, Variant, serving
from routeblock.errors import InputError

INACTIVE = -1  # what stands in expert_ids behind the last block
_INT32_MAX = 2**31 - 1


@cache
def prepare(device: int) -> Kernels:
    """Compile the kernels for a device and load them; once a process.

    Raises InputError if torch's device is older than sm_75, or cuda-core or an NVRTC for it is missing.
    """
    import torch

    properties = torch.cuda.get_device_properties(device)
    gpu = Gpu((properties.major, properties.minor), properties.shared_memory_per_block_optin)
    if gpu.capability < (7, 5):
        raise _refuse(f"device {device} is {gpu.architecture}", "sm_75 or newer", "run on another GPU")
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the device's primary context the current one
        return Kernels(device, gpu)


def workspace_size(routes: int, num_experts: int, block_size: int, device: int, variant: str | None = None) -> int:
    """int32 entries of workspace that a call of these sizes needs; 0 for all that one launch does."""
    problem = Problem(routes, num_experts, block_size)
    return _pick(problem, prepare(device).gpu, variant).workspace_ints(problem)


def moe_align_block_size(
    topk_ids: Any,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    expert_map: Any = None,
    *,
    inactive: int = INACTIVE,
    workspace: Any = None,
    variant: str | None = None,
) -> None:
    """Align routes on the GPU, on torch's current stream, into the caller's buffers. Arguments as vLLM's operator.

    topk_ids: int32 or int64, any shape, of the global ids; ids that name no expert take no slot. sorted_token_ids
    int32 [at least min(routes * block_size, routes + num_experts * (block_size - 1)), whole blocks], expert_ids int32
    [at least one a block of it], num_tokens_post_padded int32 [1]: written whole, sentinel `routes` and `inactive`
    beyond what is used. expert_map: int32 [num_experts], local id or -1. workspace: int32 [`workspace_size`], with
    anything in it. variant: a name of `align_variants.VARIANTS` instead of the one that serves this size. All on one
    CUDA device, contiguous. Raises InputError, without a launch, for anything else.
    """
    problem = _check(
        topk_ids, num_experts, block_size, sorted_token_ids, expert_ids, num_tokens_post_padded, expert_map
    )
    kernels = prepare(topk_ids.device.index)
    chosen = _pick(problem, kernels.gpu, variant)
    needed = chosen.workspace_ints(problem)
    if needed:
        if workspace is None:
            raise _refuse(
                f"{problem.routes} routes without a workspace",
                f"{chosen.name} needs int32 [{needed}]",
                "allocate workspace_size(...) entries once and pass them",
            )
        _tensor("workspace", workspace, topk_ids.device, ("int32",), least=needed)
        if workspace.data_ptr() % 16:
            raise _refuse(
                f"workspace at address {workspace.data_ptr():#x}", "a multiple of 16", "pass the start of an allocation"
            )
    _launch(
        kernels,
        chosen,
        problem,
        topk_ids.element_size() == 8,
        (
            topk_ids.data_ptr(),
            0 if expert_map is None else expert_map.data_ptr(),
            sorted_token_ids.data_ptr(),
            expert_ids.data_ptr(),
            num_tokens_post_padded.data_ptr(),
            ctypes.c_int(problem.routes),
            ctypes.c_int(num_experts),
            ctypes.c_int(block_size),
            ctypes.c_int(sorted_token_ids.numel()),
            ctypes.c_int(expert_ids.numel()),
            ctypes.c_int(inactive),
        ),
        workspace,
    )


def _launch(
    kernels: Kernels, variant: Variant, problem: Problem, wide: bool, arguments: tuple[Any, ...], workspace: Any
) -> None:
    import torch

    with torch.cuda.device(kernels.index):
        stream = torch.cuda.current_stream().cuda_stream
        kernels.launch(variant, problem, wide, stream, arguments, 0 if workspace is None else workspace.data_ptr())


def _pick(problem: Problem, gpu: Gpu, name: str | None) -> Variant:
    if name is None:
        return serving(problem, gpu)
    chosen = VARIANTS.get(name)
    if chosen is None:
        raise _refuse(f"variant {name!r}", f"one of {', '.join(VARIANTS)}", "choose one of them, or none")
    if not chosen.takes(problem, gpu):
        raise _refuse(
            f"{name} with {problem.routes} routes, {problem.experts} experts, block size {problem.block_size}",
            f"{chosen.capacity or 'any number of'} routes, {4 * chosen.threads} experts, "
            f"{gpu.shared_bytes} bytes of shared memory on {gpu.architecture}",
            "leave the choice of the variant to the table",
        )
    return chosen


def _check(
    topk_ids: Any,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    expert_map: Any,
) -> Problem:
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise _refuse(f"{num_experts} experts", f"1 to {MAX_EXPERTS}", "split the experts")
    if not 1 <= block_size <= _INT32_MAX:
        raise _refuse(f"block size {block_size}", "1 or more", "choose the block size of the GEMM")
    device = topk_ids.device
    _tensor("topk_ids", topk_ids, device, ("int32", "int64"))
    problem = Problem(topk_ids.numel(), num_experts, block_size)
    if problem.bound > _INT32_MAX or problem.routes > _INT32_MAX - (1 << 20):
        raise _refuse(
            f"{problem.routes} routes in blocks of {block_size}", "slots are counted in int32", "split the batch"
        )
    for name, tensor, least in (
        ("sorted_token_ids", sorted_token_ids, problem.bound),
        ("expert_ids", expert_ids, problem.bound // block_size),
        ("num_tokens_post_padded", num_tokens_post_padded, 1),
    ):
        _tensor(name, tensor, device, ("int32",), least=least)
        if tensor.numel() > _INT32_MAX:
            raise _refuse(f"{name} of {tensor.numel()} entries", f"at most {_INT32_MAX}", "pass a smaller buffer")
    if expert_map is not None:
        _tensor("expert_map", expert_map, device, ("int32",))
        if expert_map.numel() != num_experts:
            raise _refuse(
                f"expert map of {expert_map.numel()} entries",
                f"one for each of the {num_experts} global experts",
                "pass the whole map",
            )
    return problem


def _tensor(name: str, tensor: Any, device: Any, dtypes: tuple[str, ...], least: int = 0) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cuda" or tensor.device != device:
        raise _refuse(
            f"{name} on {tensor.device}", f"{device if device.type == 'cuda' else 'a CUDA device'}", "move it"
        )
    if dtype not in dtypes:
        raise _refuse(f"{name} of {dtype}", " or ".join(dtypes), "convert it")
    if not tensor.is_contiguous():
        raise _refuse(f"{name} with strides {tuple(tensor.stride())}", "a contiguous tensor", "call .contiguous()")
    if tensor.numel() < least:
        raise _refuse(f"{name} of {tensor.numel()} entries", f"at least {least} are needed", "allocate more")


def _refuse(what: str, limit: str, way_out: str) -> InputError:
    return InputError(what, where="canonical alignment", limit=limit, way_out=way_out)
