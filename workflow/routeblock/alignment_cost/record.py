# SPDX-License-Identifier: Apache-2.0
"""Everything that this machine's GPU can tell of the cost, in one command without Snakemake: for a borrowed machine.

While the first Marlin launch compiles on the host, other processes check the kernels' bits and run the sanitizer; they
are over before anything is timed. All files lie in one folder, sealed, and once more in one archive.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from routeblock.alignment_cost import batches as raw
from routeblock.alignment_cost.measure import Measured
from routeblock.alignment_cost.measure import run as measure
from routeblock.alignment_cost.protocol import Protocol, load
from routeblock.cuda import sanitizer
from routeblock.cuda.operators import EXTENSION_VARIABLE, find_extension, wheel_version
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_file
from routeblock.evidence.files import atomic_file, write_json
from routeblock.evidence.gpu_record import GpuRecord, documents
from routeblock.installed import versions
from routeblock.protocols import fault

BATCHES, RUN, EXACT, SANITIZER = "batches.parquet", "run.json", "exactness.json", "sanitizer.json"
FILES = (BATCHES, RUN, EXACT, SANITIZER)
FOLDER = GpuRecord("alignment", FILES, "alignment_cost.tar.gz")
EXERCISE = "routeblock.alignment_cost.exercise"
# Whose code records: with the kernels that are compiled for it.
MODULES = (__name__, EXERCISE, "routeblock.cuda.align_kernels")
CACHE_BYTES = str(4 << 30)  # of compiled kernels: the default is smaller than the extension


@dataclass(frozen=True)
class Recorded:
    """The contents of a record's folder."""

    folder: Path
    batches: list[raw.Batch]
    run: dict[str, Any]
    exactness: dict[str, Any]
    sanitizer: dict[str, Any]


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
    ready("alignment-exactness")
    from routeblock.alignment_cost import exactness

    told = exactness.check(progress)
    write_json(out / EXACT, told)
    return told


def _beside(out: Path) -> threading.Thread:
    def work() -> None:
        subprocess.run([sys.executable, "-m", "routeblock", "alignment-exactness", "--out", str(out)])
        sanitizer.write(out / SANITIZER, EXERCISE, [])

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
    ready("record-alignment")
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    beside = _beside(out)
    try:
        from routeblock.alignment_cost.rig import GpuRig

        rig = GpuRig(extension, protocol)
        rig.warm_up(beside.is_alive)
        progress(f"warm after {time.monotonic() - began:.1f} s")
    finally:
        beside.join()
    progress(f"checked after {time.monotonic() - began:.1f} s")
    measured = Measured()
    try:
        measure(rig, protocol, measured, deadline=began + seconds, progress=progress)
    finally:  # what was measured before an error stays
        run = _run(rig, extension, protocol, measured) | {"seconds": round(time.monotonic() - began, 1)}
        with atomic_file(out / BATCHES) as tmp:
            raw.write(tmp, measured.batches)
        write_json(out / RUN, run)
        FOLDER.seal(out, protocol_path, protocol.digest(), MODULES)
    return problems(read(out), protocol)


def _run(rig: Any, extension: Path, protocol: Protocol, measured: Measured) -> dict[str, Any]:
    import torch

    from routeblock.cuda.align import prepare

    properties = torch.cuda.get_device_properties(0)
    packages = ("torch", "numpy", "cuda-core", "cuda-bindings", "nvidia-ml-py")
    return {
        "protocol_sha256": protocol.digest(),
        "device": rig.nvml.identity()
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
            "schemas": rig.operators.schemas,
            "full_k": full_k(extension, rig.operators.schemas),
        },
        "cubin_sha256": prepare(0).cubin_sha256,
        "layer_forms": {"activation": "torch: silu, then multiply; two kernels", "sum": "torch.sum"},
        "checks": measured.checks,
        "not_measured": measured.left,
        "batches": dict(Counter(f"{b.campaign} {b.mode} {b.reason or 'accepted'}" for b in measured.batches)),
    }


class _Told(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Device(_Told):
    name: str
    architecture: str


class _Extension(_Told):
    sha256: str
    vllm: str | None


class _Check(_Told):
    campaign: str
    experts: int
    top_k: int
    tokens: int
    block_size: int
    variant: str
    wrong: list[str]
    canonical_sha256: list[str]


class _Run(_Told):
    protocol_sha256: str
    device: _Device
    extension: _Extension
    cubin_sha256: str
    checks: list[_Check]
    not_measured: list[str]
    batches: dict[str, int]


class _Exactness(_Told):
    gpu: str
    cubin_sha256: str
    differs: str


class _Tool(_Told):
    tool: str
    outcome: str
    lines: list[str]


class _Tools(_Told):
    tools: list[_Tool]


# What later steps read of each document; what else it tells is left as it is.
_DOCUMENTS: dict[str, type[_Told]] = {RUN: _Run, EXACT: _Exactness, SANITIZER: _Tools}


def _document(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        _DOCUMENTS[path.name].model_validate_json(data)
    except ValidationError as e:
        raise ValueError(f"{path.name}: {fault(e)}") from e
    told: dict[str, Any] = json.loads(data)
    return told


def read(folder: Path) -> Recorded:
    """Read such a folder. Raises InputError if a file is missing or malformed."""
    run, exact, tools = documents(folder, FILES, "record again: routeblock record-alignment", _document)
    return Recorded(folder, raw.read(folder / BATCHES), run, exact, tools)


def problems(found: Recorded, protocol: Protocol) -> list[str]:
    """What a record lacks or does not show, one line each. A refused or absent sanitizer is told, and no problem."""
    run = found.run
    wrong = protocol.unlike(run["protocol_sha256"])
    if run["extension"]["sha256"] not in {b.extension_sha256 for b in protocol.builds}:
        wrong.append(f"extension {run['extension']['sha256'][:12]} is none of the protocol's builds")
    if found.exactness["differs"]:
        wrong.append(f"bits differ: {found.exactness['differs']}")
    if found.exactness["cubin_sha256"] != run["cubin_sha256"]:
        wrong.append("the kernels checked are not the kernels timed")
    wrong += sanitizer.findings(found.sanitizer)
    wrong += [f"{_where(c)}: wrong {', '.join(c['wrong'])}" for c in run["checks"] if c["wrong"]]
    return wrong + [f"{point}: not measured" for point in run["not_measured"]]


def _where(check: dict[str, Any]) -> str:
    return f"{check['campaign']} E={check['experts']} k={check['top_k']} M={check['tokens']}"
