# SPDX-License-Identifier: Apache-2.0
"""The committed evidence: the protocol's counts on each GPU, the published totals from two, clean kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from routeblock.cuda import build
from routeblock.evidence.digest import sha256_file
from routeblock.grouped_schedule import protocol, sanitizer, tables, targets, verification
from routeblock.grouped_schedule.campaigns import CAMPAIGNS
from routeblock.grouped_schedule.study import STUDY, missing_counts
from routeblock.grouped_schedule.tables import Evidence
from routeblock.timing.check import findings
from routeblock.timing.record import Record
from routeblock.timing.verification import unlisted

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / targets.RECORDED
PLAN = protocol.load(ROOT / "fixtures/protocols/grouped_schedule.json")
PUBLISHED = json.loads((ROOT / "fixtures/published/grouped_schedule.json").read_text())
GPUS = sorted(p.name for p in (HERE / "cuda").iterdir())


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [STUDY.read(HERE / "cuda" / gpu / kind) for gpu in GPUS for kind in CAMPAIGNS]


def test_both_gpus_ran_the_committed_protocol_as_it_orders(records: list[Record]) -> None:
    assert GPUS == ["gpu0", "gpu1"]
    contents = HERE / "contents.json"
    assert missing_counts(records, PLAN.expected_per_device) == []
    assert [line for r in records for line in findings(STUDY, r, PLAN)] == []
    assert [line for r in records for line in unlisted(STUDY, r.folder, contents)] == []
    assert [line for r in records for line in verification.other_cubin(r, contents)] == []


def test_every_committed_file_is_the_recorded_one() -> None:
    """Sanitizer and build documents included, which a rule checks again before a table."""
    listed = json.loads((HERE / "contents.json").read_text())
    files = {p.relative_to(HERE).as_posix(): p for p in HERE.rglob("*.*") if p.parent != HERE}
    assert {name: sha256_file(path) for name, path in files.items()} == {name: listed[name]["sha256"] for name in files}
    dropped = {Path(name).suffixes[-1] for name in listed.keys() - files.keys() if ".manifest." not in name}
    assert dropped == {".cubin"}


def test_the_published_counts_come_from_two_gpus(records: list[Record]) -> None:
    rows = {(r["device"], r["campaign"]): r for r in tables.counts(Evidence([], records, PUBLISHED))}

    def counts(device: str, campaign: str) -> tuple[int, int, int]:
        row = rows[device, campaign]
        return row["equal"], row["different"], row["accepted"]

    for gpu in GPUS:
        assert counts(gpu, "sweep") == (68, 0, 1632)
        assert counts(gpu, "confirmation") == (12, 0, 96)
    assert counts("gpu0 + gpu1", "sweep") == (136, 0, 3264)
    assert counts("gpu0 + gpu1", "confirmation") == (24, 0, 192)
    total = rows["gpu0 + gpu1", "sweep"]
    assert (total["published_comparisons"], total["published_batches"]) == (136, 3264)


def test_every_rejected_batch_has_its_reason_in_a_table(records: list[Record]) -> None:
    rows = tables.rejections(Evidence([], records, PUBLISHED))
    assert sum(r["rejected"] for r in rows) == sum(not b.accepted for r in records for b in r.batches)
    assert all(r["reason"] and r["clock_events"] for r in rows)


def test_the_kernels_are_those_of_this_source(records: list[Record]) -> None:
    """The binary that ran on the GPUs is what this source compiles to, byte for byte."""
    built = json.loads((HERE / "build/sm_90/build.json").read_text())["q6k_schedules"]
    ran = {r.run["device"]["cubin_sha256"] for r in records}
    assert ran == {built["sha256"]} == {build.compile_kernels("sm_90").sha256}


@pytest.mark.parametrize("gpu", GPUS)
def test_the_sanitizer_found_nothing(records: list[Record], gpu: str) -> None:
    told = json.loads((HERE / "cuda" / gpu / "sanitizer/sanitizer.json").read_text())
    assert told["cubin_sha256"] in {r.run["device"]["cubin_sha256"] for r in records}
    assert {t["tool"]: t["outcome"] for t in told["tools"]} == dict.fromkeys(sanitizer.TOOLS, "clean")


def test_no_path_or_name_of_a_machine_is_committed() -> None:
    for path in HERE.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            folders = [b"/" + name + b"/" for name in (b"home", b"root", b"tmp", b"work")]
            assert not [word for word in (*folders, b"GPU-") if word in data], path
