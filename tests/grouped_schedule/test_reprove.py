# SPDX-License-Identifier: Apache-2.0
"""A recorded run is proved again on this CPU; a bent record is refused by reason, even with a fresh seal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from tiny import PLAN, MadeUpClock, write

from routeblock.errors import InputError
from routeblock.evidence.archive import pack
from routeblock.grouped_schedule import batches as raw
from routeblock.grouped_schedule import bundle, campaigns, record, reprove, statistics, validate
from routeblock.grouped_schedule.campaigns import Mode

Rows = list[dict[str, Any]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A confirmation in which one batch was rejected."""
    folder = tmp_path / "h/cuda/gpu0/confirmation"
    clock = MadeUpClock(lambda arm, call: 100.0 + call % 7, lambda arm, call: "throttled" if call == 9 else "")
    stages = campaigns.confirmation(PLAN, Mode.CALL, 0)
    record.write(
        folder,
        clock,
        stages,
        PLAN,
        rule="confirmation",
        inputs=[write(tmp_path)],
        modules=["routeblock.grouped_schedule.lanes"],
    )
    tiny.contents(tmp_path / "h")
    return folder


def again(source: Path, out: Path) -> list[str]:
    contents = source.parents[2] / "contents.json"
    return reprove.write(out, source, "recorded-h200", PLAN, contents=contents, threads=1, inputs=[])


def test_a_sound_record_is_proved_and_keeps_its_times(source: Path, tmp_path: Path) -> None:
    assert again(source, tmp_path / "out") == []
    was, now = record.read(source), record.read(tmp_path / "out")
    assert [b.time_us for b in now.batches] == [b.time_us for b in was.batches]
    assert {b.lane for b in now.batches} == {"recorded-h200"}
    assert now.fixtures == was.fixtures and now.run["protocol_sha256"] == was.run["protocol_sha256"]
    assert now.run["telemetry"] == was.run["telemetry"]


def edit(source: Path, name: str, change: Callable[[Any], None], *, seal: bool = True) -> None:
    """Change a file of the record; with `seal`, list its new digest too, as a forger would."""
    path = source / name
    if name.endswith(".parquet"):
        rows = pq.read_table(path).to_pylist()
        change(rows)
        pq.write_table(pa.Table.from_pylist(rows, schema=raw.SCHEMA), path)
    else:
        told = json.loads(path.read_text())
        change(told)
        path.write_text(json.dumps(told))
    if seal:
        (source.parents[2] / "contents.json").unlink()
        tiny.contents(source.parents[2])


def swap(rows: Rows, a: int, b: int, *names: str) -> None:
    for name in names:
        rows[a][name], rows[b][name] = rows[b][name], rows[a][name]


def rejected(rows: Rows) -> dict[str, Any]:
    return next(row for row in rows if not row["accepted"])


def without(repetition: int) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        rows[:] = [row for row in rows if row["repetition"] != repetition]

    return change


# What is bent, how, and what is said.
BATCHES = {
    "a time that is none": (lambda t: t[3].update(time_us=-1.0), "time_us holds -1.0"),
    "no number": (lambda t: t[3].update(time_us=float("nan")), "time_us holds nan"),
    "two series swapped": (lambda t: swap(t, 0, 2, "series"), "series is 'band32', the protocol gives 'job_major'"),
    "two arms swapped": (lambda t: swap(t, 0, 2, "arm"), "arm is 'band32', the protocol gives 'job_major'"),
    "two scopes swapped": (lambda t: swap(t, 0, 1, "scope"), "scope is 'compute', the protocol gives 'inclusive'"),
    "another baseline": (lambda t: t[0].update(baseline="band32"), "baseline is 'band32'"),
    "another repetition": (lambda t: t[0].update(repetition=1), "repetition is 1, the protocol gives 0"),
    "another position": (lambda t: t[0].update(position=1), "position is 1, the protocol gives 0"),
    "another direction": (lambda t: t[0].update(direction="reversed"), "direction is 'reversed'"),
    "another device": (lambda t: t[0].update(device="gpu7"), "device is 'gpu7'"),
    "more launches": (lambda t: t[0].update(launches=17), "launches is 17"),
    "a repetition dropped": (without(1), "series is 'job_major', the protocol gives 'band32'"),
    "the last one dropped": (lambda t: t.pop(), "no batch for"),
    "one batch twice": (lambda t: t.insert(1, dict(t[0])), "scope is 'inclusive', the protocol gives 'compute'"),
    "one more": (lambda t: t.append(dict(t[-1])), "the protocol ends before it"),
    "a rejected one accepted": (lambda t: rejected(t).update(accepted=True, reason=""), "protocol gives 'throttled'"),
    "a rejected one unmarked": (lambda t: rejected(t).update(accepted=True), "accepted is True"),
    "a rejected one dropped": (lambda t: t.remove(rejected(t)), "attempt is 1, the protocol gives 0"),
    "a good one rejected": (lambda t: t[0].update(accepted=False, reason="throttled"), "reason is 'throttled'"),
    "other processes hidden": (lambda t: t[0].update(compute_processes=3), "reason is ''"),
    "none left": (lambda t: t.clear(), "campaigns none"),
}
OTHERS = {
    "other output bits": ("comparisons.json", lambda t: t[2].update(sha256="0" * 64), "equals_control does not fit"),
    "other bits everywhere": (
        "comparisons.json",
        lambda t: [c.update(sha256="0" * 64) for c in t],
        "has other output bits",
    ),
    "an arm's name": ("comparisons.json", lambda t: t[2].update(arm="band32"), "arm is 'band32', the protocol gives"),
    "a comparison dropped": ("comparisons.json", lambda t: t.pop(), "6 comparisons, the protocol gives 7"),
    "fewer rows checked": ("comparisons.json", lambda t: t[1].update(rows_checked=1), "rows_checked is 1"),
    "a failure called success": (
        "comparisons.json",
        lambda t: t[1].update(rows_exact=0),
        "holds is True, the protocol gives False",
    ),
    "another cardinality": ("fixtures.json", lambda t: t[0].update(distinct_experts=1), "not what its seed gives"),
    "other weights": ("fixtures.json", lambda t: t[0]["sha256"].update(weights="0" * 64), "not what its seed gives"),
    "another protocol": ("run.json", lambda t: t.update(protocol_sha256="0" * 64), "carries protocol"),
    "another cubin": ("run.json", lambda t: t["device"].update(cubin_sha256="0" * 64), "a cubin that is not"),
    "another device name": ("run.json", lambda t: t["device"].update(device="gpu3"), "the protocol gives 'gpu3'"),
}
ATTACKS = {k: ("batches.parquet", *v) for k, v in BATCHES.items()} | OTHERS


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_bent_record_is_named_and_nothing_written(source: Path, tmp_path: Path, attack: str) -> None:
    name, change, message = ATTACKS[attack]
    edit(source, name, change)
    try:
        lines = again(source, tmp_path / "out")
    except InputError as e:
        lines = [str(e)]
    assert any(message in line for line in lines), lines
    assert all("\n" not in line for line in lines)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", record.FILES)
