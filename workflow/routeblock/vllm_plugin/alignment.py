# SPDX-License-Identifier: Apache-2.0
"""Canonical alignment in vLLM: a `vllm.general_plugins` entry point, off unless ROUTEBLOCK_CANONICAL_ALIGNMENT=1.

It replaces the alignment of the Marlin and Humming MoE paths: the name that their modules look up (`contract`). Other
paths stay. Facts, from vLLM 0.24.0's model_executor/layers/fused_moe: buffer sizes; that an expert map reaches the
operator only with `ignore_invalid_experts`, and is else applied to the blocks' experts afterwards.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from routeblock.cuda.align import current_stream, dtype_name, moe_align_block_size, prepare
from routeblock.cuda.align_variants import MAX_EXPERTS
from routeblock.errors import InputError
from routeblock.vllm_plugin.contract import NAME, Contract, contract, known_versions
from routeblock.vllm_plugin.injection import VARIABLE as INJECTED
from routeblock.vllm_plugin.injection import InjectedAlignment, arrivals

VARIABLE = "ROUTEBLOCK_CANONICAL_ALIGNMENT"

Align = Callable[..., tuple[Any, ...]]
# Below vLLM's own logger, whose handler and level it takes.
logger = logging.getLogger("vllm.routeblock")
_declined: set[tuple[str, str]] = set()
_workspaces: dict[tuple[int, int], Any] = {}


class CanonicalAlignment:
    """What stands for vLLM's `moe_align_block_size`; `own` is vLLM's, for calls that cannot be served."""

    def __init__(self, own: Align) -> None:
        self.own = own

    def __call__(
        self,
        topk_ids: Any,
        block_size: int,
        num_experts: int,
        expert_map: Any = None,
        pad_sorted_ids: bool = False,
        ignore_invalid_experts: bool = False,
        return_scatter_idx: bool = False,
    ) -> tuple[Any, ...]:
        """Sorted ids, experts of blocks and the padded total, in canonical order; arguments and results as vLLM's.

        return_scatter_idx: a fourth result, int32 [routes, 1], each route's own number or -1 where it takes no slot.
        Raises InputError for what vLLM's kernel would read beyond a buffer, such as a map of another length.
        """
        reason = self._obstacle(topk_ids, num_experts)
        if reason:
            _decline(reason)
            given = (topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts)
            return self.own(*given, return_scatter_idx=True) if return_scatter_idx else self.own(*given)
        aligned = align(topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts)
        if not return_scatter_idx:
            return aligned
        return (*aligned, _scatter_index(topk_ids, num_experts, expert_map))

    def _obstacle(self, topk_ids: Any, num_experts: int) -> str:
        dtype = dtype_name(topk_ids.dtype)
        if topk_ids.device.type != "cuda":
            return f"ids on {topk_ids.device.type}"
        if dtype not in ("int32", "int64"):
            return f"ids of {dtype}"
        if num_experts > MAX_EXPERTS:
            return f"{num_experts} experts, {MAX_EXPERTS} are the most"
        try:
            prepare(topk_ids.device.index)
        except InputError as e:
            return str(e)
        return ""


def align(
    topk_ids: Any, block_size: int, num_experts: int, expert_map: Any, pad_sorted_ids: bool, ignore_invalid: bool
) -> tuple[Any, Any, Any]:
    """Canonical alignment into buffers of vLLM's sizes; allocates them on the device of the ids."""
    import torch

    routes = topk_ids.numel()
    length = routes + num_experts * (block_size - 1)
    if pad_sorted_ids:
        length = -(-length // block_size) * block_size
    if routes < num_experts:
        length = min(length, routes * block_size)

    def empty(size: int) -> Any:
        return torch.empty((size,), dtype=torch.int32, device=topk_ids.device)

    sorted_ids, expert_ids, total = empty(length), empty(-(-length // block_size)), empty(1)
    moe_align_block_size(
        topk_ids.contiguous(),
        num_experts,
        block_size,
        sorted_ids,
        expert_ids,
        total,
        expert_map if ignore_invalid else None,
        workspace=_workspace,
    )
    if expert_map is not None and not ignore_invalid:
        expert_ids = expert_map[expert_ids]
    return sorted_ids, expert_ids, total


def _scatter_index(topk_ids: Any, num_experts: int, expert_map: Any) -> Any:
    import torch

    flat = topk_ids.reshape(-1)
    valid = (flat >= 0) & (flat < num_experts)
    if expert_map is not None:
        valid &= expert_map[flat.clamp(0, num_experts - 1)] >= 0
    routes = torch.arange(flat.numel(), dtype=torch.int32, device=topk_ids.device)
    return torch.where(valid, routes, -1).view(-1, 1)


def _workspace(device: Any, need: int) -> Any:
    """int32 [at least need]: kept per device and stream, whose order parts calls; under capture the graph owns it."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        return torch.empty((need,), dtype=torch.int32, device=device)
    key = (device.index, current_stream(device.index))
    kept = _workspaces.get(key)
    if kept is None or kept.numel() < need:
        kept = _workspaces[key] = torch.empty((need,), dtype=torch.int32, device=device)
    return kept


def obstacle(module: Any, contract: Contract) -> str:
    """Why the alignment of vLLM's module cannot be replaced, in a few words; empty if it can."""
    own = getattr(module, NAME, None)
    if own is None:
        return f"{module.__name__} has no {NAME}"
    signature = inspect.signature(own)
    found = tuple((p.name, ... if p.default is p.empty else p.default) for p in signature.parameters.values())
    if found != contract.parameters:
        return f"{NAME}{signature} is not the signature of this version"
    try:
        import torch

        schema = torch.ops._moe_C.moe_align_block_size.default._schema
    except (ImportError, AttributeError) as e:
        return f"the operator _moe_C::{NAME} is not there: {e}"
    if (tuple(str(a.type) for a in schema.arguments), len(schema.returns)) != (contract.operator, 0):
        return f"{schema} is not the operator of this version"
    try:
        importlib.import_module("cuda.core")
    except ImportError as e:
        return f"no cuda-core: {e}"
    return ""


def register() -> None:
    """Replace the alignment, or say once why not. vLLM calls it in each of its processes, perhaps more than once."""
    word = os.environ.get(INJECTED)
    if os.environ.get(VARIABLE) != "1" and word is None:
        return
    made: Callable[[Align], Any] = CanonicalAlignment
    if word is not None:  # an examination goes before the cure
        try:
            arrivals(word, 1)
        except InputError as e:
            _decline(str(e))
            return
        made = partial(InjectedAlignment, word=word)
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        _decline("vllm is not installed")
        return
    known = contract(version)
    if known is None:
        _decline(f"vllm {version} is not a version that was read, {known_versions()}")
        return
    for kernel, name in known.modules:
        _replace(kernel, name, known, made)


def _replace(kernel: str, name: str, known: Contract, made: Callable[[Align], Any]) -> None:
    try:
        module: Any = importlib.import_module(name)
    except Exception as e:  # whatever vLLM's import raises on this machine, its own path must stay
        _decline(f"{name} does not import: {e}", kernel)
        return
    if isinstance(getattr(module, NAME, None), CanonicalAlignment | InjectedAlignment):
        return
    if reason := obstacle(module, known):
        _decline(reason, kernel)
        return
    setattr(module, NAME, made(getattr(module, NAME)))
    order = "canonical order (expert id, route id)" if made is CanonicalAlignment else "an injected order of arrival"
    logger.info("routeblock: MoE alignment in %s for %s, in %s", order, kernel, name)


def _decline(reason: str, kernel: str = "every kernel") -> None:
    if (kernel, reason) not in _declined:
        _declined.add((kernel, reason))
        logger.warning("routeblock: alignment stays vLLM's own for %s, in no fixed order: %s", kernel, reason)
