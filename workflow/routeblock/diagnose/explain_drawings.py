# SPDX-License-Identifier: Apache-2.0
"""An explanation as files to look at: the figure, and the two trees as Graphviz dot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from routeblock import figure_style
from routeblock.diagnose.answer import load_answer
from routeblock.diagnose.explain_dot import dot
from routeblock.diagnose.explain_figure import draw
from routeblock.errors import InputError
from routeblock.evidence.files import atomic_file
from routeblock.evidence.manifest import SUFFIX, seal

TITLE = "Two summation trees of one element"


def _check(document: Mapping[str, Any], where: str) -> None:
    chain = document.get("chain")
    if not chain or "trees" not in chain[-1]:
        raise InputError(
            "there are no two trees to draw",
            where=where,
            limit="an explanation of an element that comes from a GEMM in both runs",
            way_out="explain an element that differs (routeblock explain --out)",
        )


def write_dot(document: Mapping[str, Any], path: Path) -> None:
    """Write the trees of an explanation as dot."""
    _check(document, "--dot")
    with atomic_file(path) as tmp:
        tmp.write_text(dot(document), encoding="utf-8")


def write_svg(document: Mapping[str, Any], path: Path) -> None:
    """Write the figure of an explanation as svg."""
    _check(document, "--svg")
    with figure_style.look(), atomic_file(path) as tmp:
        draw(document).savefig(tmp, format="svg", metadata={"Date": None, "Creator": None, "Title": TITLE})


def write_sealed(source: Path, out: Path) -> None:
    """Write explain.svg, explain.png and explain.dot of an answer's file to `out`, sealed."""
    document = load_answer(source)["detail"]
    _check(document, str(source))
    with figure_style.look():
        files = figure_style.save(draw(document), out, "explain", title=TITLE)
    path = out / "explain.dot"
    write_dot(document, path)
    seal(
        out / f"explain{SUFFIX}", rule="figure_explain", outputs=[*files, path], inputs=[source], parameters={},
        modules=[__name__],
    )  # fmt: skip
