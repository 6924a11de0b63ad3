# SPDX-License-Identifier: Apache-2.0
"""What is declared once: a table or a figure. Rule, command, caption, report and README follow from its declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from routeblock.errors import InputError


@dataclass(frozen=True)
class Declared:
    """A table or a figure by its name; the docstring of what makes it is its caption, the first line its question."""

    name: str

    @property
    def made_by(self) -> Callable[..., Any]:
        """The function that gives its rows or draws it."""
        raise NotImplementedError

    @property
    def module(self) -> str:
        """The module whose code, with all that it imports, makes it."""
        return self.made_by.__module__

    @property
    def question(self) -> str:
        """What a reader asks of it, one line."""
        return inspect.cleandoc(self.made_by.__doc__ or "").partition("\n")[0]

    @property
    def caption(self) -> str:
        """The question and what a reader must know beside it, in reStructuredText."""
        return inspect.cleandoc(self.made_by.__doc__ or "") + "\n"


Kind = TypeVar("Kind", bound=Declared)


def by_name(*found: Kind) -> dict[str, Kind]:
    """Tables or figures by their names, in this order."""
    return {one.name: one for one in found}


def find(name: str, known: Mapping[str, Kind], kind: str) -> Kind:
    """The table or figure (`kind`) of this name. Raises InputError if there is none."""
    if name not in known:
        raise InputError(
            f"no {kind} is called {name!r}",
            where=f"{kind}s",
            limit=f"known ones are {', '.join(known)}",
            way_out="name one of them",
        )
    return known[name]
