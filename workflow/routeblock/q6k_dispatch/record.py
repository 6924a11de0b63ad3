# SPDX-License-Identifier: Apache-2.0
"""Everything that this machine's GPU can tell, in one command without Snakemake: for a borrowed machine.

Checks and times by the protocol, then batches' bits, counters and the sanitizer. All files lie in one folder, sealed,
and once more in one archive.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeblock.cuda import q6k_dispatch as kernels
from routeblock.cuda import sanitizer
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import write_json
from routeblock.installed import versions
from routeblock.q6k_dispatch import counters
from routeblock.q6k_dispatch.protocol import Protocol, load
from routeblock.q6k_dispatch.study import KEY, STUDY, counted
from routeblock.timing.check import findings
from routeblock.timing.loop import Measured
from routeblock.timing.loop import run as measure

SANITIZER_CASES = "routeblock.q6k_dispatch.sanitizer_cases"
# Whose code records: with the kernels that are compiled for it.
_KERNELS = ("q6k_dispatch", "build", "align_kernels")
MODULES = (__name__, SANITIZER_CASES, *(f"routeblock.cuda.{name}" for name in _KERNELS))
_PACKAGES = ("torch", "numpy", "cuda-core", "cuda-bindings", "nvidia-ml-py")


@dataclass(frozen=True)
class Given:
    """What a record is made with: cubins by path (None: compile them), the peers' files (None: leave them out)."""

    cubin: Path | None = None
    schedules: Path | None = None
    plugin: Path | None = None
    llama: Path | None = None


def write(out: Path, protocol_path: Path, given: Given, *, progress: Callable[[str], None] = print) -> list[str]:
    """Record into the folder `out` and pack it; returns what does not hold, one line each.

    Raises InputError without a GPU, torch, cuda-core, or a peer that was asked for.
    """
    began = time.monotonic()
    protocol = load(protocol_path)
    gpu, cubins = _open(out, protocol, given)
    measured = Measured()
    facts: dict[str, Any] = {}
    try:
        plan = protocol.ceilings
        facts["ceilings"] = {"dram": gpu.read_rate(plan.dram_bytes), "l2": gpu.read_rate(plan.l2_bytes)}
        measure(gpu, gpu.stages(), protocol.acceptance, KEY, measured, progress=progress)
        progress(f"measured after {time.monotonic() - began:.1f} s")
        from routeblock.q6k_dispatch import batch_bits

        facts["batch_bits"] = batch_bits.run(gpu, protocol)
    finally:  # what was measured before an error stays
        run = _run(gpu, protocol, measured, given, cubins) | facts | {"seconds": round(time.monotonic() - began, 1)}
        STUDY.write(out, [STUDY.table.batch(row) for row in measured.rows], {"run": run})
        STUDY.seal(out, "record_dispatch", protocol_path, MODULES)
    write_json(out / "counters.json", counters.count(protocol_path, *cubins, gpu))
    progress(f"counted after {time.monotonic() - began:.1f} s")
    sanitizer.write(out / "sanitizer.json", SANITIZER_CASES, [str(cubins[0])])
    STUDY.seal(out, "record_dispatch", protocol_path, MODULES)
    return list(map(str, findings(STUDY, STUDY.read(out), protocol)))


def _open(out: Path, protocol: Protocol, given: Given) -> tuple[Any, tuple[Path, Path]]:
    try:
        import torch

        from routeblock.q6k_dispatch.gpu_session import Gpu
        from routeblock.q6k_dispatch.peers import LlamaCpp, Plugin
    except ImportError as e:
        raise InputError(
            f"{e}", where="fast-paths record", limit="torch for CUDA is needed", way_out="install envs/cuda.txt"
        ) from e
    if not torch.cuda.is_available():
        raise InputError(
            "no CUDA GPU is visible",
            where="fast-paths record",
            limit="it records a GPU",
            way_out="check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    major, minor = torch.cuda.get_device_capability(0)
    out.mkdir(parents=True, exist_ok=True)
    cubins = _cubins(out, f"sm_{major}{minor}", given)
    plugin = Plugin(given.plugin) if given.plugin else None
    llama = LlamaCpp(given.llama) if given.llama else None
    return Gpu(protocol, cubins[0].read_bytes(), cubins[1].read_bytes(), plugin, llama), cubins


def _cubins(out: Path, architecture: str, given: Given) -> tuple[Path, Path]:
    from routeblock.cuda.build import compile_kernels

    paths = given.cubin or out / "q6k_dispatch.cubin", given.schedules or out / "q6k_schedules.cubin"
    if given.cubin is None:
        paths[0].write_bytes(kernels.compile_for(architecture).code)
    if given.schedules is None:
        paths[1].write_bytes(compile_kernels(architecture).code)
    return paths


def _run(gpu: Any, protocol: Protocol, measured: Measured, given: Given, cubins: tuple[Path, Path]) -> dict[str, Any]:
    import torch

    return {
        "protocol_sha256": protocol.digest(),
        "device": gpu.nvml.identity()
        | {
            "architecture": gpu.architecture,
            "multiprocessors": gpu.multiprocessors,
            "l2_bytes": int(torch.cuda.get_device_properties(0).L2_cache_size),
            "cuda": torch.version.cuda,
            "packages": versions(_PACKAGES),
        },
        "cubin_sha256": {"q6k_dispatch": sha256_file(cubins[0]), "q6k_schedules": sha256_file(cubins[1])},
        "peers": {
            "plugin": _digests(given.plugin),
            "llama_cpp": _digests(given.llama),
            "block_size": gpu.plugin.block_size if gpu.plugin else None,
        },
        "checks": measured.checks,
        "batches": dict(Counter(map(counted, measured.rows))),
    }


def _digests(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    files = sorted(path.glob("*.so")) if path.is_dir() else [path]
    return {p.name: sha256_file(p) for p in files}
