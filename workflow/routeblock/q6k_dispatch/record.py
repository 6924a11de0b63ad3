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
from routeblock.evidence.files import atomic_file, write_json
from routeblock.evidence.gpu_record import GpuRecord, documents
from routeblock.installed import versions
from routeblock.q6k_dispatch import batches as raw
from routeblock.q6k_dispatch import counters
from routeblock.q6k_dispatch.measure import Measured
from routeblock.q6k_dispatch.measure import run as measure
from routeblock.q6k_dispatch.protocol import OURS, Protocol, load

BATCHES, RUN, COUNTERS, SANITIZER = "batches.parquet", "run.json", "counters.json", "sanitizer.json"
FILES = (BATCHES, RUN, COUNTERS, SANITIZER)
FOLDER = GpuRecord("dispatch", FILES, "q6k_dispatch.tar.gz")
EXERCISE = "routeblock.q6k_dispatch.exercise"
# Whose code records: with the kernels that are compiled for it.
MODULES = (__name__, EXERCISE, *(f"routeblock.cuda.{name}" for name in ("q6k_dispatch", "build", "align_kernels")))
_PACKAGES = ("torch", "numpy", "cuda-core", "cuda-bindings", "nvidia-ml-py")


@dataclass(frozen=True)
class Recorded:
    """The contents of a record's folder."""

    folder: Path
    batches: list[raw.Batch]
    run: dict[str, Any]
    counters: dict[str, Any]
    sanitizer: dict[str, Any]


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
    rig, cubins = _open(out, protocol, given)
    measured = Measured()
    facts: dict[str, Any] = {}
    try:
        plan = protocol.ceilings
        facts["ceilings"] = {"dram": rig.read_rate(plan.dram_bytes), "l2": rig.read_rate(plan.l2_bytes)}
        measure(rig, protocol, measured, progress)
        progress(f"measured after {time.monotonic() - began:.1f} s")
        from routeblock.q6k_dispatch import batch_bits

        facts["batch_bits"] = batch_bits.run(rig, protocol)
    finally:  # what was measured before an error stays
        run = _run(rig, protocol, measured, given, cubins) | facts | {"seconds": round(time.monotonic() - began, 1)}
        with atomic_file(out / BATCHES) as tmp:
            raw.write(tmp, measured.batches)
        write_json(out / RUN, run)
        FOLDER.seal(out, protocol_path, protocol.digest(), MODULES)
    write_json(out / COUNTERS, counters.count(protocol_path, *cubins, rig))
    progress(f"counted after {time.monotonic() - began:.1f} s")
    sanitizer.write(out / SANITIZER, EXERCISE, [str(cubins[0])])
    FOLDER.seal(out, protocol_path, protocol.digest(), MODULES)
    return problems(read(out), protocol)


def _open(out: Path, protocol: Protocol, given: Given) -> tuple[Any, tuple[Path, Path]]:
    try:
        import torch

        from routeblock.q6k_dispatch.peers import LlamaCpp, Plugin
        from routeblock.q6k_dispatch.rig import Rig
    except ImportError as e:
        raise InputError(
            f"{e}", where="record-dispatch", limit="torch for CUDA is needed", way_out="install envs/cuda.txt"
        ) from e
    if not torch.cuda.is_available():
        raise InputError(
            "no CUDA GPU is visible",
            where="record-dispatch",
            limit="it records a GPU",
            way_out="check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    major, minor = torch.cuda.get_device_capability(0)
    out.mkdir(parents=True, exist_ok=True)
    cubins = _cubins(out, f"sm_{major}{minor}", given)
    plugin = Plugin(given.plugin) if given.plugin else None
    llama = LlamaCpp(given.llama) if given.llama else None
    return Rig(protocol, cubins[0].read_bytes(), cubins[1].read_bytes(), plugin, llama), cubins


def _cubins(out: Path, architecture: str, given: Given) -> tuple[Path, Path]:
    from routeblock.cuda.build import compile_kernels

    paths = given.cubin or out / "q6k_dispatch.cubin", given.schedules or out / "q6k_schedules.cubin"
    if given.cubin is None:
        paths[0].write_bytes(kernels.compile_for(architecture).code)
    if given.schedules is None:
        paths[1].write_bytes(compile_kernels(architecture).code)
    return paths


def _run(rig: Any, protocol: Protocol, measured: Measured, given: Given, cubins: tuple[Path, Path]) -> dict[str, Any]:
    import torch

    return {
        "protocol_sha256": protocol.digest(),
        "device": rig.nvml.identity()
        | {
            "architecture": rig.architecture,
            "multiprocessors": rig.multiprocessors,
            "l2_bytes": int(torch.cuda.get_device_properties(0).L2_cache_size),
            "cuda": torch.version.cuda,
            "packages": versions(_PACKAGES),
        },
        "cubin_sha256": {"q6k_dispatch": sha256_file(cubins[0]), "q6k_schedules": sha256_file(cubins[1])},
        "peers": {
            "plugin": _digests(given.plugin),
            "llama_cpp": _digests(given.llama),
            "block_size": rig.plugin.block_size if rig.plugin else None,
        },
        "checks": measured.checks,
        "batches": dict(Counter(f"{b.series} {b.reason or 'accepted'}" for b in measured.batches)),
    }


def _digests(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    files = sorted(path.glob("*.so")) if path.is_dir() else [path]
    return {p.name: sha256_file(p) for p in files}


def read(folder: Path) -> Recorded:
    """Read such a folder. Raises InputError if a file is missing or malformed."""
    run, counted, tools = documents(folder, FILES, "record again: routeblock record-dispatch")
    return Recorded(folder, raw.read(folder / BATCHES), run, counted, tools)


def problems(found: Recorded, protocol: Protocol) -> list[str]:
    """What a record lacks or does not show, one line each. Refused counters or tools are told, and no problem."""
    run = found.run
    wrong = protocol.unlike(run["protocol_sha256"])
    plugin = set(run["peers"]["plugin"].values())
    if plugin and plugin != {protocol.plugin.sha256}:
        wrong.append("the plug-in is not the protocol's")
    for check in run["checks"]:
        where = f"{check['role']} {check['slots']}/{check['pool']} {check['rows']}x{check['cols']}"
        if check["wrong"]:
            wrong.append(f"{where}: wrong {', '.join(check['wrong'])}")
        if len({check["output_sha256"][str(side)] for side in OURS}) != 1:
            wrong.append(f"{where}: the paths' bits differ")
        if not check["furthest_of_bound"] <= 1:
            wrong.append(f"{where}: {check['furthest_of_bound']} of the bound")
    ours = {b["sha256"] for b in run.get("batch_bits", []) if b["side"] in set(map(str, OURS))}
    if len(ours) != 1:
        wrong.append(f"one job has {len(ours)} outputs in different batches")
    return wrong + sanitizer.findings(found.sanitizer)
