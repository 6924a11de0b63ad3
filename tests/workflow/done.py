# SPDX-License-Identifier: Apache-2.0
"""A study marked as done without computing it: every output stands in its place, and Snakemake noted what made it.

What would run again is then asked of the real rules, with their real parameters and code digests.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ROOT, Checkout
from snakemake.executors import touch

# What checkpoints are asked for: which exchanges there can be.
CONTENT = json.dumps({"exchange": {"within": [1, 2], "across": [3, 4]}})


def set_knobs(checkout: Checkout, knobs: Mapping[str, Any]) -> None:
    """Set knobs of config.yaml, each named by its dotted path."""
    file = checkout.root / "config.yaml"
    settings = yaml.safe_load(file.read_text())
    for knob, value in knobs.items():
        *parents, name = knob.split(".")
        section = settings
        for parent in parents:
            section = section[parent]
        section[name] = value
    file.write_text(yaml.safe_dump(settings))


def mark_done(root: Path, monkeypatch: pytest.MonkeyPatch, knobs: Mapping[str, Any], *targets: str) -> Checkout:
    """A checkout below `root` in which `targets` are done under `knobs`."""
    root.mkdir()
    checkout = Checkout.fresh(root)
    shutil.copytree(ROOT / "fixtures", root / "fixtures")
    set_knobs(checkout, knobs)
    if captured := knobs.get("checkpoint.captured"):
        for name in (captured, "captures/others.safetensors"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).touch()
    really_touch = touch.Executor.run_job

    def put(executor: touch.Executor, job: Any) -> None:
        for output in map(Path, job.output):
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(CONTENT)
        really_touch(executor, job)

    with monkeypatch.context() as patch:
        patch.setattr(touch.Executor, "run_job", put)
        patch.setattr(touch.Executor, "SLEEPING_TIME", 0)
        # Twice: the report takes in the table of the prediction once there is one.
        for _ in range(2):
            checkout.execute(patch, "touch", *targets)
    return checkout
