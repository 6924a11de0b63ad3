# SPDX-License-Identifier: Apache-2.0
"""Canonical alignment in vLLM: a `vllm.general_plugins` entry point, off unless ROUTEBLOCK_CANONICAL_ALIGNMENT=1.

It replaces the alignment of the Marlin MoE path: the name that `fused_marlin_moe` looks up. Other paths stay.

Facts, from vLLM 0.24.0's model_executor/layers/fused_moe: the signature; the buffers' sizes; that an expert map reaches
the operator only with `ignore_invalid_experts`, and is else applied to the blocks' experts afterwards.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "ROUTEBLOCK_CANONICAL_ALIGNMENT"
MODULE, NAME = "vllm.model_executor.layers.fused_moe.experts.marlin_moe", "moe_align_block_size"
# Parameters of vLLM's function with their defaults; `...` has none.
PARAMETERS: tuple[tuple[str, Any], ...] = (
    ("topk_ids", ...),
    ("block_size", ...),
    ("num_experts", ...),
    ("expert_map", None),
    ("pad_sorted_ids", False),
    ("ignore_invalid_experts", False),
)
# Argument types of the operator behind it, as torch spells them; it returns nothing.
OPERATOR = ("Tensor", "int", "int", "Tensor", "Tensor", "Tensor", "Optional[Tensor]")

Align = Callable[..., tuple[Any, Any, Any]]
# Below vLLM's own logger, whose handler and level it takes.
logger = logging.getLogger("vllm.routeblock")
_declined: set[str] = set()
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
    ) -> tuple[Any, Any, Any]:
        """Sorted ids, experts of blocks and the padded total, in canonical order; arguments and results as vLLM's.

        Raises InputError for what vLLM's kernel would read beyond a buffer, such as a map of another length.
        """
        reason = self._obstacle(topk_ids, num_experts)
        if reason:
            _decline(reason)
            return self.own(topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts)
        return align(topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts)

    def _obstacle(self, topk_ids: Any, num_experts: int) -> str:
        from routeblock.cuda.align import dtype_name, prepare
        from routeblock.cuda.align_variants import MAX_EXPERTS
        from routeblock.errors import InputError

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

    from routeblock.cuda.align import moe_align_block_size, workspace_size

    routes = topk_ids.numel()
    length = routes + num_experts * (block_size - 1)
    if pad_sorted_ids:
        length = -(-length // block_size) * block_size
    if routes < num_experts:
        length = min(length, routes * block_size)

    def empty(size: int) -> Any:
        return torch.empty((size,), dtype=torch.int32, device=topk_ids.device)

    sorted_ids, expert_ids, total = empty(length), empty(-(-length // block_size)), empty(1)
    need = workspace_size(routes, num_experts, block_size, topk_ids.device.index)
    moe_align_block_size(
        topk_ids.contiguous(),
        num_experts,
        block_size,
        sorted_ids,
        expert_ids,
        total,
        expert_map if ignore_invalid else None,
        workspace=_workspace(torch, topk_ids.device, need) if need else None,
    )
    if expert_map is not None and not ignore_invalid:
        expert_ids = expert_map[expert_ids]
    return sorted_ids, expert_ids, total


def _workspace(torch: Any, device: Any, need: int) -> Any:
    """int32 [at least need]: kept per device and stream, whose order parts calls; under capture the graph owns it."""
    if torch.cuda.is_current_stream_capturing():
        return torch.empty((need,), dtype=torch.int32, device=device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    kept = _workspaces.get(key)
    if kept is None or kept.numel() < need:
        kept = _workspaces[key] = torch.empty((need,), dtype=torch.int32, device=device)
    return kept


def obstacle(module: Any) -> str:
    """Why the alignment of vLLM's module cannot be replaced, in a few words; empty if it can."""
    own = getattr(module, NAME, None)
    if own is None:
        return f"{MODULE} has no {NAME}"
    signature = inspect.signature(own)
    told = tuple((p.name, ... if p.default is p.empty else p.default) for p in signature.parameters.values())
    if told != PARAMETERS:
        return f"{NAME}{signature} is not the signature of vLLM 0.24.0"
    try:
        import torch

        schema = torch.ops._moe_C.moe_align_block_size.default._schema
    except (ImportError, AttributeError) as e:
        return f"the operator _moe_C::{NAME} is not there: {e}"
    if (tuple(str(a.type) for a in schema.arguments), len(schema.returns)) != (OPERATOR, 0):
        return f"{schema} is not the operator of vLLM 0.24.0"
    try:
        importlib.import_module("cuda.core")
    except ImportError as e:
        return f"no cuda-core: {e}"
    return ""


def register() -> None:
    """Replace the alignment, or say once why not. vLLM calls it in each of its processes, perhaps more than once."""
    if os.environ.get(VARIABLE) != "1":
        return
    try:
        module: Any = importlib.import_module(MODULE)
    except Exception as e:  # whatever vLLM's import raises on this machine, its own path must stay
        module, reason = None, f"{MODULE} does not import: {e}"
    else:
        if isinstance(getattr(module, NAME, None), CanonicalAlignment):
            return
        reason = obstacle(module)
    if reason:
        _decline(reason)
        return
    setattr(module, NAME, CanonicalAlignment(getattr(module, NAME)))
    logger.info("routeblock: MoE alignment in canonical order (expert id, route id) in fused_marlin_moe")


def _decline(reason: str) -> None:
    if reason not in _declined:
        _declined.add(reason)
        logger.warning("routeblock: alignment stays vLLM's own, in no fixed order: %s", reason)
