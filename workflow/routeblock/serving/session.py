# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine in this process: opened, given batches, switched between alignments and between eager and graphs.

Needs vLLM 0.24.0 and a GPU; facts about its engine core and model runner were read in that version.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.errors import InputError
from routeblock.moe.routing import AlignedPlan
from routeblock.serving.kinds import Alignment, Mode
from routeblock.serving.layer_capture import Capture, captured
from routeblock.vllm_plugin.alignment import VARIABLE, CanonicalAlignment
from routeblock.vllm_plugin.contract import NAME, contract
from routeblock.vllm_plugin.injection import InjectedAlignment

# One process, no download, no sampler that compiles.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
# vLLM's own arguments. Steps are synchronous, so that one can be timed; prefixes are not kept, so that every prefill
# runs; Triton's attention needs no library of its own.
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "attention_backend": "TRITON_ATTN",
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "disable_log_stats": True,
    "seed": 0,
}


@dataclass(frozen=True)
class Completion:
    """What the engine gave for one prompt: token ids, and the float32 log probability of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def token_bytes(self) -> bytes:
        """int32, little-endian."""
        return np.array(self.tokens, "<i4").tobytes()

    @property
    def logprob_bytes(self) -> bytes:
        """float32, little-endian."""
        return np.array(self.logprobs, "<f4").tobytes()


class Engine:
    """The engine with a model.

    tokens: the longest prompt with its completion; batch: the most prompts at once; graphs: decode steps of these
    batch sizes are captured, of none where it is empty; plugin: whether canonical order is there at all, without it
    vLLM is as it was installed; memory: the share of the GPU's that the engine takes.
    """

    def __init__(
        self, model: Path, *, dtype: str, tokens: int, batch: int, graphs: Sequence[int], plugin: bool, memory: float
    ) -> None:
        os.environ.update(ENVIRONMENT)
        os.environ[VARIABLE] = "1" if plugin else "0"
        from vllm import LLM

        compilation: dict[str, Any] = {"mode": 0, "cudagraph_mode": "NONE"}
        if graphs:
            compilation |= {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(graphs)}
        self.arguments = ARGUMENTS | {
            "dtype": dtype,
            "gpu_memory_utilization": memory,
            "max_model_len": tokens,
            "max_num_seqs": batch,
            "max_num_batched_tokens": max(2048, tokens * batch),
            "enforce_eager": not graphs,
            "compilation_config": compilation,
        }
        self._llm = LLM(model=str(model), **self.arguments)
        self._module = marlin_module()
        found = getattr(self._module, NAME)
        self._align: dict[Alignment, Any] = {Alignment.NATIVE: found}
        if plugin:
            if not isinstance(found, CanonicalAlignment):
                raise InputError(
                    "vLLM did not load routeblock's plug-in",
                    where="the engine",
                    limit="its entry point has to be installed beside vLLM",
                    way_out="install this package into the environment of vLLM, and see the lines that it logs",
                )
            self._align = {Alignment.NATIVE: found.own, Alignment.CANONICAL: found}
        self._graphs: dict[Alignment, Any] = {}
        self._requests = 0
        if graphs:  # the engine captured what it had
            captured = Alignment.CANONICAL if plugin else Alignment.NATIVE
            self._graphs[captured] = self._wrapper.concrete_cudagraph_entries

    @property
    def _runner(self) -> Any:
        return self._llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def _wrapper(self) -> Any:
        """vLLM's holder of the captured graphs, around the model."""
        return self._runner.model.cudagraph_wrapper

    def use(self, alignment: Alignment, mode: Mode) -> None:
        """Serve what comes with this alignment, and decode in this mode. Captures graphs that are not there yet."""
        self.place(self._align[alignment])
        if mode is Mode.EAGER:
            # Then the dispatcher gives each batch to the model itself, unpadded.
            self._runner.cudagraph_dispatcher.keys_initialized = False
        else:
            self.hold_graphs(alignment)

    def hold_graphs(self, alignment: Alignment) -> None:
        """Decode by graphs filed under this alignment; captures them, with what aligns now, if there are none."""
        self._runner.cudagraph_dispatcher.keys_initialized = True
        if alignment not in self._graphs:
            self._wrapper.concrete_cudagraph_entries = {}
            self._runner.capture_model()
            self._graphs[alignment] = self._wrapper.concrete_cudagraph_entries
        self._wrapper.concrete_cudagraph_entries = self._graphs[alignment]

    def place(self, function: Any) -> None:
        """Let the Marlin MoE path call this to align."""
        setattr(self._module, NAME, function)

    def padded(self, batch: int) -> int:
        """The number of tokens of the graph that holds a decode step of a batch; the batch itself without graphs."""
        return int(self._runner.cudagraph_dispatcher.dispatch(batch, uniform_decode=True)[1].num_tokens)

    def complete(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, logprobs: bool
    ) -> tuple[list[Completion], list[float]]:
        """Greedy completions of a batch, in the order of the prompts, and the seconds of each step of the engine.

        All prompts are there before the first step. A step ends when its tokens are on the host.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        asked = SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens, logprobs=1 if logprobs else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        names = [str(self._requests + i) for i in range(len(prompts))]
        self._requests += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"type": "token", "prompt_token_ids": list(prompt)}, asked)
        found: dict[str, Completion] = {}
        seconds = []
        while engine.has_unfinished_requests():
            begin = time.perf_counter()
            outputs = engine.step()
            seconds.append(time.perf_counter() - begin)
            for output in outputs:
                if output.finished:
                    one = output.outputs[0]
                    ids = tuple(int(t) for t in one.token_ids)
                    values = tuple(one.logprobs[i][t].logprob for i, t in enumerate(ids)) if logprobs else ()
                    found[output.request_id] = Completion(ids, values)
        return [found[name] for name in names], seconds

    @contextmanager
    def watched(self) -> Iterator[list[dict[str, Any]]]:
        """What native alignment does meanwhile, call by call: tokens, block size, and the plan's fingerprint.

        Every layer calls it; under graphs it is called at their capture alone, where no plan can be read: the
        fingerprint is then None.
        """
        import torch

        seen: list[dict[str, Any]] = []

        def align(topk_ids: Any, block_size: int, num_experts: int, *rest: Any, **named: Any) -> Any:
            result = self._align[Alignment.NATIVE](topk_ids, block_size, num_experts, *rest, **named)
            fingerprint = None
            if not torch.cuda.is_current_stream_capturing():
                ids, owners, total = (x.cpu().numpy() for x in result[:3])
                count = int(total[0])
                plan = AlignedPlan(ids[:count], owners[: count // block_size], count, block_size, topk_ids.numel())
                fingerprint = plan.fingerprint()
            seen.append({"tokens": topk_ids.shape[0], "block_size": block_size, "fingerprint": fingerprint})
            return result

        self.place(align)
        try:
            yield seen
        finally:
            self.place(self._align[Alignment.NATIVE])

    @contextmanager
    def injected(self, word: str) -> Iterator[None]:
        """Plans of this order of arrival meanwhile; see `vllm_plugin.injection`."""
        self.place(InjectedAlignment(self._align[Alignment.NATIVE], word))
        try:
            yield
        finally:
            self.place(self._align[Alignment.NATIVE])

    def captured(self, tokens: int) -> AbstractContextManager[Capture]:
        """The first call of the MoE path with so many tokens; see `layer_capture`."""
        return captured(self._module, tokens)

    def close(self) -> None:
        """Let the driver have the memory back."""
        self._llm.llm_engine.engine_core.shutdown()


def marlin_module() -> Any:
    """The module of the installed vLLM in which its Marlin MoE path looks alignment up."""
    import vllm

    known = contract(vllm.__version__)
    assert known is not None, vllm.__version__
    return importlib.import_module(dict(known.modules)["Marlin"])
