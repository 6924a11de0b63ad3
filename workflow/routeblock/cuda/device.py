# SPDX-License-Identifier: Apache-2.0
"""The GPU of this process: whether a run can use it, what it is, and the state it is in.

torch is imported inside functions only. State is read through NVML (nvidia-ml-py) or, without it, nvidia-smi.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from routeblock.cuda.grid_probe import without_probe
from routeblock.errors import InputError

MINIMUM_CAPABILITY = (8, 0)
MEMORY_MARGIN = 512 << 20  # CUDA's and torch's own buffers, activations, scratch

# The tensor cores of each compute capability; others run, yet no twin stands for them.
ARCHITECTURES = {(8, 0): "ampere", (8, 6): "ampere", (8, 7): "ampere", (8, 9): "ada", (9, 0): "hopper"}

Json = dict[str, Any]


@dataclass(frozen=True)
class Device:
    """A GPU that a run can use. memory: free bytes when it was asked."""

    name: str
    uuid: str
    capability: tuple[int, int]
    sms: int
    memory: int

    @property
    def architecture(self) -> str | None:
        """The twin's name for its tensor cores, or None."""
        return ARCHITECTURES.get(self.capability)


def _refuse(what: str, limit: str, way_out: str) -> InputError:
    return InputError(what, where="lane cuda", limit=limit, way_out=way_out)


def require_torch() -> None:
    """Import torch, which touches no GPU. Raises InputError when it is missing or has no CUDA."""
    try:
        import torch
    except ImportError as e:
        raise _refuse(
            "torch is not installed for this Python", "the lane needs torch and vllm", "install envs/cuda.txt"
        ) from e
    if torch.version.cuda is None:
        raise _refuse(f"torch {torch.__version__} has no CUDA", "a CUDA build is needed", "install envs/cuda.txt")


def open_device(memory: int) -> Device:
    """The current CUDA device.

    Raises InputError without torch, without a GPU, when it is older than Ampere, and with under `memory` bytes free.
    """
    require_torch()
    import torch

    try:
        found = torch.cuda.is_available() and torch.cuda.device_count() > 0
        properties = torch.cuda.get_device_properties(torch.cuda.current_device()) if found else None
        free = torch.cuda.mem_get_info()[0] if found else 0
    except RuntimeError as e:
        raise _refuse(
            f"the GPU does not start: {str(e).splitlines()[0]}",
            "a working driver is needed",
            "check nvidia-smi, or leave the lane out of config.yaml",
        ) from e
    if properties is None:
        raise _refuse(
            "no CUDA GPU is visible",
            "the lane runs on this machine's GPU",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the lane recorded-h200",
        )
    capability = (properties.major, properties.minor)
    if capability < MINIMUM_CAPABILITY:
        raise _refuse(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}",
            "the study's kernel uses m16n8k16 instructions, from 8.0 on",
            "use an Ampere, Ada or Hopper GPU",
        )
    if free < memory:
        raise _refuse(
            f"{properties.name} has {free >> 20} MiB free",
            f"this fixture needs {-(-memory >> 20)} MiB",
            "end other processes on the GPU, or use a fixture with fewer experts",
        )
    uuid = str(getattr(properties, "uuid", ""))
    return Device(properties.name, uuid, capability, properties.multi_processor_count, free)


def split_grid(grid: int, sms: int, most: int) -> tuple[int, int]:
    """(SM count to answer, blocks per SM) whose product is `grid` on a GPU of `sms` SMs, at most `most` blocks each.

    The true count is taken where it divides the grid: no answer is needed then. Otherwise the fewest blocks per SM for
    which all blocks are resident at once: slices of a tile wait for one another. Raises InputError when there is none.
    """
    if grid % sms == 0 and grid // sms <= most:
        return sms, grid // sms
    for blocks in range(1, most + 1):
        if grid % blocks == 0 and grid // blocks <= sms:
            return grid // blocks, blocks
    raise InputError(
        f"grid {grid}",
        where="lane cuda",
        limit=f"the product of at most {sms} SMs and at most {most} blocks an SM, so that all blocks are resident",
        way_out="ask for another grid, or use a GPU with more SMs",
    )


def state(uuid: str) -> Json:
    """Driver, clocks in MHz, throttle reasons (NVML's bit mask), temperature, processes on the GPU.

    What the driver does not tell is None; `source` says who was asked.
    """
    return _nvml_state(uuid) or _smi_state(uuid) or {"source": None}


def _nvml_state(uuid: str) -> Json | None:
    try:
        import pynvml as nvml
    except ImportError:
        return None

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except nvml.NVMLError:
            return None

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = ask(nvml.nvmlDeviceGetHandleByUUID, uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        if handle is None:
            return None
        processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        return {
            "source": "NVML",
            "driver": ask(nvml.nvmlSystemGetDriverVersion),
            "clocks_mhz": {
                "sm": ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
                "memory": ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            },
            "throttle_reasons": ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
            "temperature_c": ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "other_processes": None
            if processes is None
            else [{"pid": p.pid, "memory_bytes": p.usedGpuMemory} for p in processes if p.pid != os.getpid()],
        }
    finally:
        ask(nvml.nvmlShutdown)


def _smi(*arguments: str) -> list[list[str]] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, env=without_probe(os.environ)
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _number(text: str, base: int = 10) -> int | None:
    try:
        return int(text, base)
    except ValueError:
        return None


def _smi_state(uuid: str) -> Json | None:
    selected = f"--id={uuid if uuid.startswith('GPU-') else f'GPU-{uuid}'}"
    fields = "driver_version,clocks.sm,clocks.mem,clocks_throttle_reasons.active,temperature.gpu"
    rows = _smi(f"--query-gpu={fields}", selected)
    if not rows or len(rows[0]) != 5:
        return None
    driver, sm, memory, reasons, temperature = rows[0]
    apps = _smi("--query-compute-apps=pid,used_memory", selected)
    others = None
    if apps is not None:
        pairs = [(_number(row[0]), _number(row[1])) for row in apps if len(row) == 2]
        others = [
            {"pid": pid, "memory_bytes": None if mib is None else mib << 20} for pid, mib in pairs if pid != os.getpid()
        ]
    return {
        "source": "nvidia-smi",
        "driver": driver,
        "clocks_mhz": {"sm": _number(sm), "memory": _number(memory)},
        "throttle_reasons": _number(reasons, 16),
        "temperature_c": _number(temperature),
        "other_processes": others,
    }
