# SPDX-License-Identifier: Apache-2.0
"""One process of the engine: it imports, waits for its turn on the GPU, does what its kind does, writes one folder.

    python -m routeblock.serving.worker PROTOCOL MODEL NUMBER OUT [AFTER] [--memory=SHARE]

NUMBER: of the process in `protocol.processes`. AFTER: a file that the process ahead writes when it is done. SHARE:
of the GPU's memory, for the engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from routeblock.cuda import telemetry
from routeblock.cuda.gpu_lock import Turn
from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_bytes, sha256_file
from routeblock.evidence.files import atomic_folder, write_json
from routeblock.installed import versions
from routeblock.serving import completions, layer_check
from routeblock.serving.completions import Served
from routeblock.serving.kinds import Alignment, Clock, Kind, Mode
from routeblock.serving.layer_capture import Capture
from routeblock.serving.protocol import Process, Protocol, load, order, processes, prompts
from routeblock.serving.session import ENVIRONMENT, Completion, Engine
from routeblock.serving.study import KEY, STUDY, check_of, planned
from routeblock.timing.loop import Measured, Sample, Verdict
from routeblock.timing.loop import run as measure
from routeblock.timing.plan import Series, Stage

DOCUMENT = "process.json"
WAIT_S = 540.0
MEMORY = 0.3  # of the GPU's: the generated model is small
PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "cuda-core", "cuda-bindings", "nvidia-ml-py")


def open_engine(model: Path, protocol: Protocol, process: Process, memory: float) -> Engine:
    """The engine with room for the protocol's largest batch; in a native process without the plug-in."""
    return Engine(
        model,
        dtype=protocol.model.dtype,
        tokens=protocol.prompts.tokens + protocol.completion_tokens,
        batch=max(protocol.batches),
        graphs=protocol.captured_batches if process.mode is Mode.GRAPHS else (),
        memory=memory,
        plugin=process.kind is not Kind.REPEAT or process.alignment is Alignment.CANONICAL,
    )


