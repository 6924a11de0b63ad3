# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import LAUNCH, Study, make_study

from routeblock.route_block.scorer import operating_points


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """The published launch is that of the small study; returns the scorer's own."""
    own = operating_points.PUBLISHED
    monkeypatch.setattr(operating_points, "PUBLISHED", LAUNCH)
    return own


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A sound study of the protocol's five replicates; not to be changed."""
    return make_study(tmp_path_factory.mktemp("sound") / "study")


@pytest.fixture
def study(sound: Study, tmp_path: Path) -> Study:
    """A copy of the sound study to damage."""
    return sound.copy(tmp_path / "study")
