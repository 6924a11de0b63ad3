# SPDX-License-Identifier: Apache-2.0
"""Before numba is imported anywhere: a pool large enough for every thread count of the study. What an svg says."""

import os

os.environ.setdefault("NUMBA_NUM_THREADS", "4")

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest


@pytest.fixture(scope="session")
def words() -> Callable[[Path], str]:
    """The text elements of an svg, a line each: what a reader can search for and a screen reader says."""

    def read(path: Path) -> str:
        found = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
        return "\n".join("".join(element.itertext()) for element in found)

    return read
