# SPDX-License-Identifier: Apache-2.0
"""A progress bar for long calls, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def shown(title: str) -> Iterator[Callable[[float], None]]:
    """Give a function that takes the share done, 0 to 1; nothing is shown where stderr is no terminal."""
    with Progress(console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda done: bar.update(task, completed=done)
