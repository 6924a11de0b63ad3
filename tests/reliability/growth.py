# SPDX-License-Identifier: Apache-2.0
"""How processor time and memory grow with size, for what a study does most: alignment, cut, twin, readers, the chain.

python tests/reliability/growth.py --out FILE

Each case runs at doubling sizes. The exponent is that of the last two doublings: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.alignment_cost.batches import Batch
from routeblock.alignment_cost.study import STUDY
from routeblock.checkpoint.shards import read_header
from routeblock.evidence import chain
from routeblock.evidence.files import write_json
from routeblock.evidence.manifest import seal
from routeblock.moe.partition import partition
from routeblock.moe.routing import AlignedPlan, align, check_plan
from routeblock.twin.gemm import moe_gemm

ROOT = Path(__file__).resolve().parents[2]
FORMAT = "routeblock.growth.v1"
EXPERTS, TOP_K = 512, 8
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """name, what is counted, the sizes, and what prepares a run of one size in an empty folder."""

    name: str
    unit: str
    sizes: tuple[int, ...]
    prepare: Callable[[int, Path], Run]


def _ids(tokens: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(1)
    return np.argpartition(rng.random((tokens, EXPERTS), np.float32), TOP_K, axis=1)[:, :TOP_K].astype(np.int32)


def _plan(tokens: int) -> tuple[np.ndarray[Any, Any], AlignedPlan]:
    ids = _ids(tokens)
    return ids, align(ids, EXPERTS, 64)


def _align(tokens: int, _: Path) -> Run:
    ids = _ids(tokens)
    return lambda: align(ids, EXPERTS, 64)


def _fingerprint(tokens: int, _: Path) -> Run:
    plan = _plan(tokens)[1]
    return plan.fingerprint


def _check(tokens: int, _: Path) -> Run:
    ids, plan = _plan(tokens)
    return lambda: check_plan(plan, ids, EXPERTS, where="growth")


def _cut(k: int, _: Path) -> Run:
    return lambda: [
        (cut := partition(64, 2048, k, 128, 64, 132, 128)) and cut.slices(b, n) for b in range(64) for n in range(16)
    ]


def _gemm(k: int, _: Path) -> Run:
    rng = np.random.default_rng(1)
    a = rng.standard_normal((16, k)).astype(np.float16)
    q = rng.integers(0, 16, (1, k, 256), dtype=np.uint8)
    zeros, scales = np.full((1, k // 128, 256), 8, np.uint8), np.full((1, k // 128, 256), 0.01, np.float16)
    plan = align(np.zeros((16, 1), np.int32), 1, 16)
    launch: dict[str, Any] = {"thread_k": 64, "thread_n": 128, "grid": 132, "group_size": 128}
    return lambda: moe_gemm(a, q, zeros, scales, plan, top_k=1, architecture="hopper", **launch)


def _header(tensors: int, folder: Path) -> Run:
    # Of 1,000 bytes each, so that a header is not more than its file gives reason for.
    size = 1000
    entries = {
        f"model.layers.0.mlp.experts.{i}.w": {
            "dtype": "U8", "shape": [size], "data_offsets": [size * i, size * (i + 1)]
        }
        for i in range(tensors)
    }  # fmt: skip
    text = json.dumps(entries).encode()
    path = folder / "t.safetensors"
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + size * tensors)
    return lambda: read_header(path, "t")


def _batches(rows: int, folder: Path) -> Run:
    every: list[Batch] = STUDY.table.read(ROOT / "fixtures/recorded/alignment_cost/h200/batches.parquet")
    path = folder / "b.parquet"
    STUDY.table.write(path, [every[i % len(every)] for i in range(rows)])
    return lambda: STUDY.table.read(path)


def _chain(manifests: int, folder: Path) -> Run:
    for i in range(manifests):
        home = folder / f"{i % 100}" / f"{i}"
        home.mkdir(parents=True)
        (home / "made").write_text(f"{i}")
        seal(home / "made.manifest.json", rule="make", outputs=[home / "made"], inputs=[], parameters={}, modules=[])
    return lambda: chain.verify(folder)


CASES = (
    Case("alignment", "tokens", (2048, 4096, 8192, 16384), _align),
    Case("fingerprint of a plan", "tokens", (2048, 4096, 8192, 16384), _fingerprint),
    Case("check of a plan", "tokens", (2048, 4096, 8192, 16384), _check),
    Case("cut of a GEMM", "K", (2048, 4096, 8192, 16384), _cut),
    Case("GEMM of the twin", "K", (2048, 4096, 8192, 16384), _gemm),
    Case("header of a shard", "tensors", (6250, 12500, 25000, 50000), _header),
    Case("batches of a record", "rows", (4000, 8000, 16000, 32000), _batches),
    Case("verify", "manifests", (500, 1000, 2000, 4000), _chain),
)


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def measure(case: Case) -> Iterator[dict[str, Any]]:
    """Seconds of processor time, the best of three, and megabytes of growth, at each size."""
    for size in case.sizes:
        with tempfile.TemporaryDirectory() as folder:
            run = case.prepare(size, Path(folder))
            if size == case.sizes[0]:
                run()  # what is compiled and imported is no size's
            Path("/proc/self/clear_refs").write_text("5")
            before, times = _memory("VmRSS"), []
            for _ in range(3):
                began = time.process_time()
                run()
                times.append(time.process_time() - began)
            grown = max(0, _memory("VmHWM") - before)
        yield {"size": size, "seconds": round(min(times), 4), "mb": round(grown / 2**20, 1)}


def exponent(rows: list[dict[str, Any]]) -> float:
    """The power of size with which time grew from the third last size to the last."""
    first, last = rows[-3], rows[-1]
    return round(math.log(last["seconds"] / first["seconds"]) / math.log(last["size"] / first["size"]), 2)


def main() -> None:
    """Write the growth of each case as JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    found = []
    for case in CASES:
        rows = list(measure(case))
        found.append({"case": case.name, "unit": case.unit, "rows": rows, "exponent": exponent(rows)})
        print(case.name, found[-1]["exponent"], rows[-1], flush=True)
    write_json(given.out, {"format": FORMAT, "cases": found})


if __name__ == "__main__":
    main()
