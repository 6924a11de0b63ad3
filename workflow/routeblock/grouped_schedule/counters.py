# SPDX-License-Identifier: Apache-2.0
"""Hardware counters of study B's schedules by ncu, where weights fit in L2 and where not. A refusal is recorded.

Run as `python -m routeblock.grouped_schedule.counters PROTOCOL COUNTERS CUBIN` it is what ncu watches: a graph of calls
of every case, replayed twice; the second replay counts, as one workload.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from routeblock.errors import InputError
from routeblock.evidence.digest import PACKAGE_ROOT
from routeblock.evidence.files import write_json
from routeblock.evidence.gpu_record import GpuRecord, plain
from routeblock.grouped_schedule import fixture as fixtures
from routeblock.grouped_schedule.campaigns import Campaign, Mode, Setup, ratio_cols
from routeblock.grouped_schedule.measure import output_digest
from routeblock.grouped_schedule.protocol import Cell, Protocol
from routeblock.grouped_schedule.protocol import load as load_study
from routeblock.grouped_schedule.schedules import BY_NAME, Family, Scope
from routeblock.timing.protocol import Count, Strict, Whole
from routeblock.timing.protocol import read as read_protocol
from routeblock.timing.record import usable

FORMAT = "routeblock.grouped_counters.v1"
RUN = "counters.json"
FOLDER = GpuRecord("grouped_counters", (RUN,), "grouped_counters.tar.gz")
TIMEOUT_S = 200
STUDY_PROTOCOL = PACKAGE_ROOT.parents[1] / "fixtures" / "protocols" / "grouped_schedule.json"
COUNTERS_PROTOCOL = STUDY_PROTOCOL.with_name("grouped_counters.json")


class Counters(Whole):
    """The committed protocol of the counting."""

    name: Literal["grouped_counters"]
    version: Count
    study: Literal["grouped_schedule"]
    expectation: str
    kinds: tuple[Literal["study", "l2_ratio"], ...]
    pool: Count
    slots: tuple[Count, ...]
    arms: tuple[str, ...]
    scope: Scope
    calls: Count
    replays: Count
    metrics: dict[str, str]
    rule: str
    changes: tuple[str, ...]


class Told(Strict):
    """What a case is called in the record."""

    kind: str
    slots: int
    pool: int
    rows: int
    cols: int
    arm: str


@dataclass(frozen=True)
class Case:
    """One schedule on one shape; kind `l2_ratio` has the columns that keep a V100's ratio of weights to L2."""

    kind: str
    cell: Cell
    arm: str

    def told(self) -> dict[str, Any]:
        cell = self.cell
        told = Told(kind=self.kind, slots=cell.slots, pool=cell.pool, rows=cell.rows, cols=cell.cols, arm=self.arm)
        return told.model_dump()


def load(path: Path) -> Counters:
    """Read the protocol of the counting; raises InputError as `protocols.read`."""
    return read_protocol(path, Counters, "grouped_counters")


def cases(study: Protocol, plan: Counters, l2_bytes: int) -> Iterator[Case]:
    """What is counted on a GPU with an L2 of `l2_bytes`, in order: shapes of one matrix together."""
    for kind in plan.kinds:
        for slots in plan.slots:
            cell = Cell(Family.INDEPENDENT, slots, plan.pool, study.rows, study.cols)
            if kind == "l2_ratio":
                cell = replace(cell, cols=ratio_cols(study, l2_bytes))
            for arm in plan.arms:
                yield Case(kind, cell, arm)


class _Session:
    """The device with one case's fixture after another; a matrix is uploaded once."""

    def __init__(self, study: Protocol, plan: Counters, cubin: Path) -> None:
        from routeblock.grouped_schedule.cuda_backend import CudaBackend

        self.study, self.plan = study, plan
        self.backend = CudaBackend("gpu0", 0, cubin, study)
        self._weights: tuple[int, Any] | None = None
        self._fixture: fixtures.Fixture | None = None

    def cases(self) -> list[Case]:
        return list(cases(self.study, self.plan, self.backend.gpu.l2_bytes))

    def _made(self, cell: Cell, seed: int) -> fixtures.Fixture:
        if self._weights is None or self._weights[0] != cell.cols:
            self._weights = (cell.cols, fixtures.weights(seed, cell.pool, cell.rows, cell.cols))
        if self._fixture is None or self._fixture.cell != cell:
            self._fixture = fixtures.make(
                cell,
                seed,
                sentinels=self.study.sentinels,
                checked_rows=self.study.rows_checked_per_job,
                pool_weights=self._weights[1],
            )
        return self._fixture

    def work(self, case: Case) -> list[Any]:
        """The launches of one call of the case."""
        seed, arm = self.study.sweep.seed, BY_NAME[case.arm]
        made = self._made(case.cell, seed)
        warps = self.study.timing.cuda.warps_per_block
        setup = Setup(Campaign.SWEEP, case.cell, arm.name, seed, (arm,), Mode.GRAPH, warps)
        self.backend.load(made, setup)
        # The compute scope reads an order that was made before.
        for each in self.backend.grouping(arm):
            each(self.backend.gpu.stream)
        self.backend.gpu.stream.sync()
        return self.backend.launches(arm, self.plan.scope)

    def output(self, case: Case) -> str:
        """Digest of what the launches of the case, loaded last, wrote."""
        return output_digest(self._made(case.cell, self.study.sweep.seed), self.backend.written())