def test_a_number_edited_after_the_seal_is_found(source: Path, tmp_path: Path, name: str) -> None:
    """A plausible time can only be told from the recorded one by its digest."""
    changes: dict[str, Callable[[Any], None]] = {
        "batches.parquet": lambda t: t[0].update(time_us=t[0]["time_us"] * 0.99),
        "run.json": lambda t: t.update(telemetry={}),
    }
    edit(source, name, changes.get(name, lambda t: t.reverse()), seal=False)
    assert again(source, tmp_path / "out") == [f"{source / name}: not the bytes that were recorded"]


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_no_list_of_contents_is_no_proof(source: Path, tmp_path: Path, text: str) -> None:
    (source.parents[2] / "contents.json").write_text(text)
    try:
        lines = again(source, tmp_path / "out")
    except InputError as e:
        lines = [str(e)]
    assert lines and not (tmp_path / "out").exists()


@pytest.mark.parametrize("attack", BATCHES)
def test_statistics_refuse_what_the_protocol_did_not_order(source: Path, tmp_path: Path, attack: str) -> None:
    edit(source, *ATTACKS[attack][:2])
    try:
        lines = statistics.write(tmp_path / "s", [source], PLAN, minimum_effect=0.01, inputs=[])
    except InputError as e:
        lines = [str(e)]
    assert any(ATTACKS[attack][2] in line or "accepted twice" in line for line in lines if "sweep has 0" not in line), (
        lines
    )


# What the validator, which knows less of the protocol's form, says of its own.
VALIDATED = {
    "a time that is none": "time_us is -1.0",
    "two series swapped": "its arm is",
    "two arms swapped": "its arm is",
    "another repetition": "ran forward",
    "another position": "not at position 1",
    "another direction": "ran reversed",
    "a repetition dropped": "confirmation_batches 8, expected 12",
    "the last one dropped": "recomputed 'too few accepted'",
    "a rejected one accepted": "by the protocol 'throttled'",
    "a rejected one unmarked": "by the protocol 'throttled'",
    "a good one rejected": "by the protocol ''",
    "other processes hidden": "by the protocol 'other_process'",
}


@pytest.mark.parametrize("attack", VALIDATED)
def test_the_validator_refuses_it_too(source: Path, tmp_path: Path, attack: str) -> None:
    """The statistics are those of the sound record; the raw batches are bent afterwards."""
    statistics.write(tmp_path / "s", [source], PLAN, minimum_effect=0.01, inputs=[])
    edit(source, *ATTACKS[attack][:2])
    wrong = validate.disagreements(tmp_path / "s/statistics.json", [source], tmp_path / "protocol.json")[1]
    assert any(VALIDATED[attack] in line for line in wrong), wrong


def test_an_archive_depends_on_the_files_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
        pack(tmp_path / f"{name}.tar.gz", {"f/x": tmp_path / name / "x"})
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()


def test_a_bundle_holds_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tarfile

    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    Path("d/x").write_text("x")
    Path("guide.md").write_text("how to read it")
    path = bundle.write(Path("out"), [Path("d")], readme=Path("guide.md"))
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["contents.json", "README.md", "d/x"]
