# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import Study, make_study


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A sound study of the protocol's five replicates; not to be changed."""
    return make_study(tmp_path_factory.mktemp("sound") / "study")


@pytest.fixture
def study(sound: Study, tmp_path: Path) -> Study:
    """A copy of the sound study to damage."""
    return sound.copy(tmp_path / "study")
