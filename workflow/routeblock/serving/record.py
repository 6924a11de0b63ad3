# SPDX-License-Identifier: Apache-2.0
"""The record of a GPU, in one command without Snakemake: processes of the engine one by one, then one sealed folder.

A process that is done leaves its folder below `processes/`; a second command goes on where the first was stopped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from routeblock.cuda.operators import find_extension
from routeblock.errors import InputError
from routeblock.evidence.archive import pack
from routeblock.evidence.digest import sha256_file, sha256_json
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import seal
from routeblock.serving import completions, model
from routeblock.serving.kinds import Kind
from routeblock.serving.layer_check import OBSERVED, TENSORS
from routeblock.serving.protocol import Process, Protocol, load, processes
from routeblock.serving.study import STUDY, counted, planned
from routeblock.serving.verification import FILES, findings

WORKER = "routeblock.serving.worker"
DOCUMENT = "process.json"
MODULES = (__name__, WORKER)
MODEL_DOCUMENT = "model.json"


def ready() -> None:
    """Raises InputError unless vLLM is installed and torch sees a GPU."""
    if importlib.util.find_spec("vllm") is None:
        raise InputError(
            "vllm is not installed for this Python",
            where="serving record",
            limit="vLLM 0.24.0 and an NVIDIA GPU of sm_80 to sm_90 are needed",
            way_out="install envs/cuda.txt into an environment, and run it there",
        )
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            "torch sees no GPU",
            where="serving record",
            limit="an NVIDIA GPU of sm_80 to sm_90 and its driver are needed",
            way_out="run it on a machine that has them",
        )


def made_model(folder: Path, protocol: Protocol) -> tuple[Path, dict[str, str]]:
    """The protocol's model in `folder`, made if it is not there, and the SHA-256 of its weight files."""
    stated = folder.parent / MODEL_DOCUMENT
    if not (folder.is_dir() and stated.is_file()):
        write_json(stated, model.write(folder, protocol.model))
    digests: dict[str, str] = json.loads(stated.read_bytes())
    return folder, digests


def write(out: Path, protocol_path: Path, *, seconds: float, progress: Callable[[str], None] = print) -> list[str]:
    """Record into the folder `out`; returns what does not hold, one line each.

    No process is begun after `seconds` seconds. Raises InputError, before anything is written, without vLLM or a GPU,
    and if a process failed.
    """
    began = time.monotonic()
    protocol = load(protocol_path)
    ready()
    folder, digests = made_model(out / "model", protocol)
    progress(f"model after {time.monotonic() - began:.0f} s")
    done = _run(out / "processes", protocol_path, folder, protocol, began + seconds, progress)
    left = [p.name for p in processes(protocol) if p.name not in done]
    if left:
        return [f"{name}: not run within {seconds:g} s; the same command goes on" for name in left]
    assemble(out, protocol_path, digests)
    return list(map(str, findings(STUDY.read(out), protocol)))


def _run(
    out: Path, protocol_path: Path, folder: Path, protocol: Protocol, until: float, progress: Callable[[str], None]
) -> set[str]:
    """Run what is not there yet. While one has the GPU, the next imports; beside what is timed, nothing does."""
    out.mkdir(parents=True, exist_ok=True)
    every = list(enumerate(processes(protocol)))
    missing = [(i, p) for i, p in every if not (out / p.name / DOCUMENT).is_file()]
    running: list[tuple[Process, subprocess.Popen[bytes]]] = []
    try:
        while missing or running:
            quiet = any(Kind.TIMED is p.kind for p, _ in running) or (
                bool(running) and bool(missing) and missing[0][1].kind is Kind.TIMED
            )
            if missing and len(running) < 2 and not quiet and time.monotonic() < until:
                number, process = missing.pop(0)
                after = out / running[-1][0].name / DOCUMENT if running else None
                running.append((process, _start(out, protocol_path, folder, number, process, after)))
                continue
            if not running:
                break
            process, child = running.pop(0)
            if child.wait() != 0 or not (out / process.name / DOCUMENT).is_file():
                raise InputError(
                    f"process {process.name} ended with {child.returncode}",
                    where=str(out / f"{process.name}.log"),
                    limit="each process of the protocol has to end with 0",
                    way_out="see the log; the same command runs it again",
                )
            progress(f"{process.name} after {time.monotonic() - until:+.0f} s of the limit")
    finally:
        for _, child in running:
            child.terminate()
    return {p.name for _, p in every if (out / p.name / DOCUMENT).is_file()}


def _start(
    out: Path, protocol_path: Path, folder: Path, number: int, process: Process, after: Path | None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", WORKER, str(protocol_path), str(folder), str(number), str(out / process.name)]
    with (out / f"{process.name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *([str(after)] if after else [])],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "8"},
        )


def assemble(out: Path, protocol_path: Path, digests: dict[str, str]) -> None:
    """The record's files from the folders of its processes, sealed and packed."""
    protocol = load(protocol_path)
    told = {p.name: json.loads((out / "processes" / p.name / DOCUMENT).read_bytes()) for p in processes(protocol)}
    served = []
    for process in processes(protocol):
        if process.kind is Kind.REPEAT:
            served += completions.read(out / "processes" / process.name / completions.TABLE)
    completions.write(out / completions.TABLE, served)
    timed, seen = (next(t for t in told.values() if t["process"]["kind"] == k) for k in (Kind.TIMED, Kind.OBSERVED))
    batches = STUDY.table.read(out / "processes" / timed["process"]["name"] / "batches.parquet")
    extension = find_extension()
    model_sha256 = sha256_json(digests)
    run: dict[str, Any] = {
        "protocol_sha256": protocol.digest(),
        "device": timed["device"],
        "engine": {"vllm": timed["vllm"], "arguments": timed["arguments"], "packages": timed["packages"]},
        "extension": {"file": extension.name, "sha256": sha256_file(extension)},
        "model": digests,
        "model_sha256": model_sha256,
        "processes": [
            {"name": name, "device": t["device"], "model_sha256": model_sha256, "turn": t["turn"]}
            | {"seconds": t["seconds"], "index_sha256": t["index_sha256"], "arguments": t["arguments"]}
            for name, t in told.items()
        ],
        "steps": {name: t["steps"] for name, t in told.items() if "steps" in t},
        "checks": timed["checks"],
        "not_measured": timed["not_measured"],
        "batches": dict(Counter(map(counted, STUDY.table.rows(batches)))),
        "planned": len(planned(protocol)),
    }
    STUDY.write(out, batches, {"run": run})
    captured = next(p for p in processes(protocol) if p.kind is Kind.CAPTURED)
    shutil.copyfile(out / "processes" / captured.name / TENSORS, out / TENSORS)
    seen |= {"captured": told[captured.name]["captured"]}
    write_json(out / OBSERVED, {k: seen[k] for k in ("plans", "captured_tokens", "padded", "captured")})
    files = [out / name for name in FILES]
    manifest = out / "record_serving.manifest.json"
    parameters = {"protocol_sha256": protocol.digest()}
    seal(manifest, rule="record_serving", outputs=files, inputs=[protocol_path], parameters=parameters, modules=MODULES)
    pack(out / STUDY.archive, {p.name: p for p in [*files, manifest]})
