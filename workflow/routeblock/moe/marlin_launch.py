# SPDX-License-Identifier: Apache-2.0
"""Which launch the packed MoE operator's automatic selection takes on a GPU: the rule of its host code, computed.

The rule (read in the operator's source, vLLM 0.20 to 0.33, where it is one and the same): candidates in a fixed order;
each is allowed so many blocks an SM as registers and shared memory admit, at most 4 (blocks of 8 and 16 rows) or 2, and
fewer where the GEMM has too few tiles to fill the GPU; the most wins, the first of equals. Its one input that is no
arithmetic is how many registers each compiled kernel takes: `marlin_registers.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from routeblock.errors import InputError
from routeblock.moe.devices import Device
from routeblock.moe.partition import operator_group
from routeblock.moe.shared_memory import SLACK, shared_memory
from routeblock.moe.sources import Source

SOURCES = ("marlin_registers.json",)
REGISTERS = Path(__file__).with_name(SOURCES[0])
GROUPS = (-1, 32, 64, 128)
# (thread_k, thread_n) in the order in which the selection looks at them.
CANDIDATES_SMALL = ((128, 128), (64, 128), (128, 64))
CANDIDATES_LARGE = ((64, 256), (64, 128), (128, 64))
REGISTER_FILE = 255 * 1024  # bytes; the selection leaves out the 256th KiB
OVERHEAD = 1536  # bytes of shared memory that the selection adds to each block


class Weights(NamedTuple):
    """What the operator compiles for: dtype of activations, zero points or the fixed 8, group along K (-1: none)."""

    dtype: str
    zero_points: bool
    group_size: int

    @property
    def type(self) -> str:
        """vLLM's name of the weight type."""
        return "u4" if self.zero_points else "u4b8"


class Gemm(NamedTuple):
    """The size of one GEMM: N columns, K rows of weights, and tokens x top-k routes."""

    n: int
    k: int
    routes: int


class Candidate(NamedTuple):
    """One candidate of the selection: registers a thread, shared memory in bytes, blocks an SM that it is allowed."""

    thread_k: int
    thread_n: int
    registers: int
    shared_memory: int
    blocks_per_sm: int


@dataclass(frozen=True)
class RegisterTable:
    """Registers a thread of every kernel in one build, by dtype, weight type, block size, thread sizes and group."""

    first: str
    last: str
    target: str
    source: Source
    basis: str
    registers: Mapping[str, Mapping[str, Mapping[str, Mapping[str, list[int]]]]]

    def get(self, weights: Weights, block_size: int, thread_k: int, thread_n: int, group_size: int) -> int | None:
        """Registers of one kernel, None where the build has none."""
        kernels = self.registers.get(weights.dtype, {}).get(weights.type, {}).get(str(block_size), {})
        found = kernels.get(f"{thread_k}x{thread_n}")
        return None if found is None or group_size not in GROUPS else found[GROUPS.index(group_size)]


@cache
def register_tables() -> tuple[RegisterTable, ...]:
    """The committed tables."""
    document = json.loads(REGISTERS.read_bytes())
    return tuple(
        RegisterTable(t["first"], t["last"], t["target"], Source(t["source"]), t["basis"], t["registers"])
        for t in document["tables"]
    )


def version_key(version: str) -> tuple[int, ...]:
    """A vLLM version as numbers; InputError for anything but numbers and dots."""
    parts = version.removeprefix("v").split(".")
    if not all(part.isdigit() for part in parts) or len(parts) < 2:
        raise InputError(
            f"vLLM version {version!r}",
            where="--vllm",
            limit="a released version such as 0.24.0 is needed",
            way_out="say which release you run",
        )
    return (*(int(part) for part in parts), 0)[:3] if len(parts) == 2 else tuple(int(part) for part in parts[:3])


def registers_for(target: str, version: str) -> tuple[RegisterTable, Source, str] | None:
    """The table for a target and a vLLM version, its mark and basis; None if nothing stands in.

    A version beyond the opened ones takes the last table, and one between two tables the earlier: both are assumed.
    """
    wanted = version_key(version)
    tables = sorted((t for t in register_tables() if t.target == target), key=lambda t: version_key(t.first))
    for table in tables:
        if version_key(table.first) <= wanted <= version_key(table.last):
            return table, table.source, table.basis
    earlier = [t for t in tables if version_key(t.last) < wanted]
    if not earlier:
        return None
    return earlier[-1], Source.ASSUMED, f"registers as vLLM {earlier[-1].last} has them: {version} was not opened"


def candidates(
    device: Device, table: RegisterTable, weights: Weights, block_size: int, gemm: Gemm
) -> Iterator[Candidate]:
    """The candidates that fit, in the order of the selection."""
    group = operator_group(weights.group_size, gemm.k)
    optin, small = device.facts.shared_memory_optin, block_size <= 16
    for thread_k, thread_n in CANDIDATES_SMALL if small else CANDIDATES_LARGE:
        if gemm.n % thread_n or gemm.k % thread_k:
            continue
        needed = shared_memory(thread_k, thread_n, block_size, group, weights.zero_points)
        registers = table.get(weights, block_size, thread_k, thread_n, group)
        if registers is None or needed > optin - SLACK:
            continue
        threads = thread_k * thread_n // 64
        by_registers = REGISTER_FILE // (max(registers, 1) * threads * 4)
        allowed = max(1, min(by_registers, optin // (needed + OVERHEAD), 4 if small else 2))
        tiles = gemm.n // thread_n * gemm.routes * 4
        if tiles < device.sms * allowed:
            allowed = max(tiles // device.sms, 1)
        yield Candidate(thread_k, thread_n, registers, needed, allowed)


def select(device: Device, table: RegisterTable, weights: Weights, block_size: int, gemm: Gemm) -> Candidate | None:
    """The candidate that the selection takes, None where none fits (the operator then refuses the shape)."""
    best = None
    for candidate in candidates(device, table, weights, block_size, gemm):
        if best is None or candidate.blocks_per_sm > best.blocks_per_sm:
            best = candidate
    return best


def as_document(registers: Mapping[tuple[str, str, int, int, int, int], int]) -> dict[str, Any]:
    """Registers by (dtype, weight type, block size, thread_k, thread_n, group) in the form of the committed tables."""
    document: dict[str, Any] = {}
    for dtype, kind, block, thread_k, thread_n, group in sorted(registers):
        if group in GROUPS:
            kernels = document.setdefault(dtype, {}).setdefault(kind, {}).setdefault(str(block), {})
            found = kernels.setdefault(f"{thread_k}x{thread_n}", [0] * len(GROUPS))
            found[GROUPS.index(group)] = registers[dtype, kind, block, thread_k, thread_n, group]
    return document
