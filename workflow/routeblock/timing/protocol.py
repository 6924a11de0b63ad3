# SPDX-License-Identifier: Apache-2.0
"""Committed protocols: strict models, the rules of acceptance, the order of a repetition."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from routeblock.cuda.telemetry import CLOCK_EVENTS
from routeblock.errors import UNREADABLE, InputError
from routeblock.evidence.digest import sha256_json
from routeblock.evidence.files import small_document

T = TypeVar("T")
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Strict(BaseModel):
    """A part of a committed file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Bootstrap(Strict):
    """The parameters of every interval: see `estimate.paired_change`."""

    seed: Seed
    resamples: Count
    confidence: Annotated[float, Field(gt=0, lt=1)]


class Rejection(StrEnum):
    """Why a batch is rejected."""

    THROTTLED = "throttled"
    OTHER_PROCESS = "other_process"
    LATE = "late"
    INCORRECT = "incorrect"


def _known_event(name: str) -> str:
    if name not in CLOCK_EVENTS:
        raise ValueError(f"{name!r} is none of {', '.join(CLOCK_EVENTS)}")
    return name


class Acceptance(Strict):
    """When a batch counts. A study's protocol adds the rest before a retry under its own name."""

    attempts: Count
    throttle_reasons: tuple[Annotated[str, AfterValidator(_known_event)], ...]
    reject: dict[Rejection, str]
    rule: str

    @property
    def rest_s(self) -> float:
        """Seconds of rest before another attempt."""
        return 0.0

    @property
    def retries(self) -> int | None:
        """How many retries a stage may have in all; None: no limit but `attempts`."""
        return None


class Whole(Strict):
    """A whole protocol: fixtures/protocols/{name}.json."""

    name: str

    def digest(self) -> str:
        """SHA-256 of the canonical JSON: a record carries it."""
        return sha256_json(self.model_dump(mode="json"))


Protocol = TypeVar("Protocol", bound=Whole)


def read(path: Path, kind: type[Protocol], name: str) -> Protocol:
    """Read the protocol of the study `name`. Raises InputError if it cannot be read or has unknown keys."""
    try:
        return kind.model_validate(json.loads(small_document(path)))
    except UNREADABLE as e:
        what = f"not a protocol: {fault(e)}"
        raise refuse(what, path, "the fields of Protocol and no others are allowed", name) from e


def refuse(what: str, path: Path, limit: str, name: str) -> InputError:
    """The error for a file that is no protocol of the study `name`."""
    return InputError(what, where=str(path), limit=limit, way_out=f"start from fixtures/protocols/{name}.json")


def fault(error: Exception) -> str:
    """Why a file is refused, on one line: of a model the first field that does not fit."""
    if not isinstance(error, ValidationError):
        return str(error)
    detail = error.errors()[0]
    return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"


def each_once(series: Sequence[str], named: Iterable[str], path: Path, name: str) -> None:
    """Raises InputError unless every series that the protocol names is one of its `series`."""
    for wanted in named:
        if (there := series.count(wanted)) != 1:
            raise refuse(f"series {wanted!r} is there {there} times", path, f"series are {', '.join(series)}", name)


def balanced(series: Sequence[T], repetition: int) -> tuple[T, ...]:
    """The order of series in one repetition: after 2n repetitions of n series each has stood in each place twice."""
    start = repetition // 2 % len(series)
    order = (*series[start:], *series[:start])
    return order[::-1] if repetition % 2 else order
