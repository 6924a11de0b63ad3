# SPDX-License-Identifier: Apache-2.0
"""kill -9 at several moments, then the documented recovery: the bits of an undisturbed study."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Timer

from study import STUDY, TABLES, Finished, Workflow, digests, prepare, python_of

from routeblock.recovery import living


def test_a_study_killed_at_every_stage_ends_with_the_bits_of_an_undisturbed_one(
    finished: Finished, tmp_path: Path
) -> None:
    checkout = prepare(tmp_path / "checkout")

    def held(workflow: Workflow, command: str) -> int:
        """The process of a job, stopped in the middle of its work for as long as it takes to look."""
        process = workflow.until(python_of(command)).pid
        os.kill(process, signal.SIGSTOP)
        return process

    def recover(*said: str, let_go: int | None = None) -> None:
        if let_go:
            Timer(3, os.kill, (let_go, signal.SIGCONT)).start()
        done = checkout.command("routeblock", "recover", "results")
        assert done.returncode == 0, done.stderr
        assert living(checkout.root) == []
        assert all(word in done.stdout for word in said), done.stdout
        assert not list((checkout.root / "results").rglob(".*routeblock-tmp*"))

    # The scheduler alone, while the fixture is made: its job goes on, and is waited for.
    workflow = Workflow.start(checkout, *TABLES)
    job = held(workflow, "checkpoint fixture")
    workflow.kill()
    assert [p.is_scheduler for p in living(checkout.root)] and not any(p.is_scheduler for p in living(checkout.root))
    recover("waited for", "unlocked", let_go=job)

    # A second workflow while one is at work is refused; then a run's process alone is killed: the workflow fails.
    workflow = Workflow.start(checkout, *TABLES)
    run = held(workflow, "study-a run")
    done = checkout.command("routeblock", "recover", "results")
    assert done.returncode == 2 and f"runs already, process {workflow.process.pid}" in done.stderr
    os.kill(run, signal.SIGKILL)
    assert workflow.wait() == 1
    recover()

    # Scheduler and jobs at once, as a power cut would, while runs are made.
    (checkout.root / STUDY / "replay/H0/rep1/record.json").unlink(missing_ok=True)
    workflow = Workflow.start(checkout, *TABLES)
    workflow.until(python_of("study-a run"))
    workflow.kill_all()
    recover("unlocked")

    # The scheduler while it scores, and again while a table is made.
    for command in ("study-a score", "study-a table"):
        workflow = Workflow.start(checkout, *TABLES)
        job = held(workflow, command)
        workflow.kill()
        recover("waited for", "unlocked", let_go=job)

    workflow = Workflow.start(checkout, *TABLES)
    assert workflow.wait() == 0, workflow.log.read_text()
    undisturbed, found = digests(finished.checkout), digests(checkout)
    assert set(found) <= set(undisturbed) and any(name.endswith("score.json") for name in found)
    assert {name: sha256 for name, sha256 in found.items() if undisturbed[name] != sha256} == {}
    assert {name for name in undisturbed if name.startswith(STUDY)} - set(found) <= {
        f"{STUDY}/superseded.json",
        f"{STUDY}/control.json",
    }
    done = checkout.command("routeblock", "verify", "results")
    assert done.returncode == 0, done.stdout