def count(study_path: Path, plan_path: Path, cubin: Path) -> dict[str, Any]:
    """What ncu read: `outcome` counted, refused or absent, lines that say why, and a row for every case.

    Raises InputError when a schedule wrote other bits than the first one on its shape: it would be other work.
    """
    study, plan = load_study(study_path), load(plan_path)
    session = _Session(study, plan, cubin)
    wanted = session.cases()
    identity = session.backend.identity()
    told = {"format": FORMAT, "protocol_sha256": plan.digest(), "device": identity}
    replayed = [_replayed(session, case) for case in wanted]
    _same_work(wanted, replayed)
    program = shutil.which("ncu")
    if program is None:
        return told | {"outcome": "absent", "lines": ["ncu is not on PATH"], "rows": []}
    command = [program, "--clock-control", "none", "--cache-control", "none", "--csv", "--page", "raw"]
    command += ["--metrics", ",".join(plan.metrics.values()), "--print-units", "base"]
    command += ["--graph-profiling", "graph", "--profile-from-start", "off"]
    command += [sys.executable, "-m", "routeblock.grouped_schedule.counters"]
    command += map(str, (study_path, plan_path, cubin))
    paths = [str(PACKAGE_ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return told | {"outcome": "refused", "lines": [f"not done after {TIMEOUT_S} s"], "rows": []}
    lines = [line for line in done.stdout.splitlines() if line.startswith("==")] + done.stderr.splitlines()[-5:]
    try:
        rows = parse(done.stdout, plan, wanted)
    except ValueError as e:
        return told | {"outcome": "refused", "lines": [str(e), *lines[:20]], "rows": []}
    for row, alone in zip(rows, replayed, strict=True):
        row |= alone
    return told | {"outcome": "counted", "lines": [line for line in lines if "WARNING" in line], "rows": rows}


def _same_work(wanted: list[Case], replayed: list[dict[str, Any]]) -> None:
    first: dict[Cell, str] = {}
    for case, alone in zip(wanted, replayed, strict=True):
        if first.setdefault(case.cell, alone["sha256"]) != alone["sha256"]:
            raise InputError(
                f"{case.arm} at {case.cell.label} wrote other bits than {wanted[0].arm}",
                where="study-b record-counters",
                limit="what is counted is one computation in several orders",
                way_out="see which jobs the schedule left out",
            )


def parse(output: str, plan: Counters, wanted: list[Case]) -> list[dict[str, Any]]:
    """Rows of ncu's CSV in base units, a graph each. Raises ValueError if it does not hold every case once."""
    text = "\n".join(line for line in output.splitlines() if line.startswith('"'))
    table = list(csv.DictReader(io.StringIO(text)))
    graphs = [row for row in table if row.get("ID", "").strip()]  # the row under the head holds units
    if len(graphs) != len(wanted):
        raise ValueError(f"{len(graphs)} graphs were counted, {len(wanted)} ran")
    return [
        case.told() | {name: float(row[metric].replace(",", "")) for name, metric in plan.metrics.items()}
        for row, case in zip(graphs, wanted, strict=True)
    ]


def read(source: Path) -> dict[str, Any]:
    """A committed record, with the protocol's `calls`. Raises InputError unless it holds the recorded bytes and every
    case of its protocol in order; a refusal has no rows.
    """
    study, plan = load_study(STUDY_PROTOCOL), load(COUNTERS_PROTOCOL)
    wrong = [f"{path}: not the bytes that were recorded" for path in FOLDER.changed(source)]
    with usable(source / RUN):
        document: dict[str, Any] = plain(source / RUN)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}")
        if document["protocol_sha256"] != plan.digest():
            wrong.append("counted under another protocol")
        told = [{name: row[name] for name in Told.model_fields} for row in document["rows"]]
        wanted = [case.told() for case in cases(study, plan, document["device"]["l2_bytes"])]
        if told and told != wanted:
            wrong.append(f"{len(told)} cases that are not the {len(wanted)} of the protocol")
    if wrong:
        raise InputError(
            wrong[0],
            where=str(source),
            limit="a whole record of the committed protocol",
            way_out="restore the folder, or count again (routeblock study-b record-counters)",
        )
    return document | {"calls": plan.calls}


def _replayed(session: _Session, case: Case) -> dict[str, Any]:
    """Without a profiler: microseconds of one call, the median of the graph's replays with events inside the graph, and
    the digest of what they wrote.
    """
    gpu, work, calls = session.backend.gpu, session.work(case), session.plan.calls
    start, end = gpu.events(2)
    graph = gpu.graph([*work, gpu.mark(start), *work * calls, gpu.mark(end)])
    found = []
    for _ in range(session.plan.replays):
        graph.launch(gpu.stream)
        gpu.stream.sync()
        found.append(gpu.microseconds(start, end) / calls)
    return {"replay_us": float(np.median(found)), "sha256": session.output(case)}


def write(out: Path, study_path: Path, plan_path: Path, cubin: Path) -> str:
    """Write counters.json to `out`, sealed and packed; returns the outcome."""
    out.mkdir(parents=True, exist_ok=True)
    found = count(study_path, plan_path, cubin)
    write_json(out / RUN, found)
    FOLDER.seal(out, plan_path, found["protocol_sha256"], __name__)
    return str(found["outcome"])


def main(arguments: list[str]) -> int:
    """Replay a graph of every case twice, the second time for the profiler."""
    from cuda.bindings import driver

    study, plan, cubin = map(Path, arguments)
    session = _Session(load_study(study), load(plan), cubin)
    gpu = session.backend.gpu
    for case in session.cases():
        graph = gpu.graph(session.work(case) * session.plan.calls)
        graph.launch(gpu.stream)
        gpu.stream.sync()
        driver.cuProfilerStart()
        graph.launch(gpu.stream)
        gpu.stream.sync()
        driver.cuProfilerStop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
