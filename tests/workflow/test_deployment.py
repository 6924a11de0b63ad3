# SPDX-License-Identifier: Apache-2.0
"""The workflow as a module of another Snakefile, as snakedeploy writes it, and what the workflow catalogue reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml
from checkout import ROOT, Checkout

SNAKEFILE = """
configfile: "config/config.yaml"

module routeblock:
    snakefile: "{checkout}/workflow/Snakefile"
    config: config

use rule * from routeblock
"""


def dry_run(folder: Path, checkout: Path) -> subprocess.CompletedProcess[str]:
    """A dry run in `folder`, with small settings, of the workflow and package of `checkout`."""
    settings = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    settings |= {"lanes": ["twin-hopper"], "replicates": 1}
    settings["grouped_schedule"]["lanes"] = ["recorded-h200"]
    for name, text in (
        ("config/config.yaml", yaml.safe_dump(settings)),
        ("workflow/Snakefile", SNAKEFILE.format(checkout=checkout)),
    ):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "snakemake", "--dry-run"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(checkout / "workflow")},
        capture_output=True,
        text=True,
    )


def test_a_deployed_module_makes_the_study_of_its_own_settings(tmp_path: Path) -> None:
    done = dry_run(tmp_path, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(count) for name, count in re.findall(r"(?m)^(\w+) +(\d+)$", done.stdout)}
    assert (counts["run"], counts["score"], counts["report"], counts["all"]) == (14, 1, 1, 1)
    assert re.search(r"rule report:\n    input: config/config.yaml,", done.stdout)  # it shows the settings
    for name in ("fixtures", "envs", "workflow/report"):
        assert (tmp_path / name).resolve() == ROOT / name


def test_a_package_that_was_not_installed_from_a_clone_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    bare = Checkout.fresh(tmp_path / "bare")  # without fixtures
    done = dry_run(tmp_path / "deployed", bare.root)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"[^\n]*bare/fixtures\b[^\n]*pip install --editable CLONE\n", done.stderr)


def test_the_catalogue_finds_what_it_asks_for() -> None:
    assert (ROOT / "config" / "README.md").is_file() and (ROOT / "workflow" / "Snakefile").is_file()
    assert (ROOT / "config" / "config.yaml").resolve() == ROOT / "config.yaml"  # one source of settings
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert usage["mandatory-flags"].keys() == {"desc", "flags"}
    assert not any(usage["software-stack-deployment"].values())  # rules name no environment
    assert "conda:" not in "".join(path.read_text() for path in (ROOT / "workflow" / "rules").glob("*.smk"))
