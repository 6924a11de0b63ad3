# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from study import MORE, Finished, Workflow, prepare, trace_by_hand


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    if "DEV" in __import__("os").environ:
        __import__("shutil").rmtree("/tmp/rr/und/traces/by_hand", ignore_errors=True)
        f = Finished(__import__("checkout").Checkout(Path("/tmp/rr/und/checkout")), Path("/tmp/rr/und/traces"))
        trace_by_hand(f)
        return f
    folder = tmp_path_factory.mktemp("undisturbed")
    made = Finished(prepare(folder / "checkout"), folder / "traces")
    made.traces.mkdir()
    workflow = Workflow.start(made.checkout, *MORE, trace=made.traces)
    assert workflow.wait() == 0, workflow.log.read_text()
    trace_by_hand(made)
    return made
