# SPDX-License-Identifier: Apache-2.0
"""The detail of `predict` as lines for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LISTED = 20  # experts of a routing
CHANGES = 5  # changes of class

_ANSWERS = {True: "stops it", False: "does not", None: "cannot say"}


def lines(detail: dict[str, Any]) -> list[str]:
    """The lines: the partition of single routings, between runs, other grids, between batches."""
    found = []
    for ranks in detail["partition"]:
        for part in ranks:
            where = f", rank {part['rank']}" if len(ranks) > 1 else ""
            found.append(
                f"{part['tokens']} tokens{where}: {part['routes']} routes in {part['blocks']} blocks of"
                f" {part['block_size']}"
            )
            for gemm, cut in part["gemms"].items():
                first = f", the first in block {cut['first_split'][0]}" if cut["first_split"] else ""
                found.append(
                    f"  {gemm.upper():3} {tuple(cut['launch'][:2])} on {cut['launch'][2]}: {part['blocks']} x"
                    f" {cut['n_tiles']} = {cut['tiles']} tiles of {cut['k_tiles']} K-tiles,"
                    f" {cut['direct_tiles']} direct, {cut['split_tiles']} split{first}{_slices(cut['slices_at_most'])}"
                )
            for expert in part["parted_experts"][:LISTED]:
                classes = ", ".join(f"{n} classes in {g.upper()}" for g, n in expert["classes"].items() if n > 1)
                found.append(
                    f"  expert {expert['expert']}: blocks {expert['blocks'][0]} to {expert['blocks'][1]}, {classes};"
                    f" routes {_short(expert['routes'])}"
                )
            if (more := len(part["parted_experts"]) - LISTED) > 0:
                found.append(f"  ... and {more} more experts: see --json")
    runs = detail["runs"]
    found.append(
        f"between runs ({runs['order']} order): {runs['can_differ']:,} of {runs['routings']:,} routings can differ;"
        f" {runs['straddling_experts']:,} experts straddle a boundary, {runs['parted_experts']:,} with blocks cut"
        f" differently; routes that can change: {runs['routes_that_can_change']['w13']:,} in W13,"
        f" {runs['routes_that_can_change']['w2']:,} in W2; outcomes of a routing at most {runs['outcomes_at_most']}"
    )
    if detail["other_grids"]:
        grids = ", ".join(f"{g['grid']}: {g['routes_that_can_change']:,}" for g in detail["other_grids"])
        found.append(f"routes that can change between runs on other grids: {grids}")
    if detail.get("batches"):
        swept = detail["batches"]
        found.append(
            f"between batches of {swept['sizes'][0]} to {swept['sizes'][1]} tokens (token {swept['token']}, canonical"
            f" order): {swept['classes']:,} classes, {swept['changes']:,} changes"
        )
        for change in swept["first_changes"][:CHANGES]:
            launches = ", ".join(f"{g.upper()} {tuple(x)}" for g, x in change["launches"].items())
            found.append(
                f"  from {change['tokens']}: class {change['class']}, blocks of {change['block_size']}, {launches}"
            )
    return found


def options_lines(options: Sequence[dict[str, Any]]) -> list[str]:
    """What would stop it, a line an option."""
    return [
        "what would stop it, cheapest first",
        f"  {'between runs':>14}  {'batches':>10}",
        *(
            f"  {_ANSWERS[o['runs']]:>14}  {_ANSWERS[o['batches']]:>10}  {o['option']}: {o['reason']};"
            f" cost: {o['cost']}"
            for o in options
        ),
    ]


def _slices(most: int) -> str:
    if most == 1:
        return ""
    order = "whose order cannot matter" if most == 2 else "added from the last to the first"
    return f", at most {most} slices a tile, {order}"


def _short(routes: Sequence[int]) -> str:
    shown = ", ".join(map(str, routes[:16]))
    return shown if len(routes) <= 16 else f"{shown}, ... ({len(routes)})"
