# SPDX-License-Identifier: Apache-2.0
"""Figures: svg files as images inside the page. As an image a drawing can neither run nor load anything."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from routeblock.errors import InputError

_NUMBER = re.compile(r"[0-9.]+")
_TO_PX = {"pt": 96 / 72, "px": 1.0, "": 1.0, "in": 96.0, "mm": 96 / 25.4, "cm": 96 / 2.54}


@dataclass(frozen=True)
class Figure:
    """A drawing: its bytes as a data URI, its size in CSS pixels."""

    name: str
    uri: str
    width: int
    height: int


def read(folder: Path, name: str) -> Figure:
    """Read `{name}.svg`. Raises InputError where it is missing or no drawing with a size."""
    path = folder / f"{name}.svg"
    try:
        data = path.read_bytes()
        root = ElementTree.fromstring(data)
        if root.tag.rpartition("}")[2] != "svg":
            raise ValueError(f"its root is {root.tag}")
        width, height = _size(root)
    except (OSError, ElementTree.ParseError, ValueError) as e:
        raise InputError(
            f"no readable drawing: {str(e).splitlines()[0]}",
            where=str(path),
            limit="the report needs every figure of the study as svg",
            way_out=f"build it: .venv/bin/snakemake --cores 2 -- figure_{name}",
        ) from e
    return Figure(name, f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}", width, height)


def _size(root: ElementTree.Element) -> tuple[int, int]:
    if box := root.get("viewBox"):
        sizes = [float(x) for x in box.replace(",", " ").split()[2:]]
        unit = "pt" if (root.get("width") or "").endswith("pt") else ""
        return round(sizes[0] * _TO_PX[unit]), round(sizes[1] * _TO_PX[unit])
    found = []
    for name in ("width", "height"):
        text = root.get(name) or ""
        number = _NUMBER.match(text)
        if number is None or (unit := text[number.end() :]) not in _TO_PX:
            raise ValueError("it has no size")
        found.append(round(float(number[0]) * _TO_PX[unit]))
    return found[0], found[1]