def gpu() -> telemetry.Gpu:
    """This process's GPU as NVML sees it."""
    import torch

    found = torch.cuda.get_device_properties(0)
    return telemetry.Gpu(f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")


def digest(served: list[Completion]) -> str:
    """SHA-256 over the token ids of a batch, prompt by prompt."""
    return sha256_bytes(b"".join(c.token_bytes for c in served))


def repeats(engine: Engine, protocol: Protocol, process: Process) -> tuple[list[Served], list[dict[str, Any]]]:
    """Every batch size again and again; the seconds of each step beside."""
    engine.use(process.alignment, process.mode)
    asked, tokens = prompts(protocol), protocol.completion_tokens
    found: list[Served] = []
    steps = []

    def serve(together: list[list[int]], **where: Any) -> None:
        answers, seconds = engine.complete(together, tokens, logprobs=True)
        for i, answer in enumerate(answers):
            row = {"prompt": i} | where
            found.append(
                Served(
                    str(process.mode), str(process.alignment), process.number, tokens=answer.token_bytes,
                    logprobs=answer.logprob_bytes, **row,
                )
            )  # fmt: skip
        steps.append({k: v for k, v in where.items() if k != "prompt"} | {"seconds": [round(s, 6) for s in seconds]})

    for batch in protocol.batches:
        for _ in range(protocol.warmups):
            engine.complete(asked[:batch], tokens, logprobs=True)
    for batch, repeat in order(protocol, process):
        serve(asked[:batch], alone=False, batch=batch, repeat=repeat)
    if process.alone:
        for i in range(max(protocol.alone)):
            serve([asked[i]], alone=True, batch=max(protocol.alone), repeat=0, prompt=i)
    return found, steps


class Steps:
    """The engine as `timing.loop` asks for it: a device and a session in one."""

    def __init__(self, engine: Engine, protocol: Protocol) -> None:
        self.nvml = gpu()
        self._engine, self._protocol, self._prompts = engine, protocol, prompts(protocol)
        self.stage: Stage = planned(protocol)[0]

    def state(self) -> Any:
        return self.nvml.state()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def open(self, stage: Stage) -> Steps:
        self.stage = stage
        return self

    def close(self) -> None:
        pass

    def _run(self, side: str) -> tuple[list[Completion], list[float]]:
        mode, batch = self.stage.shape
        self._engine.use(Alignment(side), mode)
        return self._engine.complete(self._prompts[:batch], self._protocol.completion_tokens, logprobs=False)

    def check(self) -> Verdict:
        """Canonical completions twice, native ones once: those of canonical order must be the same."""
        one, two = (digest(self._run(Alignment.CANONICAL)[0]) for _ in range(2))
        wrong = frozenset({str(Alignment.CANONICAL)} if one != two else ())
        return Verdict(wrong, check_of(self.stage, {"canonical_sha256": [one, two]}, wrong))

    def warm_up(self, series: Series, clocks: tuple[str, ...]) -> None:
        for _ in range(self._protocol.steps.warmups):
            self._run(series.side)

    def measure(self, series: Series, clocks: tuple[str, ...]) -> list[Sample]:
        served, seconds = self._run(series.side)
        if len(seconds) != self._protocol.completion_tokens:
            raise RuntimeError(f"{self.stage.label}: {len(seconds)} steps for {len(served[0].tokens)} tokens")
        parts = {Clock.PREFILL: seconds[:1], Clock.DECODE: seconds[1:]}
        return [Sample(sum(parts[Clock(c)]) * 1e6, len(parts[Clock(c)])) for c in clocks]


def timed(engine: Engine, protocol: Protocol) -> dict[str, Any]:
    """Every stage, timed."""
    steps, measured = Steps(engine, protocol), Measured()
    measure(steps, planned(protocol), protocol.acceptance, KEY, measured, progress=print)
    return {"rows": measured.rows, "checks": measured.checks, "not_measured": measured.left}


def observed(engine: Engine, protocol: Protocol) -> dict[str, Any]:
    """Plans of the first MoE layer, native and eager; tokens that alignment saw, eager and at capture."""
    asked, layers = prompts(protocol), protocol.model.layers
    plans = []
    engine.use(Alignment.NATIVE, Mode.EAGER)
    for repeat in range(protocol.observed.repeats):
        for batch in protocol.batches:
            with engine.watched() as calls:
                engine.complete(asked[:batch], 2, logprobs=False)
            # Two steps: prefill and one of decode, each through every layer.
            assert len(calls) == 2 * layers, (len(calls), layers)
            for clock, call in zip(Clock, (calls[0], calls[layers]), strict=True):
                plans.append({"batch": batch, "repeat": repeat, "clock": str(clock)} | call)
    with engine.watched() as calls:
        engine.hold_graphs(Alignment.NATIVE)
    captured = sorted({call["tokens"] for call in calls if call["fingerprint"] is None})
    padded = {str(batch): engine.padded(batch) for batch in protocol.batches}
    return {"plans": plans, "captured_tokens": captured, "padded": padded}


def layers(engine: Engine, protocol: Protocol) -> dict[str, Capture]:
    """The first MoE layer's call of the first decode step, under every injected order of arrival."""
    found = {}
    engine.use(Alignment.NATIVE, Mode.EAGER)
    for word in protocol.captured.arrivals:
        for batch in protocol.captured.batches:
            with engine.injected(word), engine.captured(batch) as call:
                engine.complete(prompts(protocol)[:batch], 2, logprobs=False)
            found[f"{word}/{batch}"] = dict(call)
    return found


def main() -> int:
    """Run one process; 2 when this machine cannot."""
    words = [word for word in sys.argv[1:] if not word.startswith("--memory=")]
    memory = next((float(word.partition("=")[2]) for word in sys.argv[1:] if word not in words), MEMORY)
    protocol_path, model, number, out = Path(words[0]), Path(words[1]), int(words[2]), Path(words[3])
    after = Path(words[4]) if len(words) > 4 else None
    try:
        protocol = load(protocol_path)
        process = processes(protocol)[number]
        os.environ.update(ENVIRONMENT)
        began = time.perf_counter()
        import vllm.entrypoints.llm

        imported = time.perf_counter() - began
        turn = replace(Turn(), after=after, limit=WAIT_S).take()
    except InputError as e:
        print(e, file=sys.stderr)
        return 2
    began = time.perf_counter()
    engine = open_engine(model, protocol, process, memory)
    ready = time.perf_counter() - began
    index = model / "model.safetensors.index.json"
    document: dict[str, Any] = {
        "process": vars(process) | {"name": process.name},
        "vllm": vllm.__version__,
        "arguments": engine.arguments,
        "packages": versions(PACKAGES),
        "device": gpu().identity(),
        "index_sha256": sha256_file(index) if index.is_file() else None,
        "turn": turn,
    }
    with atomic_folder(out) as tmp:
        if process.kind is Kind.REPEAT:
            served, steps = repeats(engine, protocol, process)
            completions.write(tmp / completions.TABLE, served)
            document["steps"] = steps
        elif process.kind is Kind.TIMED:
            found = timed(engine, protocol)
            STUDY.table.write(tmp / "batches.parquet", [STUDY.table.batch(row) for row in found.pop("rows")])
            document |= found
        elif process.kind is Kind.OBSERVED:
            document |= observed(engine, protocol)
        else:
            document["captured"] = layer_check.write(tmp / layer_check.TENSORS, layers(engine, protocol))
        document["seconds"] = {
            "import": round(imported, 2),
            "engine": round(ready, 2),
            "work": round(time.perf_counter() - began - ready, 2),
        }
        write_json(tmp / DOCUMENT, json.loads(json.dumps(document, default=str)))
    print(f"{process.name}: {document['seconds']}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # the engine's own end takes seconds that the next process waits for


if __name__ == "__main__":
    sys.exit(main())
