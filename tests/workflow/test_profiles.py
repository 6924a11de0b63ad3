# SPDX-License-Identifier: Apache-2.0
"""The profiles: what every job asks a cluster for, who holds a GPU, in which order, and that nothing is tried again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ROOT, Checkout

from routeblock.route_block.facts import schedule

PROFILES = ROOT / "workflow" / "profiles"
# What uses a GPU; study B's sweep and confirmation do on lane cuda.
ON_A_GPU = {
    "run_cuda",
    "identity_cuda",
    "capture",
    "census",
    "unassisted",
    "beyond",
    "sanitizer",
    "sweep",
    "confirmation",
}


def settings(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((PROFILES / name / "config.yaml").read_text())
    return loaded


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """With the lane cuda beside the others, and with the Slurm profile less what only its plug-in knows."""
    checkout = Checkout.fresh(tmp_path)
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    here = {k: v for k, v in settings("slurm").items() if k not in ("executor", "quiet") and not k.startswith("slurm-")}
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "config.yaml").write_text(yaml.safe_dump(here))
    return checkout


def jobs(checkout: Checkout, *arguments: str) -> list[tuple[str, dict[str, str]]]:
    """Rule of every job of a dry run, with wildcards, priority and resources."""
    done = checkout.command("snakemake", "--dry-run", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = []
    for block in re.split(r"\n(?=\[|(?:local)?rule |checkpoint )", re.sub(r"(?m)^ +", "", done.stdout)):
        if match := re.match(r"(?:local)?(?:rule|checkpoint) (\w+):", block):
            facts = dict(re.findall(r"(\w+)=([^,\n]+)", ", ".join(re.findall(r"(?:wildcards|resources): (.*)", block))))
            # A wildcard may be called gpu as well: the one that counts is the resource.
            asked = dict(re.findall(r"(\w+)=([^,\n]+)", ", ".join(re.findall(r"resources: (.*)", block))))
            facts["gpu"] = asked.get("gpu", "0")
            facts["priority"] = next(iter(re.findall(r"priority: (-?\d+)", block)), "0")
            found.append((match[1], facts))
    assert len(found) > 20, done.stdout
    return found


def test_only_what_uses_a_gpu_asks_for_one(checkout: Checkout) -> None:
    checkout.edit("config.yaml", "lanes: [twin-ampere, twin-hopper, recorded-h200]", "lanes: [twin-hopper, cuda]")
    checkout.edit("config.yaml", "  lanes: [cpu, recorded-h200]", "  lanes: [cpu, cuda]")
    found = jobs(checkout, "--profile", "profile", "--", "all")
    assert ON_A_GPU - {"capture"} <= {rule for rule, _ in found}
    for rule, facts in found:
        uses = rule in ON_A_GPU and facts.get("lane", "cuda") == "cuda"
        assert int(facts.get("gpu", "0")) == uses, (rule, facts)


def test_every_rule_that_may_go_to_a_cluster_says_for_how_long_and_with_how_much_memory(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.edit("config.yaml", "lanes: [twin-ampere, twin-hopper, recorded-h200]", "lanes: [twin-hopper, cuda]")
    workflow = checkout.execute(monkeypatch, "dryrun", "all").workflow
    sent = [rule for rule in workflow.rules if not (rule.norun or rule.name in workflow._localrules)]
    assert {"run", "run_cuda", "score", "sweep", "survey_point"} <= {rule.name for rule in sent}
    assert [rule.name for rule in sent if not {"runtime", "mem_mb"} <= rule.resources.keys()] == []
    assert {"report", "bundle"} <= {rule.name for rule in workflow.rules} - {rule.name for rule in sent}


def test_a_replicate_is_one_job_and_its_processes_hold_one_gpu() -> None:
    slurm = settings("slurm")
    assert slurm["resources"]["gpu"] == 1 and slurm["set-resource-scopes"]["gpu"] == "local"
    names = {slurm["groups"][rule] for rule in ("run", "run_cuda")}
    (group,) = names
    assert set(re.findall(r"{(\w+)}", group)) == {"fixture", "lane", "point", "plan_source", "n"}
    assert slurm["group-components"][group] >= len([n for _, _, n in schedule(1)])


@pytest.mark.parametrize("profile", ["default", "slurm"])
def test_nothing_is_tried_again_but_what_the_cluster_lost(profile: str) -> None:
    assert settings(profile).get("retries", 0) == 0
    assert settings("slurm")["slurm-requeue"] is True
    for rules in [ROOT / "workflow" / "Snakefile", *(ROOT / "workflow" / "rules").glob("*.smk")]:
        assert "retries:" not in rules.read_text(), rules


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_runs_start_gpu_by_gpu_in_turn_and_on_each_in_the_order_of_the_study(checkout: Checkout, gpus: int) -> None:
    checkout.edit("config.yaml", "lanes: [twin-ampere, twin-hopper, recorded-h200]", "lanes: [cuda]")
    checkout.edit("config.yaml", "gpus: 1 #", f"gpus: {gpus} #")
    checkout.edit("config.yaml", "replicates: 5", "replicates: 4")
    runs = [facts for rule, facts in jobs(checkout, "--cores", "8", "--", "gpu_evidence") if rule == "run_cuda"]
    runs.sort(key=lambda facts: -int(facts["priority"]))
    order = [(facts["cell"], facts["history"], int(facts["n"])) for facts in runs]
    assert len({facts["priority"] for facts in runs}) == len(runs) == 4 * 14
    for gpu in range(gpus):
        mine = [run for run in schedule(4) if (run[2] - 1) % gpus == gpu]
        assert [run for run in order if (run[2] - 1) % gpus == gpu] == mine
    assert [(n - 1) % gpus for _, _, n in order[: 14 * gpus]] == [*range(gpus)] * 14
