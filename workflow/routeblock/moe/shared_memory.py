# SPDX-License-Identifier: Apache-2.0
"""What the operator refuses for shared memory: a launch whose pipeline does not fit in its block's share.

Facts: the host code of vLLM 0.24.0's `moe_wna16_marlin_gemm`; which launches it took and refused on an H200 is recorded
in fixtures/recorded/operator, and a test holds this rule against every one.
"""

from __future__ import annotations

from routeblock.errors import InputError
from routeblock.moe.devices import Device
from routeblock.moe.launches import Launch
from routeblock.moe.partition import thread_sizes

STAGES = 4  # of the pipeline, from compute capability 8.0
HALF, META, BIAS, SLACK = 2, 16, 2, 512  # bytes: an operand; a row's ids and weights; a column's bias; kept free
RESERVED = 1024  # bytes of each block where several share an SM
ROW_TILE = 16


def shared_memory(thread_k: int, thread_n: int, block_size: int, group_size: int, zero_points: bool) -> int:
    """Bytes of shared memory that one CUDA block takes. group_size -1: one scale per column, one group over K."""
    rows = -(-block_size // ROW_TILE) * ROW_TILE
    inputs = STAGES * rows * thread_k * HALF
    weights = STAGES * thread_k * thread_n // 2
    reduction = rows * (thread_n + 8) * HALF
    groups = 1 if group_size == -1 else -(-thread_k // group_size)
    scales = STAGES * groups * thread_n * HALF
    zeros = scales // 4 if zero_points else 0
    shared = max(weights, reduction, min(weights, reduction) + thread_n * BIAS)
    return inputs + shared + scales + zeros + rows * META


def available(gpu: Device, blocks_per_sm: int) -> int:
    """Bytes that each of `blocks_per_sm` blocks on one SM may take."""
    each = gpu.facts.shared_memory_optin
    if blocks_per_sm > 1:
        each = each // blocks_per_sm - RESERVED
    return each - SLACK


def check_launch(
    gpu: Device, launch: Launch, *, block_size: int, group_size: int, zero_points: bool = False, where: str
) -> None:
    """Raise InputError in one line if the operator refuses `launch` on `gpu` for shared memory.

    A grid takes as many blocks per SM as it needs. group_size as `operator_group` gives it.
    """
    blocks = -(-launch.grid // gpu.sms)
    need = shared_memory(launch.thread_k, launch.thread_n, block_size, group_size, zero_points)
    if need <= available(gpu, blocks):
        return
    fits = [
        f"({k}, {n})"
        for k, n in thread_sizes(block_size)
        if shared_memory(k, n, block_size, group_size, zero_points) <= available(gpu, blocks)
    ]
    raise InputError(
        f"({launch.thread_k}, {launch.thread_n}) on {launch.grid} blocks with block size {block_size} takes {need}"
        " bytes of shared memory a block",
        where=where,
        limit=f"{blocks} blocks on an SM of {gpu.name} have {available(gpu, blocks)} each: the operator refuses it",
        way_out=f"use thread sizes {' or '.join(fits)}"
        if fits
        else "choose another operating point, or a GPU with more shared memory",
    )
