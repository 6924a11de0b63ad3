# SPDX-License-Identifier: Apache-2.0
"""The lane cuda in the workflow: what is asked for once the plans are captured, and which interpreter runs it.

Nothing runs: what a GPU would have made is put in its place as declared, and Snakemake is asked what is left.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from checkout import Checkout

from routeblock.route_block.facts import CELLS, predecessor

STUDY = "results/route_block/published_geometry/cuda/published/captured"
SCORE = f"{STUDY}/score.json"
MAKES = "python3.12 -m venv .venv-cuda"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout.fresh(tmp_path)
    (tmp_path / "fixtures" / "golden").mkdir(parents=True)
    checkout.edit("config.yaml", "lanes: [twin-ampere, twin-hopper, recorded-h200]", "lanes: [cuda]")
    checkout.edit("config.yaml", "plan_source: [stored]", "plan_source: [captured]")
    checkout.edit("config.yaml", "replicates: 5", "replicates: 2")
    return checkout


def dry_run(checkout: Checkout, target: str) -> str:
    # Only what is missing: nothing here was made by Snakemake.
    done = checkout.command(
        "snakemake", "--cores", "4", "--dry-run", "--printshellcmds", "--rerun-triggers", "mtime", "--", target
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def runs(report: str) -> dict[tuple[str, str, str], str]:
    """Cell, history and replicate of the runs in a report, with whom each waits for."""
    lines = [line for line in report.splitlines() if "routeblock study-a run " in line]
    found = {}
    for line in lines:
        key = re.search(r"--cell (\w+) --history (H\d) --replicate (\d+)", line)
        assert key is not None, line
        waits = re.search(r"--after \S+/captured/(\S+)/record.json", line)
        found[key[1], key[2], key[3]] = waits[1] if waits else ""
    return found


def freeze(checkout: Checkout, **exchange: list[int] | None) -> None:
    """What precedes the runs, there; the prediction with these exchange pairs."""
    fixture = "results/fixtures/published_geometry"
    study = [f"capture/{h}/{n}" for h in ("H0", "H1") for n in ("plans.safetensors", "capture.json")]
    study += ["plans.safetensors", "plans.json", "plans.manifest.json", "prediction.manifest.json", "prediction.json"]
    names = [f"{fixture}/{n}" for n in ("fixture.json", "layer.safetensors", "inputs.safetensors", "plans.safetensors")]
    names += [
        "results/probe/grid_probe.so",
        "results/identity/cuda/identity.json",
        "results/twin/golden.json",
        *(f"{STUDY}/{name}" for name in study),
    ]
    for name in names:
        path = checkout.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (checkout.root / STUDY / "prediction.json").write_text(json.dumps({"exchange": exchange}))


def test_no_run_is_asked_for_before_the_plans_are_captured(checkout: Checkout) -> None:
    report = dry_run(checkout, SCORE)
    assert not runs(report)
    for rule in ("capture", "captured_plans", "captured_prediction"):
        assert re.search(rf"^(rule|localrule|checkpoint) {rule}:", report, re.M), rule


@pytest.mark.parametrize(
    ("target", "pairs", "missing"),
    [
        (SCORE, {"within": [1, 2], "across": [3, 4]}, set()),
        (SCORE, {"within": [1, 2], "across": None}, {"swap_across"}),
        ("gpu_evidence", {"within": [1, 2], "across": None}, {"swap_across"}),
        ("gpu_evidence", {"within": None, "across": None}, {"swap_within", "swap_across"}),
    ],
    ids=["both pairs", "one plan in both histories", "evidence of that", "no pair"],
)
def test_only_exchanges_that_can_be_are_run(
    checkout: Checkout, target: str, pairs: dict[str, list[int] | None], missing: set[str]
) -> None:
    freeze(checkout, **pairs)
    found = runs(dry_run(checkout, target))
    assert found.keys() == {(c, h, n) for c in CELLS.keys() - missing for h in ("H0", "H1") for n in ("1", "2")}
    # Nobody waits for a run that nobody makes, and all stand in one line.
    first, *others = sorted(found.values())
    assert first == "" and len(set(others)) == len(others)
    assert set(others) <= {f"{cell}/{history}/rep{n}" for cell, history, n in found}


def test_without_a_cell_its_follower_waits_for_the_one_before() -> None:
    assert predecessor("full_k", "H0", 1, 1) == ("swap_across", "H0", 1)
    assert predecessor("full_k", "H0", 1, 1, CELLS.keys() - {"swap_across"}) == ("swap_within", "H0", 1)
    assert predecessor("native", "H0", 1, 1, ["replay"]) is None
    assert predecessor("native", "H0", 3, 2) == ("canonical", "H1", 1)  # GPU 0 has replicates 1 and 3


@pytest.mark.parametrize(
    ("python", "makes"),
    [("null", False), (".venv-cuda/bin/python", True), ("/opt/vllm/bin/python", False)],
    ids=["the workflow's own", "made", "given"],
)
def test_the_interpreter_is_made_from_its_pins_or_given(checkout: Checkout, python: str, makes: bool) -> None:
    checkout.edit("config.yaml", "python: null", f"python: {python}")
    freeze(checkout, within=None, across=None)
    report = dry_run(checkout, "gpu_evidence")
    made = MAKES in report
    assert made is makes
    assert ("pip install" in report and "envs/cuda.txt" in report) is makes
    command = next(line for line in report.splitlines() if "routeblock study-a census " in line)
    assert (f"{python} -m routeblock study-a census" in command) is (python != "null")


def test_an_interpreter_that_was_made_is_not_made_again(checkout: Checkout) -> None:
    checkout.edit("config.yaml", "python: null", "python: .venv-cuda/bin/python")
    freeze(checkout, within=None, across=None)
    (checkout.root / ".venv-cuda").mkdir()
    (checkout.root / ".venv-cuda" / "stamp").touch()
    assert MAKES not in dry_run(checkout, f"{STUDY}/native/H0/rep1/record.json")
    subprocess.run(["touch", "-d", "+1 hour", "envs/cuda.txt"], cwd=checkout.root, check=True)
    assert MAKES in dry_run(checkout, f"{STUDY}/native/H0/rep1/record.json")
