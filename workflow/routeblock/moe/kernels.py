# SPDX-License-Identifier: Apache-2.0
"""Which MoE kernel a vLLM release runs for 4-bit weights on a GPU, and what is known of it.

Facts: the Python files of the releases' wheels (0.20.2 to 0.33.0), read and not run. Adding a release that chooses
otherwise is one entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from routeblock.errors import InputError
from routeblock.moe.devices import Device
from routeblock.moe.marlin_launch import version_key


class Kernel(StrEnum):
    """A kernel that packed 4-bit experts reach."""

    MARLIN = "Marlin"
    HUMMING = "Humming"
    HUMMING_INVARIANT = "Humming, batch-invariant mode"
    EMULATION = "int4 emulation"
    TRITON = "Triton WNA16"
    FLASHINFER = "FlashInfer TRT-LLM"
    REFUSED = "refused"


# The one kernel that the twin computes is Marlin: here is what is known of the others.
KNOWN = {
    Kernel.MARLIN: "the kernel that the twin computes bit for bit",
    Kernel.HUMMING: "it aligns by the same operator and uses stream-K in many configurations, so arrival order reaches"
    " its bits too; it has no twin",
    Kernel.HUMMING_INVARIANT: "no stream-K and a fixed K tile, as vLLM's files say; it has no twin, so nothing here"
    " proves it",
    Kernel.EMULATION: "weights are dequantised to bfloat16 at load and a Triton kernel runs; it has no twin",
    Kernel.TRITON: "its split-K atomics ignore VLLM_BATCH_INVARIANT in 0.33 (vllm#56887); it has no twin",
    Kernel.FLASHINFER: "it comes before Marlin for symmetric weights where it takes the layer; it has no twin",
    Kernel.REFUSED: "vLLM stops at load: no WNA16 MoE backend supports batch invariance",
}

FIRST, LAST = "0.20.2", "0.33.0"  # the releases that were opened


@dataclass(frozen=True)
class Choice:
    """What releases `first` to `last` choose; `capability`, `batch_invariant` and `awq` None: whatever they are. awq:
    AutoAWQ's layout of the weights; others are GPTQ's and compressed-tensors'.
    """

    first: str
    last: str
    capability: str | None
    batch_invariant: bool | None
    awq: bool | None
    kernel: Kernel


# The first entry that fits is taken.
CHOICES = (
    Choice("0.20", "0.21", None, None, None, Kernel.MARLIN),  # no gate: silently variant under VLLM_BATCH_INVARIANT
    Choice("0.22", "0.25", None, True, None, Kernel.REFUSED),
    Choice("0.26", "0.26", None, True, None, Kernel.EMULATION),
    Choice("0.27", "0.27", None, True, True, Kernel.EMULATION),
    Choice("0.32", "0.33", "9.0", True, None, Kernel.HUMMING_INVARIANT),
    Choice("0.27", "0.33", None, True, False, Kernel.TRITON),
    Choice("0.28", "0.33", None, True, True, Kernel.HUMMING_INVARIANT),
    Choice("0.24", "0.33", "10.0", False, False, Kernel.FLASHINFER),
    Choice("0.32", "0.33", "9.0", False, None, Kernel.HUMMING),
    Choice("0.20", "0.33", None, False, None, Kernel.MARLIN),
)

# From this release on, the block size under expert parallelism goes by the tokens that a rank expects.
SCALED_TOKENS = "0.26"

BACKENDS = ("auto", "marlin", "humming")
FIRST_HUMMING = (0, 25)  # that can be asked for


@dataclass(frozen=True)
class FoundKernel:
    """A kernel, why it is taken, and whether the release is one that was opened."""

    kernel: Kernel
    reason: str
    opened: bool


def kernel_for(
    device: Device, version: str, batch_invariant: bool, backend: str = "auto", awq: bool = True
) -> FoundKernel:
    """The MoE kernel of packed 4-bit experts. `backend` is vLLM's `--moe-backend`; `awq` as in `Choice`.

    Raises InputError for a release before the first that was opened, another backend, or one that the release refuses.
    """
    wanted = version_key(version)[:2]
    if version_key(version) < version_key(FIRST):
        raise InputError(
            f"vLLM {version}",
            where="--vllm",
            limit=f"releases from {FIRST} were read",
            way_out="name one of them, or give --launch for the kernel you run",
        )
    if backend not in BACKENDS:
        raise InputError(
            f"backend {backend!r}",
            where="--moe-backend",
            limit=f"known are {', '.join(BACKENDS)}",
            way_out="choose one of them",
        )
    opened = wanted <= version_key(LAST)[:2]
    looked = wanted if opened else version_key(LAST)[:2]
    if backend != "auto":
        return _forced(looked, batch_invariant, backend, opened, version)
    for choice in CHOICES:
        fits = version_key(choice.first)[:2] <= looked <= version_key(choice.last)[:2]
        asked = ((choice.capability, device.capability), (choice.batch_invariant, batch_invariant), (choice.awq, awq))
        if fits and all(wants in (None, has) for wants, has in asked):
            flag = " under VLLM_BATCH_INVARIANT=1" if batch_invariant else ""
            chip = f" on capability {choice.capability}" if choice.capability else ""
            layout = "" if choice.awq is None else " with AutoAWQ's layout" if awq else " without AutoAWQ's layout"
            return FoundKernel(choice.kernel, f"vLLM {version}{flag}{chip}{layout} takes {choice.kernel}", opened)
    raise AssertionError("every release has an entry")


def _forced(looked: tuple[int, ...], batch_invariant: bool, backend: str, opened: bool, version: str) -> FoundKernel:
    if backend == "humming" and looked < FIRST_HUMMING:
        raise InputError(
            f"--moe-backend humming with vLLM {version}",
            where="--moe-backend",
            limit="Humming can be asked for from 0.25 on",
            way_out="leave it at auto, or name a later release",
        )
    if backend == "marlin" and batch_invariant and looked >= (0, 22):
        return FoundKernel(Kernel.REFUSED, "Marlin is not batch-invariant, and the release checks it", opened)
    if backend == "humming" and batch_invariant and looked < (0, 28):
        return FoundKernel(Kernel.REFUSED, "Humming is batch-invariant from 0.28 on, and the release checks it", opened)
    humming = Kernel.HUMMING_INVARIANT if batch_invariant else Kernel.HUMMING
    return FoundKernel(Kernel.MARLIN if backend == "marlin" else humming, f"--moe-backend {backend}", opened)


def block_size_tokens(version: str, tokens: int, experts: int, local_experts: int) -> int:
    """The tokens that the block size of the fused path goes by.

    All of them, and from 0.26 on under expert parallelism the share of this rank, rounded up.
    """
    if local_experts == experts or version_key(version)[:2] < version_key(SCALED_TOKENS)[:2]:
        return tokens
    return -(-tokens * local_experts // experts)
