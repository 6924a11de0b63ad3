# SPDX-License-Identifier: Apache-2.0
"""Where this user's caches go: the usual place, or a private folder among the temporary files, or nowhere."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

NAME = "routeblock"


def cache_folder() -> Path | None:
    """A folder for caches that takes files, made if need be; None if there is none. What is in it may vanish.

    `$XDG_CACHE_HOME/routeblock`, `~/.cache/routeblock`, or `routeblock-UID` among the temporary files, if that one is
    this user's alone: what others can write is not loaded as code.
    """
    for folder, is_private in _candidates():
        with suppress(OSError):
            folder.mkdir(mode=0o700 if is_private else 0o777, parents=not is_private, exist_ok=True)
            if os.access(folder, os.W_OK) and (not is_private or _is_ours_alone(folder)):
                return folder
    return None


def _candidates() -> Iterator[tuple[Path, bool]]:
    if configured := os.environ.get("XDG_CACHE_HOME"):
        yield Path(configured) / NAME, False
    with suppress(RuntimeError):  # a user without a home
        yield Path.home() / ".cache" / NAME, False
    with suppress(OSError):  # no folder for temporary files
        yield Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}", True


def _is_ours_alone(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
