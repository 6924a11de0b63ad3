# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from study import MORE, Finished, Workflow, prepare, trace_by_hand


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("undisturbed")
    made = Finished(prepare(folder / "checkout"), folder / "traces")
    made.traces.mkdir()
    workflow = Workflow.start(made.checkout, *MORE, trace=made.traces)
    assert workflow.wait() == 0, workflow.log.read_text()
    trace_by_hand(made)
    return made
