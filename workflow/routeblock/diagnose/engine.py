# SPDX-License-Identifier: Apache-2.0
"""What an engine does with a batch: which kernel, which block size, which launches, and whose experts a rank has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from routeblock.diagnose.answer import Fact
from routeblock.diagnose.layer import GEMMS, Layer
from routeblock.errors import InputError
from routeblock.moe.automatic_launch import FoundLaunch, automatic_launch
from routeblock.moe.devices import Device
from routeblock.moe.kernels import FIRST, KNOWN, LAST, FoundKernel, Kernel, block_size_tokens, kernel_for
from routeblock.moe.launches import Launch
from routeblock.moe.partition import BLOCK_SIZES, operator_group, thread_sizes
from routeblock.moe.routing import block_size_for
from routeblock.moe.shared_memory import available, shared_memory
from routeblock.moe.sources import Source

# vLLM's moe_align_block_size: below these one block of threads aligns in a fixed order, from them on atomics race.
FIXED_ORDER_ROUTES, FIXED_ORDER_EXPERTS = 1024, 64
MOST_BLOCKS_PER_SM = 4


@dataclass(frozen=True)
class Engine:
    """A vLLM release on GPUs of one kind. `given` launches and `block_size` stand in place of the automatic ones."""

    layer: Layer
    device: Device
    version: str
    batch_invariant: bool = False
    backend: str = "auto"
    expert_parallel: int = 1
    given: Mapping[str, Launch] = field(default_factory=dict)
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.expert_parallel < 1 or self.layer.experts % self.expert_parallel:
            raise InputError(
                f"{self.layer.experts} experts on {self.expert_parallel} ranks",
                where="--ep",
                limit="every rank has as many experts",
                way_out="choose a divisor of the experts",
            )
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise InputError(
                f"block size {self.block_size}",
                where="--block-size",
                limit=f"the kernel has {', '.join(map(str, BLOCK_SIZES))}",
                way_out="choose one of them",
            )

    @property
    def kernel(self) -> FoundKernel:
        """The MoE kernel that runs; Marlin where launches are given."""
        if self.given:
            return FoundKernel(Kernel.MARLIN, "launches are given", True)
        return kernel_for(self.device, self.version, self.batch_invariant, self.backend, self.layer.awq)

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.layer.experts // self.expert_parallel

    def ranks(self) -> Iterator[tuple[int, slice]]:
        """Each rank and its experts, which lie side by side."""
        for rank in range(self.expert_parallel):
            yield rank, slice(rank * self.local_experts, (rank + 1) * self.local_experts)

    def block_size_at(self, tokens: int) -> int:
        """The block size of the fused path at so many tokens."""
        if self.block_size is not None:
            return self.block_size
        counted = block_size_tokens(self.version, tokens, self.layer.experts, self.local_experts)
        return block_size_for(counted, self.layer.top_k, self.local_experts)

    def launch_at(self, gemm: str, tokens: int) -> FoundLaunch:
        """The launch of `w13` or `w2` at so many tokens."""
        if gemm in self.given:
            return FoundLaunch(self.given[gemm], Source.GIVEN, "by option")
        return _automatic(self.device, self.version, self.layer, self.block_size_at(tokens), gemm, tokens)

    def launches_at(self, tokens: int) -> dict[str, Launch] | None:
        """Both launches, None if one of them cannot be said."""
        found = {gemm: self.launch_at(gemm, tokens).launch for gemm in GEMMS}
        known = {gemm: launch for gemm, launch in found.items() if launch is not None}
        return known if len(known) == len(GEMMS) else None

    def fixed_order(self, tokens: int) -> bool:
        """Whether native alignment has a fixed order at so many tokens."""
        return tokens * self.layer.top_k < FIXED_ORDER_ROUTES and self.layer.experts <= FIXED_ORDER_EXPERTS

    def explicit_launches(self, gemm: str, tokens: int) -> Iterator[Launch]:
        """The launches that the operator takes when thread sizes and blocks an SM are passed to it, the automatic
        thread sizes first, more blocks an SM before fewer.
        """
        n, k, _ = self.layer.gemm(gemm, tokens)
        block = self.block_size_at(tokens)
        group = operator_group(self.layer.weights.group_size, k)
        automatic = self.launch_at(gemm, tokens).launch
        sizes = sorted(thread_sizes(block), key=lambda s: automatic is None or s != automatic[:2])
        for thread_k, thread_n in sizes:
            needed = shared_memory(thread_k, thread_n, block, group, self.layer.weights.zero_points)
            for per_sm in range(MOST_BLOCKS_PER_SM, 0, -1):
                fits = needed <= available(self.device, per_sm)
                if n % thread_n == 0 and k % thread_k == 0 and fits:
                    yield Launch(thread_k, thread_n, self.device.sms * per_sm)

    def facts(self, tokens: int) -> list[Fact]:
        """What an answer at so many tokens stands on."""
        kernel, device, layer = self.kernel, self.device, self.layer
        opened = Fact(
            "kernel",
            str(kernel.kernel),
            Source.GIVEN if self.given else Source.PUBLISHED if kernel.opened else Source.ASSUMED,
            kernel.reason if kernel.opened else f"{kernel.reason} if it chooses as {LAST}; {FIRST} to {LAST} were read",
        )
        found = [
            opened,
            Fact("SMs", device.sms, device.source, f"{device.name}: {device.basis}"),
        ]
        if kernel.kernel is not Kernel.MARLIN:
            return found
        counted = block_size_tokens(self.version, tokens, layer.experts, self.local_experts)
        experts = f"{self.local_experts} local experts" if self.expert_parallel > 1 else f"{layer.experts} experts"
        scaled = f", counted as {counted} on each rank since vLLM 0.26" if counted != tokens else ""
        basis = f"fused path's rule: {tokens} tokens{scaled}, top-{layer.top_k}, {experts}"
        given = self.block_size is not None
        found.append(
            Fact("block size", self.block_size_at(tokens), Source.GIVEN if given else Source.DERIVED,
                 "by option" if given else basis)
        )  # fmt: skip
        for gemm in GEMMS:
            launch = self.launch_at(gemm, tokens)
            value = "unknown" if launch.launch is None else list(launch.launch)
            found.append(Fact(f"launch of {gemm.upper()}", value, launch.source, launch.basis))
        return found

    def document(self) -> dict[str, Any]:
        """The engine as JSON, for the parameters of a seal."""
        return {
            "layer": self.layer.document(),
            "gpu": self.device.name,
            "vllm": self.version,
            "batch_invariant": self.batch_invariant,
            "moe_backend": self.backend,
            "expert_parallel": self.expert_parallel,
            "launches": {gemm: list(launch) for gemm, launch in self.given.items()},
            "block_size": self.block_size,
        }

    def known_of_kernel(self) -> str:
        """What is known of the kernel that runs."""
        return KNOWN[self.kernel.kernel]


@cache
def _automatic(device: Device, version: str, layer: Layer, block_size: int, gemm: str, tokens: int) -> FoundLaunch:
    return automatic_launch(device, version, layer.weights, block_size, layer.gemm(gemm, tokens))
