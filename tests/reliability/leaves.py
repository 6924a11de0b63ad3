# SPDX-License-Identifier: Apache-2.0
"""Leaves of JSON documents, and other values for them that a forger could write."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from typing import Any

Random = random.Random
Place = tuple[Any, ...]

_DIGEST = re.compile(r"[0-9a-f]{64}")


def leaves(value: Any, at: Place = ()) -> Iterator[Place]:
    """Every place of a value that is neither a list nor a mapping, and of an empty one."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    empty = True
    for key, inner in entries:
        empty = False
        yield from leaves(inner, (*at, key))
    if empty and at:
        yield at


def get(value: Any, at: Place) -> Any:
    """What stands at a place."""
    for key in at:
        value = value[key]
    return value


def put(value: Any, at: Place, new: Any) -> None:
    """Write a place."""
    get(value, at[:-1])[at[-1]] = new


def other(value: Any, rng: Random, known: list[Any]) -> Any:
    """Another value of the same kind: one that stands elsewhere in `known`, or a neighbour."""
    if isinstance(value, bool):
        return not value
    alike = [x for x in known if type(x) is type(value) and x != value]
    if alike and rng.random() < 0.5:
        return rng.choice(alike)
    if isinstance(value, int):
        return value + rng.choice((1, -1, 2, 7, -value - 1 or 5))
    if isinstance(value, float):
        return rng.choice((math.nextafter(value, math.inf), value * 1.01 + 1e-6, -value - 1.0))
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        place = rng.randrange(64)
        return value[:place] + rng.choice([c for c in "0123456789abcdef" if c != value[place]]) + value[place + 1 :]
    if isinstance(value, str):
        return rng.choice((value + "x", value[:-1] if value else "x", value.swapcase() + "_", "other"))
    if value is None:
        return rng.choice((0, "", "x" * 64, False))
    return [0] if value == [] else {"x": 0}  # an empty list or mapping


def edit_leaf(document: Any, rng: Random) -> Place:
    """Give one leaf another value; where."""
    places = list(leaves(document))
    at = rng.choice(places)
    alike = [get(document, p) for p in places if p[-1:] == at[-1:]] if isinstance(at[-1], str) else []
    put(document, at, other(get(document, at), rng, alike))
    return at
