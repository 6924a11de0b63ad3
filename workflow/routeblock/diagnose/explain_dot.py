# SPDX-License-Identifier: Apache-2.0
"""Two summation trees as Graphviz dot in FPRev's form: inner nodes are additions, leaves the summands by their index.

A tensor-core step adds its products at once, so its summands are one leaf (`#32:48`, k 32 to 47). Additions that both
trees share are grey.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from routeblock.diagnose.summation_tree import Kind

Document = Mapping[str, Any]
GREY, OWN = "#b8b8b8", ("#0b2a4a", "#c04f15")


def dot(document: Document) -> str:
    """The trees of the origin of an explanation, one subgraph each."""
    origin = document["chain"][-1]
    lines = [
        "digraph summation {",
        '  graph [ordering=out, rankdir=TB, fontname="sans-serif", labelloc=t];',
        '  node [shape=circle, fixedsize=true, width=0.35, label="+", fontname="sans-serif"];',
        "  edge [arrowhead=none];",
    ]
    for side, (tree, facts) in enumerate(zip(origin["trees"], origin["sides"], strict=True)):
        name = f"{origin['surface']}[{origin['row']}, {origin['column']}], {facts['run']}: block {facts['block']}"
        lines += [f"  subgraph cluster_{side} {{", f'    label="{_quoted(name)}"; color="{OWN[side]}";']
        lines += [f"    {line}" for line in _nodes(tree["nodes"], side)]
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


def _nodes(nodes: Sequence[Document], side: int) -> Iterator[str]:
    for index, node in enumerate(nodes):
        colour = GREY if node["shared"] else OWN[side]
        me, (first, stop) = f"n{side}_{index}", node["k"]
        label = "+" if node["operation"] in (Kind.STEP, Kind.WARPS, Kind.SLICES) else "rd"
        yield (
            f'{me} [label="{label}", color="{colour}", fontcolor="{colour}",'
            f' tooltip="{node["operation"]}, k {first} to {stop - 1}: {node["result"]}"];'
        )
        for operand in node["operands"]:
            yield f'{me} -> n{side}_{operand} [color="{colour}"];'
        if node["operation"] == Kind.STEP:
            yield f'{me}_k [shape=plaintext, fixedsize=false, label="#{first}:{stop}", fontcolor="{colour}"];'
            yield f'{me} -> {me}_k [color="{colour}"];'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
