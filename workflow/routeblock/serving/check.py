# SPDX-License-Identifier: Apache-2.0
"""Do a user's completions differ because of alignment, because of the batch, or for another reason?

His model is served by his vLLM on his GPU: the same prompts in the same batch again and again, as it is and with
canonical alignment, each in a process of its own, and once one by one. The processes are those of the recorded study.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from routeblock.checkpoint.families import FAMILIES
from routeblock.errors import InputError
from routeblock.evidence.files import write_json
from routeblock.serving import completions
from routeblock.serving.completions import Served
from routeblock.serving.kinds import Alignment, Kind, Mode
from routeblock.serving.protocol import Protocol, load, processes
from routeblock.timing.protocol import fault
from routeblock.vllm_plugin.contract import contract, known_versions

WHERE = "serving check"
METHODS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors")
WORKER = "routeblock.serving.worker"
MEMORY = 0.85  # of the GPU's, for a user's model


class Verdict(StrEnum):
    """What was seen."""

    ALIGNMENT = "alignment"
    BATCH = "batch"
    OTHER = "something else"
    NOTHING = "nothing seen"


@dataclass(frozen=True)
class Answer:
    """The verdict, its reason and what stops it, one line each."""

    verdict: Verdict
    reason: str
    cure: str


def judge(served: Iterable[Served], repeats: int) -> Answer:
    """The answer from completions of one mode: repeats of both alignments, and canonical ones one by one."""
    outputs: dict[str, set[Any]] = {alignment: set() for alignment in Alignment}
    batches: dict[tuple[str, int], list[Served]] = {}
    alone: dict[int, Served] = {}
    for s in served:
        if s.alone:
            alone[s.prompt] = s
        else:
            batches.setdefault((s.alignment, s.repeat), []).append(s)
    for (alignment, _), batch in batches.items():
        outputs[alignment].add(tuple((s.tokens, s.logprobs) for s in sorted(batch, key=lambda s: s.prompt)))
    native, canonical = len(outputs[Alignment.NATIVE]), len(outputs[Alignment.CANONICAL])
    first = batches.get((Alignment.CANONICAL, 0), [])
    moved = sum(alone[s.prompt].tokens != s.tokens for s in first if s.prompt in alone)
    split = f"alone, {moved} of {len(first)} completions have other tokens than in the batch"
    seen = f"{native} different outputs in {repeats} repeats as it is, {canonical} with canonical alignment"
    if canonical > 1:
        cure = (
            "look at other kernels: attention, sampling, other requests in the batch; canonical alignment is not enough"
        )
        return Answer(Verdict.OTHER, f"{seen}; {split}", cure)
    if native > 1:
        cure = "set ROUTEBLOCK_CANONICAL_ALIGNMENT=1 (docs/in-vllm.md)"
        return Answer(Verdict.ALIGNMENT, f"{seen}; {split}", cure)
    if moved:
        cure = "serve the same batch, or one prompt at a time; nothing here makes bits independent of the batch"
        return Answer(Verdict.BATCH, f"{seen}; {split}", cure)
    cure = "none is needed for these prompts; ask again with a larger batch or more repeats"
    return Answer(Verdict.NOTHING, f"{seen}; {split}", cure)


def _refuse(what: str, limit: str, way_out: str, where: str = WHERE) -> InputError:
    return InputError(what, where=where, limit=limit, way_out=way_out)


def ready() -> str:
    """The version of vLLM that is installed. Raises InputError without one that is known, or without a GPU."""
    if importlib.util.find_spec("vllm") is None:
        raise _refuse(
            "vllm is not installed for this Python",
            f"vLLM {known_versions()} and an NVIDIA GPU are needed",
            "run it with the interpreter that serves your model",
        )
    version = importlib.metadata.version("vllm")
    if contract(version) is None:
        raise _refuse(
            f"vLLM {version} is not a version that was read",
            f"versions {known_versions()} are known",
            "use one of them, or read the new one: make check-vllm-wheels",
        )
    try:
        import torch

        there = torch.cuda.is_available()
    except ImportError:
        there = False
    if not there:
        raise _refuse(
            "torch sees no GPU", "an NVIDIA GPU and its driver are needed", "run it on a machine that has them"
        )
    return version


def read_config(model: Path) -> dict[str, Any]:
    """A model's config.json. Raises InputError unless it has experts of 4 bits that Marlin's MoE path takes."""
    path = model / "config.json"
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("no mapping")
    except (OSError, ValueError, RecursionError) as e:
        raise _refuse(f"no configuration: {fault(e)}", "a model's folder with config.json", "name it", str(path)) from e
    text: dict[str, Any] = found["text_config"] if isinstance(found.get("text_config"), dict) else found
    family = FAMILIES.get(str(text.get("model_type")))
    experts = text.get(family.experts_key) if family else None
    if family is None or not experts:
        raise _refuse(
            f"model type {text.get('model_type')!r} without experts that are known",
            f"Mixture-of-Experts models of {', '.join(FAMILIES)}",
            "for another model canonical alignment changes nothing",
            str(path),
        )
    given = found.get("quantization_config") or text.get("quantization_config")
    stated = given if isinstance(given, dict) else {}
    method = stated.get("quant_method")
    four = stated.get("format") == "pack-quantized" if method == "compressed-tensors" else stated.get("bits") == 4
    if method not in METHODS or not four:
        raise _refuse(
            f"quantisation {method!r}" + (f" of {stated.get('bits', stated.get('format'))!r}" if method else ""),
            f"experts of 4 bits by {', '.join(METHODS)} run on Marlin's MoE kernel",
            "another model runs another kernel, which this does not look at",
            str(path),
        )
    return dict(text)


def protocol_for(
    committed: Protocol, config: dict[str, Any], *, batch: int, repeats: int, tokens: int, mode: Mode
) -> Any:
    """The committed protocol with a user's model, one batch and one mode, as plain JSON."""
    document: dict[str, Any] = committed.model_dump(mode="json")
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "float16")
    document["model"] |= {"vocabulary": int(config["vocab_size"]), "dtype": dtype}
    document |= {"batches": [batch], "captured_batches": [batch], "alone": [batch], "processes": 1, "repeats": repeats}
    document |= {"completion_tokens": tokens, "modes": {str(mode): document["modes"][str(mode)]}}
    document["prompts"] |= {"count": batch}
    document["captured"] |= {"batches": [batch]}
    return document


def run(
    model: Path, out: Path, committed: Path, *, batch: int, repeats: int, tokens: int, mode: Mode
) -> tuple[Answer, Sequence[Path]]:
    """Serve, judge, and leave completions and logs in `out`. Raises InputError as `ready` and `read_config`."""
    config = read_config(model)
    ready()
    document = protocol_for(load(committed), config, batch=batch, repeats=repeats, tokens=tokens, mode=mode)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "protocol.json"
    write_json(path, document)
    served: list[Served] = []
    files = []
    for number, process in enumerate(processes(load(path))):
        if process.kind is not Kind.REPEAT:
            continue
        folder, log = out / process.name, out / f"{process.name}.log"
        command = [sys.executable, "-m", WORKER, str(path), str(model), str(number), str(folder)]
        with log.open("wb") as to:
            code = subprocess.run([*command, f"--memory={MEMORY}"], stdout=to, stderr=subprocess.STDOUT).returncode
        if code or not (folder / completions.TABLE).is_file():
            raise _refuse(f"the engine ended with {code}", "vLLM has to serve this model here", "see the log", str(log))
        served += completions.read(folder / completions.TABLE)
        files.append(folder / completions.TABLE)
    return judge(served, repeats), files
