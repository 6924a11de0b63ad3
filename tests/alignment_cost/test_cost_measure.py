# SPDX-License-Identifier: Apache-2.0
"""A repetition counts or does not by the protocol's rules; what is rejected stays in the data."""

from __future__ import annotations

from pathlib import Path

import pytest
from small import FakeDevice, batches, measured, protocol_file

from routeblock.alignment_cost.batches import TABLE
from routeblock.alignment_cost.protocol import Arm
from routeblock.cuda.telemetry import State

SERIES = 4
GRAPH = "graph"


@pytest.fixture
def protocol(tmp_path: Path) -> Path:
    return protocol_file(tmp_path)


def test_every_series_is_timed_in_every_repetition_and_bound_points_come_first(protocol: Path) -> None:
    found = batches(measured(FakeDevice(), protocol))
    assert all(b.accepted for b in found)
    # Operator: graph, stream, host. Layer: graph, stream.
    assert len(found) == SERIES * (3 * (8 + 8 + 5) + 2 * 8)
    assert [b.role for b in found] == sorted((b.role for b in found), key=["bound", "reported"].index)
    first = [b for b in found if b.repetition == 0 and b.mode == GRAPH and b.tokens == 1 and b.campaign == "operator"]
    assert [(b.series, b.position) for b in first] == [
        ("native", 0),
        ("native_again", 1),
        ("canonical", 2),
        ("sort", 3),
    ]
    assert {b.variant for b in found if b.arm == "canonical" and b.tokens < 128} == {"staged_512x1b"}


def test_a_throttled_repetition_stays_in_the_data_and_is_timed_again(protocol: Path) -> None:
    device = FakeDevice()
    quiet = device.always
    device.states = [quiet, State(0x4, 1, 1500, 70), quiet]  # before, after the first, before the second attempt
    found = batches(measured(device, protocol))
    rejected = [b for b in found if not b.accepted]
    assert {(b.repetition, b.attempt, b.reason, b.mode, b.clock_events) for b in rejected} == {
        (0, 0, "throttled", GRAPH, 4)
    }
    assert len(rejected) == SERIES
    again = [b for b in found if (b.repetition, b.mode, b.tokens, b.campaign) == (0, GRAPH, 1, "operator")]
    assert [b.attempt for b in again if b.accepted] == [1] * SERIES


def test_attempts_and_extra_repetitions_are_limited(protocol: Path) -> None:
    device = FakeDevice()
    device.always = State(0x4, 1, 1500, 70)
    found = [
        b for b in batches(measured(device, protocol)) if (b.mode, b.tokens, b.campaign) == (GRAPH, 128, "operator")
    ]
    assert not any(b.accepted for b in found)
    # Three attempts each, of which two are extra: 16 of at most 20.
    assert len(found) == SERIES * 8 * 3


def test_another_process_and_a_wrong_plan_reject(protocol: Path) -> None:
    device = FakeDevice()
    device.always = State(0, 2, 1980, 40)
    assert {b.reason for b in batches(measured(device, protocol))} == {"other_process"}
    wrong = measured(FakeDevice(wrong={Arm.SORT}), protocol)
    assert {(b.reason, b.attempt) for b in batches(wrong)} == {("incorrect", 0)}
    assert {tuple(c["wrong"]) for c in wrong.checks} == {("sort",)}


def test_a_late_host_rejects_the_streamed_repetition_alone(protocol: Path) -> None:
    found = batches(measured(FakeDevice(late=[True]), protocol))
    assert {(b.mode, b.repetition, b.reason) for b in found if not b.accepted} == {
        ("stream", 0, "late"),
        ("host", 0, "late"),
    }


def test_points_beyond_the_deadline_are_named(protocol: Path) -> None:
    found = measured(FakeDevice(), protocol, deadline=0.0)
    assert not found.rows
    assert found.left == [
        "operator E=128 k=8 M=1",
        "operator E=128 k=8 M=128",
        "layer E=128 k=8 M=1",
        "operator E=8 k=2 M=4",
    ]


def test_batches_survive_the_file(tmp_path: Path, protocol: Path) -> None:
    found = batches(measured(FakeDevice(), protocol))
    TABLE.write(tmp_path / "a.parquet", found)
    TABLE.write(tmp_path / "b.parquet", found)
    assert TABLE.read(tmp_path / "a.parquet") == found
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
