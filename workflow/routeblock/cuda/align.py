# SPDX-License-Identifier: Apache-2.0
"""Canonical alignment on the GPU, for torch tensors: the contract of vLLM's `moe_align_block_size`, without its race.

Order inside an expert is by route id, so the result depends on the routing alone. Experts stand in the order of their
global ids, as in `routeblock.moe.routing.align`. Nothing here waits for the GPU or allocates on it, so a call can be
captured in a CUDA graph; only the first call for a device compiles and loads the kernels (`prepare` does it ahead).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from routeblock.cuda.align_kernels import Kernels
from routeblock.cuda.align_variants import MAX_EXPERTS, VARIANTS, Gpu, Problem, Variant, serving
from routeblock.errors import InputError

INACTIVE = -1  # what stands in expert_ids behind the last block
_INT32_MAX = 2**31 - 1
_INT32, _IDS = ("int32",), ("int32", "int64")


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
    return _served(prepare(device).gpu, routes, num_experts, block_size, variant).workspace


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
    anything in it, or a function of device and entries that gives one where a call needs it. variant: a name of
    `align_variants.VARIANTS` instead of the one that serves this size. All on one CUDA device, contiguous. Raises
    InputError, without a launch, for anything else.
    """
    device = topk_ids.device
    _tensor("topk_ids", topk_ids, device, _IDS)
    kernels = prepare(device.index)
    served = _served(kernels.gpu, topk_ids.numel(), num_experts, block_size, variant)
    _output("sorted_token_ids", sorted_token_ids, device, served.slots)
    _output("expert_ids", expert_ids, device, served.blocks)
    _output("num_tokens_post_padded", num_tokens_post_padded, device, 1)
    if expert_map is not None:
        _tensor("expert_map", expert_map, device, _INT32)
        if expert_map.numel() != num_experts:
            raise _refuse(
                f"expert map of {expert_map.numel()} entries",
                f"one for each of the {num_experts} global experts",
                "pass the whole map",
            )
    space = None
    if served.workspace:
        space = workspace(device, served.workspace) if callable(workspace) else _checked(workspace, device, served)
    _launch(
        kernels,
        served.variant,
        served.problem,
        topk_ids.element_size() == 8,
        (
            topk_ids.data_ptr(),
            0 if expert_map is None else expert_map.data_ptr(),
            sorted_token_ids.data_ptr(),
            expert_ids.data_ptr(),
            num_tokens_post_padded.data_ptr(),
            served.problem.routes,
            num_experts,
            block_size,
            sorted_token_ids.numel(),
            expert_ids.numel(),
            inactive,
        ),
        space,
    )


def _launch(
    kernels: Kernels, variant: Variant, problem: Problem, wide: bool, arguments: tuple[int, ...], workspace: Any
) -> None:
    import torch

    address = 0 if workspace is None else workspace.data_ptr()
    if torch.cuda.current_device() == kernels.index:
        kernels.launch(variant, problem, wide, current_stream(kernels.index), arguments, address)
        return
    with torch.cuda.device(kernels.index):
        kernels.launch(variant, problem, wide, current_stream(kernels.index), arguments, address)


def current_stream(device: int) -> int:
    """The handle of torch's current stream on a device."""
    import torch

    # torch's public form makes an object per call; this one is what Triton's launcher uses.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(raw(device) if raw else torch.cuda.current_stream(device).cuda_stream)


@dataclass(frozen=True)
class _Served:
    """What follows from the sizes of a call alone: least entries of the outputs and of the workspace."""

    problem: Problem
    variant: Variant
    slots: int
    blocks: int
    workspace: int


@lru_cache(maxsize=4096)
def _served(gpu: Gpu, routes: int, num_experts: int, block_size: int, variant: str | None) -> _Served:
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise _refuse(f"{num_experts} experts", f"1 to {MAX_EXPERTS}", "split the experts")
    if not 1 <= block_size <= _INT32_MAX:
        raise _refuse(f"block size {block_size}", "1 or more", "choose the block size of the GEMM")
    problem = Problem(routes, num_experts, block_size)
    if problem.bound > _INT32_MAX or routes > _INT32_MAX - (1 << 20):
        raise _refuse(f"{routes} routes in blocks of {block_size}", "slots are counted in int32", "split the batch")
    chosen = _pick(problem, gpu, variant)
    return _Served(problem, chosen, problem.bound, problem.bound // block_size, chosen.workspace_ints(problem))


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


def _output(name: str, tensor: Any, device: Any, least: int) -> None:
    _tensor(name, tensor, device, _INT32, least)
    if tensor.numel() > _INT32_MAX:
        raise _refuse(f"{name} of {tensor.numel()} entries", f"at most {_INT32_MAX}", "pass a smaller buffer")


def _checked(workspace: Any, device: Any, served: _Served) -> Any:
    if workspace is None:
        raise _refuse(
            f"{served.problem.routes} routes without a workspace",
            f"{served.variant.name} needs int32 [{served.workspace}]",
            "allocate workspace_size(...) entries once and pass them",
        )
    _tensor("workspace", workspace, device, _INT32, served.workspace)
    if workspace.data_ptr() % 16:
        raise _refuse(
            f"workspace at address {workspace.data_ptr():#x}", "a multiple of 16", "pass the start of an allocation"
        )
    return workspace


def _tensor(name: str, tensor: Any, device: Any, dtypes: tuple[str, ...], least: int = 0) -> None:
    found = tensor.device
    if found != device or found.type != "cuda":
        raise _refuse(f"{name} on {found}", f"{device if device.type == 'cuda' else 'a CUDA device'}", "move it")
    if dtype_name(tensor.dtype) not in dtypes:
        raise _refuse(f"{name} of {dtype_name(tensor.dtype)}", " or ".join(dtypes), "convert it")
    if not tensor.is_contiguous():
        raise _refuse(f"{name} with strides {tuple(tensor.stride())}", "a contiguous tensor", "call .contiguous()")
    if tensor.numel() < least:
        raise _refuse(f"{name} of {tensor.numel()} entries", f"at least {least} are needed", "allocate more")


@cache
def dtype_name(dtype: Any) -> str:
    """`int32` for torch.int32."""
    return str(dtype).removeprefix("torch.")


def _refuse(what: str, limit: str, way_out: str) -> InputError:
    return InputError(what, where="canonical alignment", limit=limit, way_out=way_out)
