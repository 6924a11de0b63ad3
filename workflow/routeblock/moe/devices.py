# SPDX-License-Identifier: Apache-2.0
"""GPUs as a launch sees them: SMs, shared memory, and whose tensor cores. Adding a GPU is one entry.

SM counts: NVIDIA prints CUDA cores; an SM has 128 of them, 64 on capability 8.0. What a capability has: NVIDIA's CUDA
programming guide, "Technical specifications per compute capability".
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from routeblock.errors import InputError
from routeblock.moe.sources import Source


@dataclass(frozen=True)
class Capability:
    """What all GPUs of a compute capability have.

    shared_memory_optin: bytes that one CUDA block may ask for. blocks_per_sm: the most that are resident. cores_per_sm:
    CUDA cores. kernel_target: which code of vLLM's extension such a GPU runs. architecture: of the twin's tensor cores,
    "" where there is no twin.
    """

    shared_memory_optin: int
    blocks_per_sm: int
    cores_per_sm: int
    kernel_target: str
    architecture: str


# sm_86 and sm_89 run the sm_80 code; sm_90 and sm_100 have none of their own: the driver compiles the PTX.
CAPABILITIES = {
    "8.0": Capability(166_912, 32, 64, "sm_80", "ampere"),
    "8.6": Capability(101_376, 16, 128, "sm_80", "ampere"),
    "8.9": Capability(101_376, 24, 128, "sm_80", "ada"),
    "9.0": Capability(232_448, 32, 128, "sm_90", "hopper"),
    "10.0": Capability(232_448, 32, 128, "sm_100", ""),
    "12.0": Capability(101_376, 24, 128, "sm_120f", ""),
}


@dataclass(frozen=True)
class Device:
    """A GPU. `source` and `basis` say where the number of SMs comes from."""

    name: str
    capability: str
    sms: int
    source: Source
    basis: str

    @property
    def facts(self) -> Capability:
        """What its compute capability has."""
        return CAPABILITIES[self.capability]

    @property
    def architecture(self) -> str:
        """The twin's tensor cores, "" where there is no twin."""
        return self.facts.architecture


def _by_cores(name: str, capability: str, cores: int) -> Device:
    per_sm = CAPABILITIES[capability].cores_per_sm
    return Device(name, capability, cores // per_sm, Source.PUBLISHED, f"{cores:,} CUDA cores, {per_sm} an SM")


DEVICES = {
    device.name: device
    for device in (
        _by_cores("A100", "8.0", 6_912),
        _by_cores("A10", "8.6", 9_216),
        _by_cores("A40", "8.6", 10_752),
        _by_cores("RTX A6000", "8.6", 10_752),
        Device("RTX 3090", "8.6", 82, Source.PUBLISHED, "the study's GPU; 10,496 CUDA cores, 128 an SM"),
        _by_cores("L4", "8.9", 7_424),
        _by_cores("L40S", "8.9", 18_176),
        _by_cores("RTX 4090", "8.9", 16_384),
        _by_cores("RTX 6000 Ada", "8.9", 18_176),
        _by_cores("H100 PCIe", "9.0", 14_592),
        _by_cores("H100 SXM", "9.0", 16_896),
        Device("H200", "9.0", 132, Source.RECORDED, "read from the driver; 16,896 CUDA cores, 128 an SM"),
        Device("H20", "9.0", 78, Source.PUBLISHED, "users' profiles; NVIDIA prints no number of cores"),
        _by_cores("GH200", "9.0", 16_896),
        _by_cores("B200", "10.0", 18_944),
        _by_cores("RTX 5090", "12.0", 21_760),
    )
}


def device(name: str) -> Device:
    """The GPU of this name, letter case and a leading `NVIDIA` or `GeForce` aside. InputError names the nearest."""
    wanted = _plain(name)
    known = {_plain(known): found for known, found in DEVICES.items()}
    if wanted in known:
        return known[wanted]
    near = [known[key].name for key in difflib.get_close_matches(wanted, known, n=3, cutoff=0.4)]
    raise InputError(
        f"GPU {name!r} is not known",
        where="moe/devices.py",
        limit=f"known are {', '.join(DEVICES)}",
        way_out=f"use {' or '.join(near)}" if near else "choose one of them, or add an entry",
    )


def _plain(name: str) -> str:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    return "".join(w for w in words if w not in ("nvidia", "geforce", "tesla"))
