# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic import LAUNCH, Study, make_study

from routeblock.route_block.scorer import operating_points


@pytest.fixture(autouse=True, scope="session")
def published() -> Iterator[tuple[int, int, int]]:
    """The scorer's published launch, in whose place that of the small study stands meanwhile."""
    own = operating_points.PUBLISHED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operating_points, "PUBLISHED", LAUNCH)
        yield own


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A sound study of the protocol's five replicates; not to be changed."""
    return make_study(tmp_path_factory.mktemp("sound") / "study")


@pytest.fixture
def study(sound: Study, tmp_path: Path) -> Study:
    """A copy of the sound study to damage."""
    return sound.copy(tmp_path / "study")
