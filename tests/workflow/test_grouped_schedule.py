# SPDX-License-Identifier: Apache-2.0
"""What the workflow runs for study B, lane by lane."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkout import ROOT, Checkout

from routeblock.grouped_schedule import targets

TABLES = [(f"table_{name}", {}) for name in targets.TABLES]
AFTER = sorted([("bundle", {}), ("grouped_mutations", {}), ("statistics", {}), ("validate_timings", {}), *TABLES])
RECORDED = targets.RECORDED


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "checkout"
    root.mkdir()
    made = Checkout.fresh(root)
    for name in ("bundles", "protocols", "published"):
        shutil.copytree(ROOT / "fixtures" / name, made.root / "fixtures" / name, dirs_exist_ok=True)
    shutil.copy(ROOT / "fixtures/record_edits.json", made.root / "fixtures")
    shutil.rmtree(made.root / "fixtures/recorded", ignore_errors=True)
    return made


def lanes(checkout: Checkout, *names: str) -> None:
    text = (checkout.root / "config.yaml").read_text()
    line = next(x for x in text.split("grouped_schedule:")[1].splitlines() if x.strip().startswith("lanes:"))
    checkout.edit("config.yaml", line, f"  lanes: [{', '.join(names)}]")


def test_a_cpu_has_a_sweep_and_a_confirmation(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes(checkout, "cpu")
    device = {"lane": "cpu", "device": "cpu0"}
    runs = [("confirmation", device), ("sweep", device)]
    assert checkout.would_run(monkeypatch, "bundle") == sorted(runs + AFTER, key=repr)


def test_recorded_gpus_are_proved_one_by_one(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes(checkout, "recorded-h200")
    for device in ("gpu0", "gpu1"):
        for kind in ("sweep", "confirmation", "beyond"):
            folder = checkout.root / RECORDED / "cuda" / device / kind
            folder.mkdir(parents=True)
            for name in targets.FILES:
                (folder / name).touch()
    (checkout.root / RECORDED / "contents.json").touch()
    for recording in targets.RECORDINGS.values():
        for kind in recording.kinds:
            folder = checkout.root / recording.source / "cuda" / "gpu0" / kind
            folder.mkdir(parents=True)
            for name in targets.FILES:
                (folder / name).touch()
        (checkout.root / recording.source / "contents.json").touch()
    (checkout.root / targets.COUNTERS).mkdir(parents=True)
    for name in ("counters.json", "contents.json"):
        (checkout.root / targets.COUNTERS / name).touch()
    jobs = checkout.would_run(monkeypatch, "bundle")
    proved = [wildcards for rule, wildcards in jobs if rule == "recorded"]
    assert sorted((w["recording"], w["device"], w["kind"]) for w in proved) == sorted(
        [("recorded-h200", device, kind) for device in ("gpu0", "gpu1") for kind in ("sweep", "confirmation", "beyond")]
        + [(name, "gpu0", kind) for name, recording in targets.RECORDINGS.items() for kind in recording.kinds]
    )
    own = {"other_statistics", "other_validation"}
    assert {rule for rule, _ in jobs} == {"recorded", *own, *(rule for rule, _ in AFTER)}


def test_a_kernel_is_built_for_the_named_architecture(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = checkout.would_run(monkeypatch, "results/build/sm_70/q6k_schedules.cubin")
    assert jobs == [("build_kernels", {"arch": "sm_70"})]
