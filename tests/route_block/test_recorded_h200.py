# SPDX-License-Identifier: Apache-2.0
"""The committed evidence of an H200: whole, of one identity a study, launched as asked, small, and each process modest.

What `make study` proves of it (every bit of every surface) is not repeated here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from routeblock.evidence.digest import sha256_file, sha256_json
from routeblock.evidence.manifest import Manifest
from routeblock.evidence.packed import Line, read_lines
from routeblock.evidence.record import RECORD, TELEMETRY, TENSORS, Record
from routeblock.evidence.tensor_store import read_store
from routeblock.route_block.facts import CELLS, HISTORIES, schedule
from routeblock.route_block.runs.recorded import STORE, read_index

EVIDENCE = Path(__file__).resolve().parents[2] / "fixtures/recorded/h200-vllm0.24.0"
STUDIES = [f"{point}.{source}" for point in ("published", "auto") for source in ("stored", "captured")]
CENSUSES = ["published.census", "auto.census"]
REPLICATES = 5
ASKED = {"published": ((64, 128, 246), 200), "auto": ((128, 64, 528), 400)}  # launch, grid of full_k
LIMIT_BYTES, LIMIT_S, LIMIT_KIB = 10_000_000, 10, 2_000_000_000 // 1024


@pytest.fixture(scope="module")
def groups() -> dict[str, list[Line]]:
    return {name: read_lines(EVIDENCE / f"{name}.jsonl") for name in (*STUDIES, *CENSUSES, "probe_control")}


def documents(lines: list[Line], name: str) -> Iterator[Any]:
    return (line["documents"][name] for line in lines if name in line["documents"])


def records(lines: list[Line]) -> list[Record]:
    return [Record.model_validate_json(json.dumps(document)) for document in documents(lines, RECORD)]


def test_the_evidence_is_small() -> None:
    assert sum(p.stat().st_size for p in EVIDENCE.rglob("*") if p.is_file()) <= LIMIT_BYTES


def test_the_index_and_the_seal_name_every_file(groups: dict[str, list[Line]]) -> None:
    index = read_index(EVIDENCE)
    assert index["groups"].keys() == groups.keys()
    seal = Manifest.model_validate_json((EVIDENCE / "evidence.manifest.json").read_bytes())
    sealed = {entry.path: entry.sha256 for entry in seal.outputs}
    assert sealed == {name: sha256_file(EVIDENCE / name) for name in sealed}
    assert sealed.keys() == {"evidence.json", STORE, *(f"{name}.jsonl" for name in groups)}
    assert index["tensors"] == sealed[STORE]
    assert all(facts["sha256"] == sealed[f"{name}.jsonl"] for name, facts in index["groups"].items())


def test_the_expected_identity_stands_apart_from_the_runs_and_names_known_binaries(
    groups: dict[str, list[Line]],
) -> None:
    expected = json.loads((EVIDENCE / "identity.json").read_bytes())
    environment = expected["environment"]
    version = json.loads((EVIDENCE / "versions/0.24.0.json").read_bytes())
    assert environment["extension_sha256"] == version["environment"]["extension_sha256"]
    machines = [facts["machine"] for facts in read_index(EVIDENCE)["groups"].values()]
    assert {m["probe"]["outputs"][0]["sha256"] for m in machines} == {environment["probe_sha256"]}
    binaries = {"extension": environment["extension_sha256"], "activation": None, "probe": environment["probe_sha256"]}
    assert expected["binary"] == sha256_json(binaries)
    digest = sha256_file(EVIDENCE / "identity.json")
    assert digest not in (EVIDENCE / "evidence.manifest.json").read_text()
    assert not [line["folder"] for lines in groups.values() for line in lines if digest in json.dumps(line)]


def test_280_processes_each_study_of_one_identity(groups: dict[str, list[Line]]) -> None:
    wanted = {(cell, history, n) for cell, history, n in schedule(REPLICATES)}
    assert len(wanted) * len(STUDIES) == 280
    for name in STUDIES:
        found = records(groups[name])
        assert len(found) == len(wanted) and {(r.cell, r.history, r.replicate) for r in found} == wanted
        assert len({r.identity.model_dump_json() for r in found}) == 1
        assert {(r.status, r.lane, f"{r.point}.{r.plan_source}") for r in found} == {("observed", "cuda", name)}
        assert all(r.treatment.consumed == r.treatment.asked for r in found)
        assert all(r.treatment.consumed.prelude == (r.history == "H1") for r in found)


def test_every_grid_was_launched_as_asked(groups: dict[str, list[Line]]) -> None:
    for name in STUDIES:
        (thread_k, thread_n, grid), single_slice = ASKED[name.split(".")[0]]
        for record in records(groups[name]):
            wanted = single_slice if record.cell == "full_k" else grid
            assert record.identity.environment["grid_marker"] == "recorded by the probe"
            for marker in record.grid.values():
                assert marker.model_dump() == {
                    "thread_k": thread_k,
                    "thread_n": thread_n,
                    "asked": wanted,
                    "launched": wanted,
                }


def test_every_process_took_at_most_ten_seconds_and_two_gigabytes(groups: dict[str, list[Line]]) -> None:
    """The clock runs from the start of `run` (after Python's start and the package's imports) to the last surface on
    the host: reading and hashing the fixture, importing torch, loading the extension, packing, device, layer. Waiting
    for the turn and writing the files are not in it. Memory is the process's peak."""
    for name in STUDIES:
        found = [t for t in documents(groups[name], TELEMETRY) if "max_rss_kib" in t]
        assert len(found) == len(CELLS) * len(HISTORIES) * REPLICATES
        for telemetry in found:
            assert telemetry["seconds"].keys() == {"reading", "preparing", "lane"}
            assert 0 < sum(telemetry["seconds"].values()) <= LIMIT_S
            assert 0 < telemetry["max_rss_kib"] <= LIMIT_KIB


