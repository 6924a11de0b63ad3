# SPDX-License-Identifier: Apache-2.0
"""Which packages run here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """The version of each package; None where it is not installed."""
    return {name: _version(name) for name in packages}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
