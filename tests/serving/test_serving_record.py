# SPDX-License-Identifier: Apache-2.0
"""The committed record of the engine: verified, and refused where it leaves its protocol."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from routeblock.errors import InputError
from routeblock.serving import completions, layer_check, tables, verification
from routeblock.serving.completions import Served
from routeblock.serving.kinds import Kind
from routeblock.serving.protocol import Protocol, load, order, processes, prompts
from routeblock.serving.study import STUDY
from routeblock.timing.reasons import Reason

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = ROOT / "fixtures/protocols/serving.json"
RECORD = ROOT / "fixtures/recorded/serving/h200"


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return load(PROTOCOL)


@pytest.fixture(scope="module")
def served() -> list[Served]:
    return completions.read(RECORD / completions.TABLE)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    target = tmp_path / "record"
    shutil.copytree(RECORD, target)
    return target


def reasons(folder: Path, protocol: Protocol) -> set[Reason]:
    return {f.reason for f in verification.findings(STUDY.read(folder), protocol)}


def test_the_record_is_as_the_protocol_has_it(tmp_path: Path) -> None:
    assert verification.write(tmp_path / "out", RECORD, PROTOCOL) == []
    assert {p.name for p in (tmp_path / "out").iterdir()} == {*verification.FILES, "recorded_serving.manifest.json"}


def test_a_changed_file_is_refused_before_it_is_looked_at(copy: Path, tmp_path: Path) -> None:
    (copy / "observed.json").write_text((copy / "observed.json").read_text() + "\n")
    wrong = verification.write(tmp_path / "out", copy, PROTOCOL)
    assert [f.reason for f in wrong] == [Reason.SEAL]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda rows: rows[:-1], Reason.BATCH_MISSING),
        (lambda rows: [*rows, rows[0]], Reason.BATCH_TWICE),
        (lambda rows: [replace(rows[0], tokens=rows[0].tokens[:-4]), *rows[1:]], Reason.COUNTS),
        (lambda rows: [replace(rows[0], tokens=b"\xff" * len(rows[0].tokens)), *rows[1:]], Reason.BITS),
        (lambda rows: [replace(rows[0], logprobs=np.full(32, 0.5, "<f4").tobytes()), *rows[1:]], Reason.BITS),
        (lambda rows: [replace(rows[0], logprobs=np.full(32, -11, "<f4").tobytes()), *rows[1:]], Reason.BITS),
        (lambda rows: [replace(rows[0], logprobs=np.full(32, np.nan, "<f4").tobytes()), *rows[1:]], Reason.BITS),
    ],
)
def test_edited_completions_are_refused(
    edit: object, reason: Reason, copy: Path, served: list[Served], protocol: Protocol
) -> None:
    completions.write(copy / completions.TABLE, edit(served))  # type: ignore[operator]
    assert reason in reasons(copy, protocol)


def test_canonical_tokens_of_another_process_are_refused(copy: Path, served: list[Served], protocol: Protocol) -> None:
    def other(s: Served) -> Served:
        mine = (s.mode, s.alignment, s.process, s.batch, s.repeat, s.prompt) == ("eager", "canonical", 1, 64, 0, 5)
        return replace(s, tokens=s.tokens[::-1][:0] + np.roll(s.ids, 1).tobytes()) if mine else s

    completions.write(copy / completions.TABLE, map(other, served))
    assert reasons(copy, protocol) == {Reason.BITS}


@pytest.mark.parametrize("key", ["plans", "captured_tokens"])
def test_edited_observations_are_refused(key: str, copy: Path, protocol: Protocol) -> None:
    document = json.loads((copy / "observed.json").read_text())
    document[key].pop()
    (copy / "observed.json").write_text(json.dumps(document))
    assert reasons(copy, protocol) == {Reason.COUNTS}


def test_a_record_without_its_completions_is_one_line(copy: Path, protocol: Protocol) -> None:
    (copy / completions.TABLE).unlink()
    with pytest.raises(InputError, match=r"completions\.parquet"):
        verification.findings(STUDY.read(copy), protocol)


def test_every_bit_of_the_captured_layer_is_the_twins(tmp_path: Path) -> None:
    assert layer_check.write_document(tmp_path, RECORD, PROTOCOL) == []
    calls = json.loads((tmp_path / "layer.json").read_text())["calls"]
    assert [c["arrivals"] for c in calls] == ["canonical", "reversed", "random:7"]
    assert len({c["plan"] for c in calls}) > 1
    assert all(c["elements"] == {"w13": 258048, "activation": 129024, "w2": 344064, "final": 43008} for c in calls)


def test_a_flipped_bit_of_the_captured_layer_is_counted(copy: Path, tmp_path: Path) -> None:
    stored = layer_check.read_store(copy / layer_check.TENSORS)
    document = json.loads((copy / "observed.json").read_text())
    digest = document["captured"]["reversed/21"]["w2"]
    flipped = stored[digest].copy()
    flipped[3, 7] ^= 1
    calls = {call: {n: stored[d] for n, d in names.items()} for call, names in document["captured"].items()}
    calls["reversed/21"]["w2"] = flipped
    document["captured"] = layer_check.write(copy / layer_check.TENSORS, calls)
    (copy / "observed.json").write_text(json.dumps(document))
    wrong = layer_check.write_document(tmp_path / "out", copy, PROTOCOL)
    assert wrong == ["reversed, batch of 21: 1 of 344064 elements of w2 differ from the twin"]


def test_the_table_says_what_a_simple_count_says(served: list[Served], protocol: Protocol) -> None:
    observed = verification.read_observed(RECORD)
    rows = tables.serving(tables.Evidence(protocol, served, observed, (), {}))
    assert len(rows) == len(protocol.modes) * len(protocol.alignments) * len(protocol.batches)
    counted: dict[tuple[str, str, int], dict[tuple[int, int], bytes]] = defaultdict(lambda: defaultdict(bytes))
    for s in sorted((s for s in served if not s.alone), key=lambda s: s.prompt):
        counted[(s.mode, s.alignment, s.batch)][(s.process, s.repeat)] += s.tokens + s.logprobs
    for row in rows:
        outputs = counted[(row["mode"], row["alignment"], row["batch"])]
        assert row["repeats"] == len(outputs) == protocol.processes * protocol.repeats
        assert row["outputs"] == len({*outputs.values()})
        if row["alignment"] == "canonical":
            assert (row["outputs"], row["outputs_in_every_process"], row["other_tokens_most"]) == (1, 1, 0)
        elif row["batch"] >= 21:
            assert row["outputs"] == row["repeats"]
            assert row["other_tokens_mean"] > 0


def test_shares_never_fall_and_end_at_the_mean(served: list[Served], protocol: Protocol) -> None:
    given = tables.Evidence(protocol, served, verification.read_observed(RECORD), (), {})
    shares: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for row in tables.diverged(given):
        shares[(row["mode"], row["alignment"], row["batch"])].append(row["share"])
    for row in tables.serving(given):
        mine = shares[(row["mode"], row["alignment"], row["batch"])]
        assert mine == sorted(mine)
        assert mine[-1] == pytest.approx(row["other_tokens_mean"] / row["batch"], abs=1e-12)


def test_the_order_of_processes_and_batches(protocol: Protocol) -> None:
    every = processes(protocol)
    assert len({p.name for p in every}) == len(every)
    repeating = [p for p in every if p.kind is Kind.REPEAT]
    assert len(repeating) == 4 * protocol.processes
    first = [p for p in repeating if p.number == 1]
    assert [p.alone for p in first] == [p.alignment == "canonical" for p in first]
    for process in repeating:
        asked = list(order(protocol, process))
        assert sorted(asked) == sorted((b, r) for b in protocol.batches for r in range(protocol.repeats))
    assert {len(p) for p in prompts(protocol)} == {protocol.prompts.tokens}
    assert prompts(protocol) == prompts(protocol)


@pytest.mark.parametrize(
    "change",
    [{"alone": [7]}, {"batches": [1, 200], "alone": [1]}, {"captured_batches": [1]}, {"surprise": 1}],
)
def test_a_protocol_that_cannot_be_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "serving.json"
    path.write_text(json.dumps(json.loads(PROTOCOL.read_text()) | change))
    with pytest.raises(InputError, match=r"fixtures/protocols/serving\.json"):
        load(path)
