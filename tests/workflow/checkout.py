# SPDX-License-Identifier: Apache-2.0
"""A copy of the workflow to run, edit and ask what it would run again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from snakemake.api import SnakemakeApi
from snakemake.settings.types import DAGSettings, OutputSettings, Quietness, ResourceSettings

from routeblock.evidence import digest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("Snakefile", "config.yaml", "envs", "workflow")


@dataclass(frozen=True)
class Checkout:
    """The workflow, its package and what was made, below `root`; only jobs that `run` starts execute."""

    root: Path

    @classmethod
    def fresh(cls, root: Path) -> Checkout:
        """A copy of this repository's workflow in which nothing was made yet."""
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, root / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, root / part)
        return cls(root)

    def copy(self, root: Path) -> Checkout:
        """A copy with what was made, times included."""
        shutil.copytree(self.root, root)
        return Checkout(root)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m ...` in the copy, with the copy's package."""
        environment = os.environ | {"PYTHONPATH": str(self.root / "workflow")}
        return subprocess.run(
            [sys.executable, "-m", *arguments], cwd=self.root, env=environment, capture_output=True, text=True
        )

    def run(self, *targets: str) -> None:
        """Make `targets` (files or rules)."""
        done = self.command("snakemake", "--cores", "1", "--", *targets)
        assert done.returncode == 0, done.stdout + done.stderr

    def execute(self, monkeypatch: pytest.MonkeyPatch, executor: str, *targets: str) -> Any:
        """Hand the jobs of `targets` to an executor of Snakemake in this process; returns Snakemake's DAG."""
        monkeypatch.chdir(self.root)
        monkeypatch.setenv("PATH", os.environ["PATH"])
        monkeypatch.setattr(digest, "PACKAGE_ROOT", self.root / "workflow" / "routeblock")
        digest._parsed.cache_clear()
        dryrun = executor == "dryrun"
        with SnakemakeApi(OutputSettings(quiet={Quietness.ALL}, dryrun=dryrun)) as api:
            workflow = api.workflow(ResourceSettings(cores=1), snakefile=self.root / "Snakefile", workdir=self.root)
            workflow.dag(DAGSettings(targets=set(targets))).execute_workflow(executor=executor)
        digest._parsed.cache_clear()
        return workflow._workflow.dag

    def would_run(self, monkeypatch: pytest.MonkeyPatch, *targets: str) -> list[tuple[str, dict[str, str]]]:
        """Rule and wildcards of every job that a run for `targets` would start now, in sorted order."""
        needed = self.execute(monkeypatch, "dryrun", *targets).needrun_jobs(exclude_finished=False)
        return sorted(((job.rule.name, dict(job.wildcards_dict)) for job in needed), key=repr)

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace `old`, which the file must contain once, by `new`."""
        file = self.root / path
        text = file.read_text()
        assert text.count(old) == 1, (path, old)
        file.write_text(text.replace(old, new))