def test_each_study_had_one_gpu_and_no_process_touched_it_before_its_turn(groups: dict[str, list[Line]]) -> None:
    gpus: dict[str, set[str]] = defaultdict(set)
    for name in STUDIES:
        for telemetry in documents(groups[name], TELEMETRY):
            session = telemetry.get("lane", telemetry)
            assert telemetry["turn"]["driver_files_before"] == []
            gpus[name].add(session["gpu_uuid"])
            assert session["gpu_before"]["other_processes"] == session["gpu_after"]["other_processes"] == []
    assert gpus.keys() == set(STUDIES) and all(len(found) == 1 for found in gpus.values())


def test_every_tensor_of_a_record_is_in_the_store_and_none_besides(groups: dict[str, list[Line]]) -> None:
    named: set[str] = set()
    for lines in groups.values():
        for line in lines:
            for tensors in line["tensors"].values():
                named |= set(tensors.values())
            if RECORD in line["documents"]:
                record = Record.model_validate_json(json.dumps(line["documents"][RECORD]))
                stated = {name: tensor.sha256 for name, tensor in record.surfaces.items()}
                stated |= {part: getattr(record.plan, part) for part in ("sorted_token_ids", "expert_ids")}
                assert line["tensors"][TENSORS] == stated
    assert read_store(EVIDENCE / STORE).keys() == named


def test_both_censuses_count_every_call(groups: dict[str, list[Line]]) -> None:
    for name in CENSUSES:
        found = [d for line in groups[name] for d in line["documents"].values() if "calls" in d]
        assert sorted((d["history"], d["process"]) for d in found) == [
            (history, n) for history in HISTORIES for n in range(1, REPLICATES + 1)
        ]
        for document in found:
            assert document["calls"] == 200
            for order in ("native", "canonical"):
                assert sum(entry["count"] for entry in document[order]) == document["calls"]
            assert len(document["canonical"]) == 1
