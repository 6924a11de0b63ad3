# SPDX-License-Identifier: Apache-2.0
"""What the committed protocols of the studies share: strict models, one line of refusal, the order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routeblock.errors import InputError
from routeblock.evidence.digest import sha256_json

T = TypeVar("T")
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Strict(BaseModel):
    """A part of a committed file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Bootstrap(Strict):
    """The interval of every change: the parameters of `stats.paired_change`."""

    seed: Seed
    resamples: Count
    confidence: Annotated[float, Field(gt=0, lt=1)]


class Whole(Strict):
    """A whole protocol: fixtures/protocols/{name}.json."""

    def digest(self) -> str:
        """SHA-256 of the canonical JSON: what a record carries."""
        return sha256_json(self.model_dump(mode="json"))

    def unlike(self, carried: str) -> list[str]:
        """One line if a record carries the digest of another protocol, else none."""
        mine = self.digest()
        return [f"carries protocol {carried[:12]}, the given one is {mine[:12]}"] if carried != mine else []


Protocol = TypeVar("Protocol", bound=Whole)


def read(path: Path, kind: type[Protocol], name: str) -> Protocol:
    """Read the protocol of the study `name`. Raises InputError if it cannot be read or has unknown keys."""
    try:
        return kind.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as e:
        what = f"not a protocol: {fault(e)}"
        raise refuse(what, path, "the fields of Protocol and no others are allowed", name) from e


def refuse(what: str, path: Path, limit: str, name: str) -> InputError:
    """The error for a file that is no protocol of the study `name`."""
    return InputError(what, where=str(path), limit=limit, way_out=f"start from fixtures/protocols/{name}.json")


def fault(error: Exception) -> str:
    """What is wrong with a file, on one line: of a model the first field that does not fit."""
    if not isinstance(error, ValidationError):
        return str(error)
    detail = error.errors()[0]
    return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"


def each_once(series: Sequence[str], named: Iterable[str], path: Path, name: str) -> None:
    """Raises InputError unless every series that the protocol names is one of its `series`."""
    for wanted in named:
        if (there := series.count(wanted)) != 1:
            raise refuse(f"series {wanted!r} is there {there} times", path, f"series are {', '.join(series)}", name)


def ordered(series: tuple[T, ...], repetition: int) -> tuple[T, ...]:
    """The order of series in one repetition: after 2n repetitions of n series each has stood in each place twice."""
    start = repetition // 2 % len(series)
    order = series[start:] + series[:start]
    return order[::-1] if repetition % 2 else order
