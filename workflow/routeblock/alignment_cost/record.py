# SPDX-License-Identifier: Apache-2.0
"""Everything that this machine's GPU can tell of the cost, in one command without Snakemake: for a borrowed machine.

While the first Marlin launch compiles on the host, other processes check the kernels' bits and run the sanitizer; they
are over before anything is timed. All files lie in one folder, sealed, and once more in one archive.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from routeblock.alignment_cost.protocol import Protocol, load, planned
from routeblock.alignment_cost.study import KEY, STUDY, counted, stage
from routeblock.cuda import sanitizer
from routeblock.cuda.operators import EXTENSION_VARIABLE, find_extension, wheel_version
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import write_json
from routeblock.installed import versions
from routeblock.timing.check import findings
from routeblock.timing.loop import Measured
from routeblock.timing.loop import run as measure

EXACT, SANITIZER = "exactness.json", "sanitizer.json"
SANITIZER_CASES = "routeblock.alignment_cost.sanitizer_cases"
# Whose code records: with the kernels that are compiled for it.
MODULES = (__name__, SANITIZER_CASES, "routeblock.cuda.align_kernels")
CACHE_BYTES = str(4 << 30)  # of compiled kernels: the default is smaller than the extension


def full_k(extension: Path, schemas: dict[str, str]) -> dict[str, Any]:
    """Whether a build has the batch-invariant mode of the packed GEMM, and what that is read from."""
    argument = any("batch_invariant" in schema for schema in schemas.values())
    # Later builds take it from this variable of the environment, by name.
    variable = b"VLLM_BATCH_INVARIANT" in extension.read_bytes()
    return {"in_build": argument or variable, "argument": argument, "variable": variable}


def ready(command: str) -> None:
    """Raises InputError, in the name of `command`, unless torch sees a GPU and cuda-core can be imported."""
    try:
        import cuda.core  # noqa: F401
        import torch
    except ImportError as e:
        raise InputError(
            f"{e}",
            where=command,
            limit="torch for CUDA and cuda-core are needed",
            way_out="install envs/cuda.txt, and cuda-core as envs/cuda13.txt has it",
        ) from e
    if not torch.cuda.is_available():
        raise InputError(
            "torch sees no GPU",
            where=command,
            limit="an NVIDIA GPU of sm_75 or newer and its driver are needed",
            way_out="run it on a machine that has them",
        )


def check_exactness(out: Path, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Run the checks of bits on CUDA device 0 and write `exactness.json` to `out`. Raises InputError as `ready`."""
    ready("alignment exactness")
    from routeblock.alignment_cost import exactness

    told = exactness.check(progress)
    write_json(out / EXACT, told)
    return told


def _beside(out: Path) -> threading.Thread:
    def work() -> None:
        subprocess.run([sys.executable, "-m", "routeblock", "alignment", "exactness", "--out", str(out)])
        sanitizer.write(out / SANITIZER, SANITIZER_CASES, [])

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def write(out: Path, protocol_path: Path, *, seconds: float, progress: Callable[[str], None] = print) -> list[str]:
    """Record into the folder `out` and pack it; returns what does not hold, one line each.

    No point is begun after `seconds` seconds. $ROUTEBLOCK_EXTENSION names the extension; default: an installed vllm.
    Raises InputError, before anything is written, without a GPU, torch, cuda-core or the extension.
    """
    began = time.monotonic()
    os.environ.setdefault("CUDA_CACHE_MAXSIZE", CACHE_BYTES)
    protocol = load(protocol_path)
    named = os.environ.get(EXTENSION_VARIABLE)
    extension = find_extension(Path(named) if named else None)
    ready("alignment record")
    out.mkdir(parents=True, exist_ok=True)
    for name in STUDY.files:
        (out / name).unlink(missing_ok=True)
    beside = _beside(out)
    try:
        from routeblock.alignment_cost.gpu_session import GpuSessions

        gpu = GpuSessions(extension, protocol)
        gpu.warm_up(beside.is_alive)
        progress(f"warm after {time.monotonic() - began:.1f} s")
    finally:
        beside.join()
    progress(f"checked after {time.monotonic() - began:.1f} s")
    measured = Measured()
    stages = [stage(point, protocol, None) for point in planned(protocol)]
    try:
        measure(gpu, stages, protocol.acceptance, KEY, measured, deadline=began + seconds, progress=progress)
    finally:  # what was measured before an error stays
        run = _run(gpu, extension, protocol, measured) | {"seconds": round(time.monotonic() - began, 1)}
        STUDY.write(out, [STUDY.table.batch(row) for row in measured.rows], {"run": run})
        STUDY.seal(out, "record_alignment", protocol_path, MODULES)
    return list(map(str, findings(STUDY, STUDY.read(out), protocol)))


def _run(gpu: Any, extension: Path, protocol: Protocol, measured: Measured) -> dict[str, Any]:
    import torch

    from routeblock.cuda.align import prepare

    properties = torch.cuda.get_device_properties(0)
    packages = ("torch", "numpy", "cuda-core", "cuda-bindings", "nvidia-ml-py")
    return {
        "protocol_sha256": protocol.digest(),
        "device": gpu.nvml.identity()
        | {
            "architecture": f"sm_{properties.major}{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "packages": versions(packages),
        },
        "extension": {
            "file": extension.name,
            "sha256": sha256_file(extension),
            "vllm": wheel_version(extension),
            "schemas": gpu.operators.schemas,
            "full_k": full_k(extension, gpu.operators.schemas),
        },
        "cubin_sha256": prepare(0).cubin_sha256,
        "layer_forms": {"activation": "torch: silu, then multiply; two kernels", "sum": "torch.sum"},
        "checks": measured.checks,
        "not_measured": measured.left,
        "batches": dict(Counter(map(counted, measured.rows))),
    }
