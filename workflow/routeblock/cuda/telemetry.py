# SPDX-License-Identifier: Apache-2.0
"""What the driver says of a GPU through NVML: name, architecture, clocks, throttling, other processes.

Nothing is ever set. A question that a machine refuses is answered -1, and stays visible as such in the records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from routeblock.errors import InputError

UNKNOWN = -1
RESIDENT_VARIABLE = "ROUTEBLOCK_RESIDENT"  # names of processes that may stay on a GPU, with commas: see cuda/window.py
# NVML's bits of clock event reasons; idle, application clocks and sync boost are no throttling.
CLOCK_EVENTS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
}


@cache
def _nvml() -> Any:
    try:
        import pynvml
    except ImportError as e:
        raise _no_gpu("the package nvidia-ml-py is not installed") from e
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        raise _no_gpu(f"NVML: {e}") from e
    return pynvml


def _no_gpu(what: str) -> InputError:
    return InputError(
        what,
        where="lane cuda",
        limit="it needs an NVIDIA driver and envs/cuda13.txt, or envs/cuda12.txt for sm_70",
        way_out="install them, or run lane cpu",
    )


@cache
def architectures() -> tuple[str, ...]:
    """The architecture of every GPU, in the driver's order: ("sm_90", ...). Raises InputError without a driver."""
    nvml = _nvml()
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(nvml.nvmlDeviceGetHandleByIndex(index))
        found.append(f"sm_{major}{minor}")
    return tuple(found)


def resident() -> frozenset[str]:
    """Names of processes that may stay on a GPU while others measure: those of the window that this process is in."""
    return frozenset(filter(None, os.environ.get(RESIDENT_VARIABLE, "").split(",")))


def _others(nvml: Any, handle: Any, allowed: Iterable[str]) -> list[str]:
    """Names of the compute processes on a GPU that are neither this one nor allowed; a pid where there is no name."""
    found = []
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid():
            continue
        try:
            name = nvml.nvmlSystemGetProcessName(process.pid)
            name = Path(name.decode() if isinstance(name, bytes) else name).name
        except nvml.NVMLError:
            name = f"process {process.pid}"
        if name not in allowed:
            found.append(name)
    return found


def foreign(allowed: Iterable[str]) -> list[str]:
    """Names of compute processes on this machine's GPUs that are not allowed. Raises InputError without a driver."""
    nvml, names = _nvml(), frozenset(allowed)
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    return [name for handle in handles for name in _others(nvml, handle, names)]


@dataclass(frozen=True)
class State:
    """A GPU at one moment; -1 stands for an answer that was refused."""

    clock_events: int
    compute_processes: int
    sm_clock_mhz: int
    temperature_c: int


class Gpu:
    """One GPU as NVML sees it, found by its PCI bus id: CUDA may count devices in another order.

    Raises InputError without a driver.
    """

    def __init__(self, pci_bus_id: str) -> None:
        self._nvml = _nvml()
        self._handle = self._nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
        self._resident = resident()

    def _ask(self, question: Callable[[], int]) -> int:
        try:
            return int(question())
        except (self._nvml.NVMLError, AttributeError):
            return UNKNOWN

    def state(self) -> State:
        """What it is doing now."""
        nvml, handle = self._nvml, self._handle
        return State(
            clock_events=self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
            compute_processes=self._ask(lambda: len(_others(nvml, handle, self._resident)) + self._own()),
            sm_clock_mhz=self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            temperature_c=self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )

    def _own(self) -> int:
        pids = [p.pid for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)]
        return int(os.getpid() in pids)

    def identity(self) -> dict[str, Any]:
        """Name, driver and memory, and which processes may be resident; nothing that names one particular board."""
        nvml, handle = self._nvml, self._handle
        allowed = {"resident": sorted(self._resident)} if self._resident else {}
        return allowed | {
            "name": nvml.nvmlDeviceGetName(handle),
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "memory_bytes": self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "power_limit_mw": self._ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
        }


def seen(before: State, after: State) -> State:
    """What a batch saw: all clock events, the most processes, the clock and temperature after it."""
    events = [s.clock_events for s in (before, after) if s.clock_events != UNKNOWN]
    mask = UNKNOWN if not events else events[0] | events[-1]
    return State(mask, max(before.compute_processes, after.compute_processes), after.sm_clock_mhz, after.temperature_c)


def throttled(state: State, reasons: tuple[str, ...]) -> bool:
    """Whether one of the named clock events was seen."""
    return state.clock_events != UNKNOWN and any(state.clock_events & CLOCK_EVENTS[r] for r in reasons)


def rejection(state: State, reasons: tuple[str, ...]) -> str:
    """Why a batch during which `state` was seen is rejected: throttled, other_process, or nothing."""
    if throttled(state, reasons):
        return "throttled"
    return "other_process" if state.compute_processes > 1 else ""


def named_events(mask: int) -> str:
    """The throttling events in NVML's mask by name; what could not be read is said to be unknown."""
    if mask == UNKNOWN:
        return "unknown"
    return ", ".join(name for name, bit in CLOCK_EVENTS.items() if mask & bit)
