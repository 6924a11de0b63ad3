# SPDX-License-Identifier: Apache-2.0
"""Record what native alignment gives, process by process, in one command without Snakemake: for a borrowed machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from routeblock.cuda.operators import EXTENSION_VARIABLE, find_extension
from routeblock.errors import InputError
from routeblock.evidence.files import write_json
from routeblock.evidence.gpu_record import GpuRecord, plain
from routeblock.evidence.tensors import load_tensors, save_tensors
from routeblock.route_block.fixtures.fixture import load_fixture
from routeblock.route_block.native.process import PLANS, READY, REPETITION, RESULT
from routeblock.route_block.native.protocol import STUDY, load

FORMAT = "routeblock.native.v1"
RUN = "native.json"
FILES = (RUN, PLANS)
FOLDER = GpuRecord(STUDY, FILES, "native.tar.gz")
PREPARING = 8  # processes that import and pack while one has the GPU
LIMIT_S = 120.0
SAME = ("source", "binary", "environment")


class _Process:
    """A child that prepares at once and works when it is told to."""

    def __init__(self, command: Sequence[str], out: Path) -> None:
        self.out = out
        self.child = subprocess.Popen(
            [sys.executable, "-m", "routeblock", *command, "--out", str(out)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def work(self, limit: float) -> dict[str, Any]:
        """Hand out the turn and wait for the end; the child's document."""
        watch = threading.Timer(limit, self.child.kill)
        watch.start()
        try:
            assert self.child.stdout is not None
            go = "go\n" if self.child.stdout.readline().strip() == READY else None
            _, errors = self.child.communicate(go)
        finally:
            watch.cancel()
        if self.child.returncode or not (self.out / RESULT).is_file():
            lines = errors.strip().splitlines() or [f"exit {self.child.returncode}"]
            raise InputError(
                lines[-1],
                where=f"record-native, {self.out.name}",
                limit=f"every process ends well within {limit:g} s",
                way_out="mend its cause, and record again",
            )
        document: dict[str, Any] = plain(self.out / RESULT)
        return document

    def end(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.communicate()


def write(
    out: Path,
    fixture_folder: Path,
    protocol_path: Path,
    *,
    preparing: int = PREPARING,
    progress: Callable[[str], None] = print,
) -> None:
    """Record into the folder `out`: native.json, plans.safetensors, their seal and an archive.

    $ROUTEBLOCK_EXTENSION names the extension; default: an installed vllm. Raises InputError when a process fails, or
    when the processes are not of one identity.
    """
    named = os.environ.get(EXTENSION_VARIABLE)
    find_extension(Path(named) if named else None)
    protocol, fixture = load(protocol_path), load_fixture(fixture_folder)
    order = [*protocol.order(), *([REPETITION] * protocol.repetition.processes)]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        waiting: deque[_Process] = deque()
        done: list[tuple[dict[str, Any], Path]] = []
        todo = iter(enumerate(order))
        try:
            for _ in order:
                while len(waiting) < preparing and (following := next(todo, None)) is not None:
                    number, what = following
                    command = ["study-a", "native-process", what, "--fixture", str(fixture_folder)]
                    folder = Path(work, f"{number}-{what}")
                    folder.mkdir()
                    waiting.append(_Process([*command, "--protocol", str(protocol_path)], folder))
                process = waiting.popleft()
                try:
                    done.append((process.work(LIMIT_S), process.out))
                finally:
                    process.end()
                progress(f"{process.out.name}: {(done[-1][0]['ended_ns'] - done[-1][0]['began_ns']) / 1e9:.2f} s")
        finally:
            for process in waiting:
                process.end()
        _assemble(out, done, fixture.digest, protocol.digest())
    FOLDER.seal(out, protocol_path, protocol.digest(), __name__)


def _assemble(out: Path, done: Sequence[tuple[dict[str, Any], Path]], fixture: str, protocol: str) -> None:
    identities = [document.pop("identity") for document, _ in done]
    if any(i != identities[0] for i in identities):
        raise InputError(
            "processes of several identities",
            where="study-a record-native",
            limit="one source, binary and environment for all",
            way_out="record again while nothing changes",
        )
    numbers: dict[str, int] = {}
    rows = []
    for document, folder in done:
        if document["what"] != REPETITION:
            for outcome, row in zip(
                document["plans"]["outcomes"], load_tensors(folder / PLANS)["sorted_token_ids"], strict=True
            ):
                if outcome not in numbers:
                    numbers[outcome] = len(numbers)
                    rows.append(row)
    write_json(
        out / RUN,
        {
            "format": FORMAT,
            "fixture": fixture,
            "protocol_sha256": protocol,
            "identity": identities[0],
            "plans": list(numbers),
            "processes": [document for document, _ in done],
        },
    )
    save_tensors(out / PLANS, {"sorted_token_ids": np.stack(rows)})
