# SPDX-License-Identifier: Apache-2.0
"""What each version of vLLM has where the plug-in takes hold: modules, signature, operator.

Read from the wheels' files (tests/vllm_plugin/read_wheels.py), kept in fixtures/published/vllm_alignment.json; a test
holds this table against them. Only 0.24.0 was run on a GPU; the other versions are read, not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NAME = "moe_align_block_size"

# Parameters of vLLM's function with their defaults; `...` has none.
_PARAMETERS: tuple[tuple[str, Any], ...] = (
    ("topk_ids", ...),
    ("block_size", ...),
    ("num_experts", ...),
    ("expert_map", None),
    ("pad_sorted_ids", False),
    ("ignore_invalid_experts", False),
)
# Argument types of the operator behind it, as torch spells them; it returns nothing.
_OPERATOR = ("Tensor", "int", "int", "Tensor", "Tensor", "Tensor", "Optional[Tensor]")

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"


@dataclass(frozen=True)
class Contract:
    """From version `since` on: the modules that look the name up, by the kernel that they run; signature, operator."""

    since: tuple[int, int]
    modules: tuple[tuple[str, str], ...]  # (kernel, module)
    parameters: tuple[tuple[str, Any], ...] = _PARAMETERS
    operator: tuple[str, ...] = _OPERATOR


CONTRACTS = (
    Contract(
        (0, 20),
        (
            ("Marlin", f"{_FUSED_MOE}.fused_marlin_moe"),
            ("Humming", f"{_FUSED_MOE}.fused_humming_moe"),
            ("Humming", "vllm.model_executor.layers.quantization.utils.humming_moe_utils"),
        ),
    ),
    Contract(
        (0, 21),
        (("Marlin", f"{_FUSED_MOE}.experts.marlin_moe"), ("Humming", f"{_FUSED_MOE}.fused_humming_moe")),
    ),
    Contract(
        (0, 22),
        (("Marlin", f"{_FUSED_MOE}.experts.marlin_moe"), ("Humming", f"{_FUSED_MOE}.experts.fused_humming_moe")),
    ),
    # Humming asks for the routes' own numbers, -1 where a route takes no slot.
    Contract(
        (0, 31),
        (("Marlin", f"{_FUSED_MOE}.experts.marlin_moe"), ("Humming", f"{_FUSED_MOE}.experts.fused_humming_moe")),
        (*_PARAMETERS, ("return_scatter_idx", False)),
        (*_OPERATOR, "Optional[Tensor]"),
    ),
)
LAST = (0, 33)  # the newest that was read


def contract(version: str) -> Contract | None:
    """The contract of a version such as 0.24.0; None for one that nobody read."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return None
    if not CONTRACTS[0].since <= (major, minor) <= LAST:
        return None
    return next(c for c in reversed(CONTRACTS) if c.since <= (major, minor))


def known_versions() -> str:
    """The versions of the table, for a message."""
    return f"{'.'.join(map(str, CONTRACTS[0].since))} to {'.'.join(map(str, LAST))}"
