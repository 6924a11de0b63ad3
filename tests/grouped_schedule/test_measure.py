# SPDX-License-Identifier: Apache-2.0
"""Correctness before timing, rejection by rule, retries, counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import PLAN, MadeUpClock, recorded, write

from routeblock.errors import InputError
from routeblock.grouped_schedule import lanes, measure
from routeblock.grouped_schedule.campaigns import Planner
from routeblock.grouped_schedule.schedules import Arm
from routeblock.grouped_schedule.study import STUDY, missing_counts
from routeblock.timing.record import Record


def run(folder: Path, backend: MadeUpClock, kind: str = "sweep") -> Record:
    return recorded(folder, backend, kind, write(folder))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_a_sound_device_reaches_the_counts(folder: Path) -> None:
    (folder / "c").mkdir()
    found = [run(folder, MadeUpClock()), run(folder / "c", MadeUpClock(), "confirmation")]
    assert missing_counts(found, PLAN.expected_per_device) == []
    assert all(
        c["holds"] and c["rows_exact"] == c["rows_checked"] == 45 for r in found for c in r.documents["comparisons"]
    )


def test_a_sweep_alone_lacks_the_confirmation(folder: Path) -> None:
    lines = missing_counts([run(folder, MadeUpClock())], PLAN.expected_per_device)
    assert len(lines) == 2 and all("confirmation has 0" in line for line in lines)


def test_a_rejected_batch_stays_and_is_timed_again(folder: Path) -> None:
    found = run(folder, MadeUpClock(reason=lambda arm, call: "throttled" if call % 10 == 0 else ""))
    rejected = [b for b in found.batches if not b.accepted]
    assert rejected and {b.reason for b in rejected} == {"throttled"}
    sweep = [b for b in found.batches if b.accepted and b.campaign == "sweep"]
    assert len(sweep) == PLAN.expected_per_device.sweep_batches
    again = rejected[0]
    same = [
        b for b in found.batches if (b.series, b.scope, b.repetition) == (again.series, again.scope, again.repetition)
    ]
    assert [b.attempt for b in same if b.campaign == again.campaign and b.family == again.family] == [0, 1]


def test_a_device_that_never_settles_lacks_batches(folder: Path) -> None:
    found = run(folder, MadeUpClock(reason=lambda arm, call: "other_process"))
    assert not any(b.accepted for b in found.batches)
    attempts = PLAN.acceptance.attempts
    sweep = [b for b in found.batches if b.campaign == "sweep"]
    assert len(sweep) == attempts * PLAN.expected_per_device.sweep_batches
    assert "sweep has 0 accepted batches" in " ".join(missing_counts([found], PLAN.expected_per_device))


def test_one_wrong_bit_rejects_every_batch_of_the_arm(folder: Path) -> None:
    found = run(folder, MadeUpClock(spoil="band4"))
    wrong = [c for c in found.documents["comparisons"] if not c["holds"]]
    assert {(c["arm"], c["equals_control"]) for c in wrong} == {("band4", False)}
    assert all(b.reason == "incorrect" for b in found.batches if b.arm == "band4")
    assert all(b.accepted for b in found.batches if b.arm != "band4")


def test_a_wrong_control_is_found_though_all_arms_agree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing arms with each other would not notice; the rows against CPU references do."""
    backend = MadeUpClock()
    sound = backend.output

    def doubled(arm: Arm) -> np.ndarray:
        out = sound(arm)
        out[backend.fixture.active] *= 2
        return out

    monkeypatch.setattr(backend, "output", doubled)
    found = run(folder, backend)
    assert all(c["equals_control"] and c["rows_exact"] == 0 and not c["holds"] for c in found.documents["comparisons"])


def test_a_touched_sentinel_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MadeUpClock()
    sound = backend.output

    def touching(arm: Arm) -> np.ndarray:
        out = sound(arm)
        out[backend.fixture.ids < 0] = 0
        return out

    monkeypatch.setattr(backend, "output", touching)
    assert not any(c["holds"] for c in run(folder, backend).documents["comparisons"])


def test_what_follows_from_the_seed_is_equal_between_runs(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        run(folder / name, MadeUpClock(time_us=lambda arm, call, name=name: len(name) + call))
    for name in STUDY.files[:3]:
        assert (folder / "a" / name).read_bytes() == (folder / "b" / name).read_bytes()
    one, two = (STUDY.read(folder / name).run for name in ("a", "b"))
    assert one | {"telemetry": None} == two | {"telemetry": None}


def test_a_record_tells_time_and_memory(folder: Path) -> None:
    told = run(folder, MadeUpClock()).run["telemetry"]
    assert told["seconds"] > 0 and told["cpu_seconds"] > 0
    assert told["host_peak_bytes"] > 1 << 20 and told["device_peak_bytes"] == 7 << 20


def test_a_device_rests_before_another_attempt_where_the_protocol_says_so(folder: Path) -> None:
    rules = PLAN.acceptance.model_copy(update={"retry_rest_ms": 250})
    plan = PLAN.model_copy(update={"acceptance": rules})
    backend = MadeUpClock(reason=lambda arm, call: "throttled" if call == 0 else "")
    for _ in measure.run_stages(backend, Planner(plan, backend.place).stages("confirmation"), plan):
        pass
    assert backend.rests == [0.25]


def test_batches_survive_the_file(folder: Path) -> None:
    found = run(folder, MadeUpClock(reason=lambda arm, call: "throttled" if call == 3 else ""))
    assert STUDY.read(folder).batches == found.batches


def test_another_table_is_no_table_of_batches(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1]}), folder / "x.parquet")
    (folder / "y.parquet").write_bytes(b"PAR1")
    for name in ("x", "y", "z"):
        with pytest.raises(InputError, match="no table of batches"):
            STUDY.table.read(folder / f"{name}.parquet")


@pytest.mark.parametrize(
    ("device", "message"),
    [("tpu0", "cpu0, or gpu0"), ("cpu1", "cpu0, or gpu0"), ("gpu0", "no cubin"), ("gpu", "cpu0, or gpu0")],
)
def test_a_device_that_cannot_run_is_one_line(folder: Path, device: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as e:
        lanes.run("sweep", folder / "out", device, write(folder), cubin=None, threads=1)
    assert "\n" not in str(e.value) and not (folder / "out").exists()


def test_what_needs_a_gpu_says_so(folder: Path) -> None:
    with pytest.raises(InputError, match="it needs a GPU"):
        lanes.run("beyond", folder / "out", "cpu0", write(folder), cubin=None, threads=1)


def test_a_cpu_run_says_how_many_threads_it_had(folder: Path) -> None:
    found = lanes.run("confirmation", folder / "out", "cpu0", write(folder), cubin=None, threads=5000)
    assert 1 <= found.run["device"]["threads"] < 5000
    assert all(b.launches == b.warmups == 1 and b.time_us > 0 for b in found.batches)


def test_two_runs_on_this_cpu_differ_in_times_only(folder: Path) -> None:
    protocol = write(folder)
    one, two = (
        lanes.run("confirmation", folder / name, "cpu0", protocol, cubin=None, threads=threads)
        for name, threads in (("a", 1), ("b", 2))
    )
    for name in ("comparisons.json", "fixtures.json"):
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()
    first, second = ([replace(b, time_us=0.0) for b in STUDY.read(r.folder).batches] for r in (one, two))
    assert first == second and len({c["sha256"] for c in one.documents["comparisons"]}) == 1


def test_poison_is_a_nan_that_no_sum_gives() -> None:
    assert measure.POISON.view("f4") != measure.POISON.view("f4")
