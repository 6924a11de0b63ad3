# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import fcntl
import os

import pytest
from study import MORE, OFFLINE, Finished, Workflow, can_be_offline, prepare, trace_by_hand


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One for all workers of pytest: whoever comes first makes it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "undisturbed"
    made = Finished(folder / "checkout", folder / "traces")
    with folder.with_name("undisturbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            folder.mkdir()
            made.traces.mkdir()
            prepare(made.root)
            # All that it needs is here: without a network it is the same study.
            before = OFFLINE if can_be_offline() else []
            workflow = Workflow.start(made.checkout, *MORE, trace=made.traces, before=before)
            assert workflow.wait() == 0, workflow.log.read_text()
            trace_by_hand(made)
            (folder / "whole").touch()
    return made
