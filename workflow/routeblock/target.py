# SPDX-License-Identifier: Apache-2.0
"""A table or figure as its rule makes it: the files that it is made from, and the options that name them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from routeblock.declared import Declared
from routeblock.evidence.manifest import SUFFIX


@dataclass(frozen=True)
class Given:
    """Files that a command reads: named by an option, or found beside others where `option` is empty."""

    option: str
    files: tuple[str, ...]
    folder: bool = False
    """The option names their folders."""

    @property
    def arguments(self) -> list[str]:
        """The words of the command line that name them."""
        named = dict.fromkeys(str(Path(file).parent) if self.folder else file for file in self.files)
        return [word for name in named for word in (f"--{self.option}", name)] if self.option else []


@dataclass(frozen=True)
class Target:
    """What a rule needs: the declaration, its command, how Snakemake's report files it, and what it is made from."""

    declared: Declared
    command: str
    category: str
    given: tuple[Given, ...]

    @property
    def name(self) -> str:
        """The name of the table or figure."""
        return self.declared.name

    @property
    def module(self) -> str:
        """The module whose code makes it."""
        return self.declared.module

    @property
    def inputs(self) -> list[str]:
        """Every file that it is made from."""
        return [file for given in self.given for file in given.files]

    @property
    def seals(self) -> list[str]:
        """The manifests of the documents that it is made from."""
        documents = (file for given in self.given if given.option == "from" for file in given.files)
        return [str(Path(document).with_suffix(SUFFIX)) for document in documents]

    @property
    def arguments(self) -> list[str]:
        """The words of its command line that name them."""
        return [word for given in self.given for word in given.arguments]


def from_tables(figures: Iterable[Declared], command: str, category: str) -> list[Target]:
    """Figures that are each drawn from the table of their name alone."""
    return [Target(f, command, category, (Given("from", (f"results/tables/{f.name}.parquet",)),)) for f in figures]
