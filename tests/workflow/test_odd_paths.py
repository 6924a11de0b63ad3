# SPDX-License-Identifier: Apache-2.0
"""Spaces and quotes in the checkout's path, in TMPDIR and in every path that config.yaml holds."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from checkout import ROOT, Checkout
from done import set_knobs

from routeblock.checkpoint.generator import Spec, generate

SMALL = Spec(layers=1, hidden=256, intermediate=128, experts=8, top_k=2, group_size=64, dtype="bfloat16")
KNOBS = {
    "fixture.name": "checkpoint",
    "checkpoint.path": "checkpoints/small one's",
    "checkpoint.revision": None,
    "checkpoint.layer": 0,
    "checkpoint.prompt": 'it\'s a "prompt" of several $words',
    "checkpoint.confirm": False,
    "lanes": ["twin-hopper"],
    "replicates": 1,
    "grouped_schedule.lanes": ["recorded-h200"],
}
RUN = "results/route_block/checkpoint/twin-hopper/published/stored/native/H0/rep1/record.json"


def odd(tmp_path: Path) -> Checkout:
    """A checkout in a folder with a space and a quote, with a small checkpoint of such a name."""
    root = tmp_path / "a b's" / "study"
    root.mkdir(parents=True)
    checkout = Checkout.fresh(root)
    shutil.copytree(ROOT / "fixtures", root / "fixtures")
    generate(root / "checkpoints" / "small one's", SMALL)
    set_knobs(checkout, KNOBS)
    return checkout


def test_a_small_study_runs_in_a_folder_with_a_space_and_a_quote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = odd(tmp_path)
    temporary = tmp_path / "t m'p"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    checkout.run(RUN, "results/tables/geometry.md", "results/probe/grid_probe.so")
    done = checkout.command("routeblock", "verify", "results")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout.root / RUN).exists()


def test_the_interpreter_of_a_lane_is_one_word_of_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = odd(tmp_path)
    python = "/opt/a b's $HOME/bin/python"
    set_knobs(checkout, {"fixture.name": "published_geometry", "lanes": ["twin-hopper", "cuda"], "cuda.python": python})
    commands = [job.shellcmd for job in checkout.execute(monkeypatch, "dryrun", "all").jobs if job.shellcmd]
    on_gpu = [c for c in commands if "/opt/" in c]
    assert on_gpu and all(python in shlex.split(c) for c in on_gpu)
